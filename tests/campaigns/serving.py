"""An Engine under random requests, cancellations and faults: each request gets what the model gives it alone.

``python -m tests.campaigns.serving --seconds 3600 --seed 0``

A turn serves one model. Most turns run on one thread, so that their number repeats them: ``--turn``. In every fifth one
clients on four threads send the requests while another runs the engine. A fault is an operator that raises, as one does
that finds no memory.
"""

import ctypes
import gc
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from linrope.decode import Engine
from linrope.decode.engine import choose
from linrope.integrations import transformers as linrope_transformers
from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
from tests.campaigns.command import numbers
from tests.campaigns.leaks import resident
from tests.support import families
from tests.support.engines import SIZES, Recorded

LONGEST = 600  # tokens of a sequence, of the models that have such a number
# Bytes by which the process may grow after the first turns. It does not grow if the same turns are repeated. New shapes
# fill linrope's bounded caches of plans and leave gaps in memory: 22 MiB in ten minutes, and less in each further one.
ALLOWED = 64 * 2**20
FIRST = 24  # turns: each model four times
PATIENCE = 60.0  # seconds that a client waits for the next piece
_ARENA_MAX = -8  # in glibc's malloc.h
ROUNDING = 1e-4  # noise, as a share of the largest logit, that may decide between two tokens
_WINDOW = {"num_key_value_heads": 2, "sliding_window": 16, "max_position_embeddings": LONGEST}


def of_family(family: str, **options: Any) -> Any:
    return families.model(family, vocab_size=256, max_position_embeddings=LONGEST, **options)


# All four experts compute: a choice among them would turn rounding into other logits.
MODELS = {
    "qwen3_5": lambda: of_family("qwen3_5"),
    "linear": lambda: LinRopeForCausalLM(LinRopeConfig(**SIZES)),
    "kimi_linear": lambda: of_family("kimi_linear", num_experts_per_tok=4),
    "hybrid": lambda: LinRopeForCausalLM(LinRopeConfig(**SIZES, full_attention_interval=2)),
    "granitemoehybrid": lambda: of_family("granitemoehybrid", num_experts_per_tok=4),
    "separate": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **_WINDOW)),
}  # fmt: skip


class Fault(TorchDispatchMode):
    """Lets an operator that allocates memory raise: the one with this number, from 0."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            self.left -= 1
            if self.left == -1:
                raise MemoryError("on purpose")
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class Asked(Recorded):
    """A request, and what came back."""

    prompt: list[int] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)  # texts, then None or an exception
    ended: threading.Event = field(default_factory=threading.Event)

    def get(self, piece: Any) -> None:
        assert not self.ended.is_set(), f"{piece!r} after {self.answers[-1]!r}"
        self.answers.append(piece)
        if not isinstance(piece, str):
            self.ended.set()


class Turn:
    """One model, and requests to its engine."""

    def __init__(self, seed: int, number: int, requests: int) -> None:
        self.chance = chance = random.Random(f"{seed} {number}")
        self.kind, self.enabled = [*MODELS][number % len(MODELS)], number // len(MODELS) % 2 == 1
        self.threaded, self.requests = number % 5 == 4, requests
        self.counts: Counter[str] = Counter()
        torch.manual_seed(number)
        self.engine = Engine(
            MODELS[self.kind](),
            slots=chance.randint(1, 6),
            queue=chance.randint(0, 6),
            budget=chance.choice([16, 40, 128]),
            prefix_bytes=chance.choice([0, 2**16, 2**28]),
        )
        self.prefixes = [self.tokens(chance, chance.choice([5, 40, 200])) for _ in range(3)]
        self.asked: list[Asked] = []

    def tokens(self, chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(3, 256) for _ in range(count)]

    def draw(self, chance: random.Random) -> Asked:
        prompt = self.tokens(chance, int(LONGEST ** chance.random()))
        prefix = chance.choice(self.prefixes) if chance.random() < 0.4 else []
        temperature, seed = chance.choice([0, 0, 0.5, 1.5]), chance.randrange(2**32)
        stops = [
            bytes(self.tokens(chance, chance.choice([1, 1, 2]))) for _ in range(chance.choice([0, 0, 4]))
        ]
        return Asked(
            prefix + prompt,
            prefix=len(prefix),
            max_tokens=int(60 ** chance.random()),
            temperature=temperature,
            top_p=chance.choice([0.9, 1.0]),
            seed=seed,
            stops=[*stops],
            prompt=prefix + prompt,
        )

    def submit(self, x: Asked) -> bool:
        """Whether the request has a place; those that are too long for the model are refused."""
        longest = self.engine.longest
        too_long = longest is not None and len(x.prompt) + x.max_tokens > longest
        try:
            taken = self.engine.submit(x)
        except ValueError as error:
            if not too_long or "tokens together, expected at most" not in str(error):
                raise
            self.counts["too long"] += 1
            return False
        assert not too_long, "a request that is too long was taken"
        self.counts["submitted" if taken else "queue full"] += 1
        if taken:
            self.asked.append(x)
        return taken

    def run(self) -> Counter[str]:
        with ExitStack() as stack:
            if self.enabled:
                stack.enter_context(linrope_transformers.enable())
            if self.threaded:
                self.run_threads()
            else:
                self.run_steps()
            self.check_nothing_is_left()
            for x in self.asked:
                self.check(x)
        return self.counts

    def run_steps(self) -> None:
        engine, chance, left = self.engine, self.chance, self.requests
        while left or engine.running or engine.waiting:
            for _ in range(min(left, chance.choice([0, 0, 0, 1, 1, 2, 15]))):
                left -= 1
                room = len(engine.running) + len(engine.waiting) < engine.slots + engine.queue
                x, refused = self.draw(chance), self.counts["too long"]
                assert self.submit(x) == (room and self.counts["too long"] == refused)
            live = [x for x in self.asked if not x.ended.is_set() and not x.cancelled]
            if live and chance.random() < 0.05:
                chance.choice(live).cancelled = True
            self.deliver(self.step(chance))
            self.check_prefixes()

    def step(self, chance: random.Random) -> Any:
        """A step, with or without a fault; ``Engine.run`` handles an error as this does."""
        try:
            return self.try_step(chance, self.engine.step)
        except MemoryError as error:
            return [self.engine.fail(x, error) for x in [*self.engine.running]]

    def try_step(self, chance: random.Random, step: Any) -> Any:
        if chance.random() >= 0.03:
            return step()
        with Fault(int(1000 ** chance.random()) - 1):
            return step()

    def deliver(self, pieces: Any) -> None:
        for x, piece in pieces:
            x.get(piece)

    def run_threads(self) -> None:
        engine, chance, failed = self.engine, self.chance, []
        step = engine.step
        engine.step = lambda: self.try_step(chance, step)

        def serve() -> None:
            try:
                engine.run(self.deliver)
            except BaseException as error:
                failed.append(error)

        def ask(chance: random.Random) -> None:
            try:
                for _ in range(self.requests // 4):
                    x = self.draw(chance)
                    if self.submit(x):
                        leaves = chance.random() < 0.1
                        ended = x.ended.wait(0.05 * chance.random() if leaves else PATIENCE)
                        assert ended or leaves, "a client waits in vain"
                        x.cancelled = not ended
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=serve)
        clients = [threading.Thread(target=ask, args=[random.Random(chance.random())]) for _ in range(4)]
        for x in (thread, *clients):
            x.start()
        for x in clients:
            x.join()
        end = time.monotonic() + PATIENCE
        while engine.running or engine.waiting:  # those whose clients have left
            assert thread.is_alive(), "the engine has ended"
            assert time.monotonic() < end, f"{engine} does not end"
            time.sleep(0.001)
        engine.stop()
        thread.join(PATIENCE)
        engine.step = step
        assert not failed, repr(failed[0])

    def check_prefixes(self) -> None:
        prefixes = self.engine.prefixes
        assert prefixes.nbytes == sum(nbytes for _, nbytes in prefixes.kept.values())
        assert prefixes.nbytes <= prefixes.most_bytes, "the prefixes are too large"

    def check_nothing_is_left(self) -> None:
        engine = self.engine
        self.check_prefixes()
        assert engine.running == engine.waiting == []
        assert sorted(engine.free) == [*range(engine.slots)], "slots are lost"
        assert engine.serving.failed == {}, "errors are left"
        serving: Any = engine.serving
        assert getattr(serving, "kept", {}) == getattr(serving, "batch_of", {}) == {}, "states are left"
        for batch in getattr(serving, "batches", {}).values():
            assert batch.slots == batch.lengths == batch.fixed == batch.growing == [], "rows are left"
        self.counts["prefix hits"] += engine.prefixes.hits

    def check(self, x: Asked) -> None:
        """The answers of a request that has ended, or was cancelled."""
        assert x.ended.is_set() or x.cancelled, "a request without an end"
        last = x.answers[-1] if x.ended.is_set() else ""
        self.counts["tokens"] += len(x.tokens)
        self.counts[
            "raised" if isinstance(last, Exception) else "cancelled" if last == "" else "answered"
        ] += 1
        if isinstance(last, Exception):
            assert isinstance(last, MemoryError), repr(last)
            assert x.finish_reason == "error"
        self.check_tokens(x)
        if last is not None:
            return
        shown = x.tokens[:-1] if x.tokens[-1] in self.engine.ends else x.tokens
        text, stop = bytes(shown), len(x.tokens) < x.max_tokens or x.tokens != shown
        cuts = [(text.find(s) + len(s), -len(s)) for s in x.stops if s in text]
        if cuts:
            end, length = min(cuts)
            assert end == len(text), "the text goes on after a stop sequence"
            text, stop = text[: end + length], True
        elif x.tokens == shown:
            stop = False
            assert len(x.tokens) == x.max_tokens, "the text ends too early"
        assert "".join(x.answers[:-1]) == text.decode(errors="replace"), "another text"
        assert x.finish_reason == ("stop" if stop else "length")

    @torch.no_grad()
    def check_tokens(self, x: Asked) -> None:
        """All tokens are those that the model alone, in one call, without a cache, gives after the ones before."""
        if not x.tokens:
            return
        model: Any = self.engine.serving.model
        sequence = torch.tensor([x.prompt + x.tokens[:-1]])
        logits = model(sequence, None, logits_to_keep=len(x.tokens))[0][0]
        judge = Recorded(x.prompt, temperature=x.temperature, top_p=x.top_p, seed=x.seed)
        for i, (token, row) in enumerate(zip(x.tokens, logits, strict=True)):
            before = judge.random.getstate()
            if choose([judge], row[None]) == [token]:
                continue
            generator, size = torch.Generator().manual_seed(i), ROUNDING * row.abs().max()
            near = set()  # what rounding may lead to
            for noise in torch.randn(100, len(row), generator=generator):
                judge.random.setstate(before)
                near.update(choose([judge], (row + size * noise)[None]))
            assert token in near, f"token {i} is {token}, alone it is one of {sorted(near)}"
            self.counts["ties"] += 1


def keep_no_memory() -> None:
    """To see leaks: else glibc keeps memory for each thread, and oneDNN the kernels of the last 1024 shapes."""
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"  # which its first call reads
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def held() -> int:
    """Bytes of this process in memory, without those that glibc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def run(
    seconds: float, seed: int, turn: int | None = None, requests: int = 40, least: int = 1
) -> Counter[str]:
    """Takes turns until ``seconds`` have passed and ``least`` turns are done. Returns how often each event happened.

    The AssertionError of a turn says how to repeat it.
    """
    counts: Counter[str] = Counter()
    began, shown, first = time.monotonic(), 0, 0
    keep_no_memory()
    logging.disable(logging.ERROR)  # an engine logs every fault
    try:
        while counts["turns"] < least or (turn is None and time.monotonic() - began < seconds):
            number = counts["turns"] if turn is None else turn
            made = None
            try:
                made = Turn(seed, number, requests)
                counts += made.run()
            except Exception as error:
                kind = f"{made.kind}, on threads" if made and made.threaded else made and made.kind
                raise AssertionError(f"{kind}: --seed {seed} --turn {number}: {error}") from error
            counts["turns"] += 1
            if counts["turns"] <= FIRST:
                first = held()
            elif (grown := held() - first) > ALLOWED:
                raise AssertionError(f"the process grew by {grown} bytes in {counts['turns'] - FIRST} turns")
            if (minutes := int(time.monotonic() - began) // 60) > shown:
                shown = minutes
                print(f"{minutes} min, {(held() - first) / 2**20:+.1f} MiB: {told(counts)}", flush=True)
    finally:
        logging.disable(logging.NOTSET)
    assert counts["ties"] <= 1 + counts["tokens"] / 1000, "too many ties"
    return counts


def told(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def main(seconds: int, seed: int, turn: int | None) -> int:
    print(told(run(seconds, seed, turn)))
    return 0


if __name__ == "__main__":
    sys.exit(main(**numbers(__doc__, seconds=3600, seed=0, turn=None)))
