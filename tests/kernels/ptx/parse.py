"""The text of a PTX kernel -> a list of instructions, with labels and registers replaced by numbers."""

import re
from typing import NamedTuple, TypeAlias


class Fault(Exception):
    """What a GPU would not run, or what this emulator does not cover."""


class Register(NamedTuple):
    name: str
    number: int
    bits: int  # 1: a predicate


class Immediate(NamedTuple):
    value: int  # of a floating-point number its bits


class Special(NamedTuple):
    name: str  # %tid.x, ..


class Address(NamedTuple):
    base: "Register | Immediate | str"  # str: the name of a parameter
    offset: int


class Negated(NamedTuple):
    register: Register


Operand: TypeAlias = "Register | Immediate | Special | Address | Negated | str | tuple[Operand, ...]"


class Instruction(NamedTuple):
    name: str  # "ld"
    qualifiers: tuple[str, ...]  # ("global", "v4", "b32")
    operands: tuple[Operand, ...]
    guard: Register | Negated | None  # runs in the threads where it is true
    text: str
    source: str  # where in Python it comes from

    def __str__(self) -> str:
        return f"{self.source}: {self.text}" if self.source else self.text


class Program:
    """One kernel: its ``code``, the parameters' names in order, and how many threads a program has."""

    SHARED_SYMBOL = "global_smem"  # Triton's only variable in shared memory; it is at address 0

    def __init__(self, ptx: str) -> None:
        head, _, body = ptx[ptx.index(".entry") :].partition("\n{")
        self.name = re.findall(r"\.entry\s+(\w+)", head)[0]
        self.params: list[str] = re.findall(r"\.param\s[^,)]*?(\w+)\s*(?=,|\n\))", head)
        self.threads = int(re.findall(r"\.reqntid\s+(\d+)", head)[0])
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, Register] = {}
        self._widths: dict[str, int] = {}  # "%rd" -> 64
        self._read(body[: re.search(r"^\}", body, re.M).start()])  # type: ignore[union-attr]

    def _read(self, body: str) -> None:
        source = statement = ""
        for line in body.splitlines():
            if found := re.search(r"\.loc\s.*//\s*(\S+)", line):
                source = found[1]
            line = line.split("//")[0].strip()
            if line.startswith((".loc", ".pragma", ".file")):
                continue
            while found := re.match(r"(\$\w+):\s*", line):
                self.labels[found[1]] = len(self.code)
                line = line[found.end() :]
            *whole, rest = (statement + " " + line).split(";")
            for text in whole:
                self._statement(text.strip(), source)
            statement = rest

    def _statement(self, text: str, source: str) -> None:
        text = text.lstrip("{} \t")  # a scope of its own, of inline assembly
        if not text:
            return
        if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%?\w+)(?:<\d+>)?", text):
            self._widths[found[2]] = 1 if found[1] == "pred" else int(found[1][1:])
            return
        guard = None
        rest = text
        if found := re.match(r"@(!?)(%\w+)\s+", text):
            guard = self._operand(found[1] + found[2])
            rest = text[found.end() :]
        found = re.fullmatch(r"([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", rest, re.S)
        if found is None:
            raise Fault(f"not an instruction that is known: {text}")
        operands = tuple(self._operand(x) for x in _split(found[3]))
        assert guard is None or isinstance(guard, (Register, Negated))
        # A program's own shared memory, however the compiler writes it
        qualifiers = tuple(found[2].replace("shared::cta", "shared").split(".")[1:])
        self.code.append(Instruction(found[1], qualifiers, operands, guard, text, source))

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self._operand(x) for x in _split(text[1:-1]))
        if text.startswith("["):
            base, _, offset = text[1:-1].replace(" ", "").partition("+")
            inner = self._operand(base)
            assert isinstance(inner, (Register, Immediate, str)), text
            return Address(inner, int(offset or "0", 0))
        if "|" in text:  # two destinations
            return tuple(self._operand(x) for x in text.split("|"))
        if text.startswith("!"):
            inner = self._operand(text[1:])
            assert isinstance(inner, Register), text
            return Negated(inner)
        if text.startswith("%") or text in self._widths:
            return self._register(text)
        if text == self.SHARED_SYMBOL:
            return Immediate(0)
        if re.match(r"0[fd]", text):
            return Immediate(int(text[2:], 16))
        if re.match(r"-?\d", text):
            return Immediate(int(text.rstrip("U"), 0))
        return text  # a label, a parameter, or _

    def _register(self, name: str) -> Register | Special:
        if (kind := re.sub(r"\d+$", "", name)) not in self._widths:
            return Special(name)
        return self.registers.setdefault(name, Register(name, len(self.registers), self._widths[kind]))


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]
