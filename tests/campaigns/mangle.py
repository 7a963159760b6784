"""What the fuzzing feeds: arguments, options, JSON and files, made of good ones by random changes."""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from linrope.common.files import digest, save_tensors

STRANGE = [
    "", " ", "-", "--", "0", "-1", "1", "2", "3", "7", "1e9", "1e-9", "nan", "inf", "-inf", "1.5", "0x10", "１２",
    "∞", "true", "null", "[]", "{}", "none", "elu+1", "favor+", "softmax", "hedgehog", "learned", "retnet",
    "selective", "half", "rope", "alibi", "taylor2", "../../etc/passwd", "/dev/null", "/dev/zero",
    "/dev/full", "/proc", "~", "\udcff", "x" * 300, "a" * 5000, "\u0000", "\n", "9" * 30, "-" + "9" * 30,
    "18446744073709551616", "2147483648", "cuda", "cuda:99", "meta", "cpu:1", "%s", "{text}", "$HOME", "None",
    "spread", "bfloat16", "float16", "native",
]  # fmt: skip
_OPTIONS = {
    "train": "out config steps batch-size accumulation sequence-length pieces gradients-through-pieces "
    "learning-rate warmup-steps weight-decay clip tokenizer embed-dim layers heads feature-map attention "
    "rotary decay forget-gate short-conv qk-norm seed save-every resume device stepz help",
    "generate": "checkpoint prompt max-new-tokens temperature top-k top-p seed device",
    "eval": "checkpoint length sequences out device",
    "convert": "out text feature-map rope-order keep-softmax match-steps rank",
    "bench": "help dtype lengths backend compare feature-map decay decode-at",
    "env": "json no",
    "dance": "help",
}
OPTIONS = {command: [f"--{name}" for name in names.split()] for command, names in _OPTIONS.items()}
FLAGS = ("--gradients-through-pieces", "--forget-gate", "--qk-norm", "--resume", "--help", "--json", "--no")
TINY = "--steps 1 --embed-dim 8 --layers 1 --heads 2 --batch-size 1 --sequence-length 16"
WORKING = {
    "train": f"{{text}} --out {{place}}/run {TINY}",
    "generate": "--checkpoint {run} --prompt a --max-new-tokens 2 --seed 1",
    "eval": "--checkpoint {run} --length 16 --sequences 1 --out {place}",
    "convert": "{place} --out {place}/converted --text {text}",
    "bench": "--lengths x --out {place}",  # what would work takes too long
}


def working(name: str, text: Path, run: Path, place: Path) -> list[str]:
    """Options with which the command works."""
    return [x.format(text=text, run=run, place=place) for x in WORKING.get(name, "").split()]


def command_line(chance: random.Random, text: Path, run: Path, place: Path) -> list[str]:
    """Options that work, some with other values, some left out, some added."""
    name = chance.choices(list(OPTIONS), (50, 20, 12, 6, 6, 3, 3))[0]
    parts = working(name, text, run, place)
    values = [*STRANGE, str(text), str(run), str(place)]
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        kind = chance.choice(["value", "value", "add", "add", "drop", "swap"])
        if kind == "add":
            option = chance.choice(OPTIONS[name])
            parts += [option] if option in FLAGS else [option, chance.choice(values)]
        elif kind == "value" and parts:
            parts[chance.randrange(len(parts))] = chance.choice(values)
        elif kind == "drop" and parts:
            del parts[chance.randrange(len(parts))]
        elif parts:
            chance.shuffle(parts)
    if name == "train" and not any(x.startswith("--out") for x in parts):
        parts += ["--out", str(place / "run")]
    if name == "train" and not any(str(text) == x for x in parts):
        parts += [str(text)]  # else it takes Python's standard library
    where = chance.choice([0, 0, 0, 0, len(parts)])
    parts = [*parts[:where], name, *parts[where:]] if chance.random() < 0.98 else parts
    return parts if chance.random() < 0.99 else [*chance.choices(values, k=3)]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that JSON has."""
    kind = chance.choice(["text", "number", "number", "none", "bool", "list", "dict"])
    if kind in ("list", "dict") and depth < 3:
        inner = [value(chance, depth + 1) for _ in range(chance.randrange(4))]
        keys = "name longest base num_features rank seed inner scaling x theta axes"
        return inner if kind == "list" else {chance.choice(keys.split()): x for x in inner}
    if kind == "number":
        whole = (0, 1, -1, 2, 3, 7, 8, 64, 2**31, 2**63, 2**70, 10**400)
        numbers = [*whole, 0.5, 1e300, -1e-300, float("nan"), float("inf")]
        return chance.choice(numbers)
    return {"none": None, "bool": chance.random() < 0.5}.get(kind, chance.choice(STRANGE))


def json_like(chance: random.Random, text: str) -> bytes:
    """A JSON object with some of its values, or of its bytes, changed."""
    content = json.loads(text)
    for _ in range(chance.choice([1, 1, 2, 4])):
        kind = chance.choice(["set", "set", "set", "add", "drop", "inner"])
        key = chance.choice([*content, "x"])
        if kind == "drop":
            content.pop(key, None)
        elif kind == "inner" and isinstance(content.get(key), dict) and content[key]:
            content[key][chance.choice([*content[key], "x"])] = value(chance)
        else:
            content[key if kind != "add" else chance.choice(STRANGE)] = value(chance)
        if not content:
            content["x"] = 1
    made = json.dumps(content).encode("utf-8", "surrogatepass")
    return made if chance.random() < 0.7 else damaged(chance, made)


def options(chance: random.Random) -> bytes:
    """Options of train in a file."""
    names = [x[2:] for x in OPTIONS["train"] if x not in ("--out", "--tokenizer", "--help")]
    content = {chance.choice(names): value(chance, 2) for _ in range(chance.choice([0, 1, 1, 2, 3]))}
    content.update(dict.fromkeys(["resume"] * (chance.random() < 0.02), True))
    if chance.random() < 0.5:
        made = json.dumps(content).encode("utf-8", "surrogatepass")
    else:
        given = (
            (name, chance.choice(STRANGE) if chance.random() < 0.5 else x) for name, x in content.items()
        )
        lines = [f"{name}: {x}" for name, x in given]
        odd = ["", "- a", "&a [*a]", "!!python/object/apply:os.system ['true']", "<<: *x", "\t"]
        lines.append(chance.choice(odd))
        made = "\n".join(lines).encode("utf-8", "surrogatepass")
    return made if chance.random() < 0.8 else damaged(chance, made)


def damaged(chance: random.Random, content: bytes) -> bytes:
    """Cut off, with bits flipped, pieces repeated, moved, zeroed or put in."""
    x = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(x) + 1)
        to = min(len(x), at + chance.choice([1, 2, 8, 64]))
        kind = chance.choice(["cut", "flip", "flip", "flip", "zero", "repeat", "insert", "remove", "swap"])
        if kind == "cut":
            del x[at:]
        elif kind == "flip" and at < len(x):
            x[at] ^= 1 << chance.randrange(8)
        elif kind == "zero":
            x[at:to] = bytes(to - at)
        elif kind == "repeat":
            x[at:at] = x[at:to]
        elif kind == "insert":
            x[at:at] = chance.randbytes(chance.choice([1, 8, 100]))
        elif kind == "remove":
            del x[at:to]
        else:
            x[at:to], x[: to - at] = x[: to - at], x[at:to]
    return bytes(x)


def _reshaped(shape: object) -> list[object]:
    """Unless it is one of these already."""
    return [shape[::-1], [*shape, 1]] if isinstance(shape, list) else []


def safetensors_like(chance: random.Random, content: bytes) -> bytes:
    """A header with other entries, its length right, over the same bytes: as someone writes on purpose."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    for _ in range(chance.choice([1, 1, 2, 3])):
        name = chance.choice([*header, "x"])
        own = header.get(name)
        kind = chance.choice(["entry", "entry", "drop", "rename", "value", "metadata"])
        if kind == "metadata" and isinstance(header.get("__metadata__"), dict):
            noted = header["__metadata__"]
            noted[chance.choice([*noted, "x"])] = chance.choice([*STRANGE, "2", "linrope.LanguageModel"])
        elif kind == "drop":
            header.pop(name, None)
        elif kind == "rename" and own is not None:
            names = ["kv", "z", "position", "angle", "slots", "conv", "log_scale", "w"]
            header[chance.choice(names)] = header.pop(name)
        elif kind == "value":
            header[name] = value(chance)
        elif isinstance(own, dict) and "shape" in own:
            key = chance.choice(["dtype", "shape", "data_offsets"])
            dtypes = "F32 F64 I64 BF16 F16 U8 BOOL C64 F8_E4M3"
            own[key] = {
                "dtype": chance.choice([*dtypes.split(), 3]),
                "shape": chance.choice([[], [0], [1, 2], [-1], [2**62, 4], "x", *_reshaped(own["shape"])]),
                "data_offsets": chance.choice([[0, 0], [0, 8], [8, 0], [0, 2**63], [-8, 0], "x", [0]]),
            }[key]
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        _sign(header, content[8 + size :])
    made = json.dumps(header).encode("utf-8", "surrogatepass")
    length = len(made) if chance.random() < 0.9 else chance.choice([0, 1, 2**32, 2**63, len(made) + 1])
    return length.to_bytes(8, "little") + made + content[8 + size :]


def _sign(header: dict[str, Any], body: bytes) -> None:
    """Writes a digest into the header that fits the damaged file, if safetensors reads that at all."""
    header["__metadata__"].pop("digest", None)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    with contextlib.suppress(SafetensorError, TypeError, ValueError):
        tensors = load(len(text).to_bytes(8, "little") + text + body)
        header["__metadata__"]["digest"] = digest(tensors, header["__metadata__"])


def change_metadata(path: Path, **metadata: str) -> None:
    """Rewrites a good file with other metadata and a digest that fits."""
    with safe_open(path, "pt") as file:
        old = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del old["digest"]
    save_tensors(path, tensors, old | metadata)


def checkpoint(chance: random.Random, run: Path, text: Path) -> str:
    """Damages the last checkpoint of a run; returns how."""
    last = sorted(run.glob("step-*"))[-1]
    path = last / chance.choice(["config.json", "model.safetensors", "training.safetensors"])
    kinds = "damage damage damage header json swap link absent folder pipe step older"
    kind = chance.choice(kinds.split())
    content = path.read_bytes()
    if kind == "damage" or (kind == "header" and path.suffix == ".json"):
        path.write_bytes(damaged(chance, content))
    elif kind == "header":
        path.write_bytes(safetensors_like(chance, content))
    elif kind == "json":
        (last / "config.json").write_bytes(json_like(chance, (last / "config.json").read_text()))
    elif kind == "swap":
        other = chance.choice([x for x in last.iterdir() if x != path] + [text])
        shutil.copyfile(other, path)
    elif kind == "link":
        path.unlink()
        targets = [path, "nowhere", "/dev/zero", "/dev/full", "/", text, "/proc/self/mem"]
        path.symlink_to(chance.choice(targets))
    elif kind in ("absent", "folder", "pipe"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
    elif kind == "step":
        name = chance.choice(["step-", "step-x", "step-99999999", "step-00000000", "step-1e9", "step--1"])
        last.rename(run / name) if chance.random() < 0.5 else (run / name).mkdir(exist_ok=True)
    else:
        first = sorted(run.glob("step-*"))[0]
        shutil.copyfile(first / path.name, path)
    return f"{kind} {path.name}"
