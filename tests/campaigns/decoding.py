"""Decoding steps in place beside copied ones, with everything that may change between two steps changed at random.

``python -m tests.campaigns.decoding --count 100000 --seed 0``. One side gives its state away at each step, or keeps it
in rows of a pool; the other side makes a new state at each step. Outputs and states of the two stay equal.
"""

import io
import random
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linrope import LinearAttentionState, Rotary, feature_maps, linear_rope_attention
from linrope.backends import native
from tests.campaigns.command import numbers
from tests.support.contract import refused

POOL, D, E = 5, 8, 4
EQUAL = 2e-6  # relative to the largest number: a step may add up in another order than a call that copies
MAPS: tuple[dict[str, Any], ...] = (
    {},
    {"feature_map": "relu2", "normalize": False},
    {"feature_map": "softmax"},
    {"feature_map": None, "normalize": False},
    {"feature_map": feature_maps.make("unit", D, activation="silu", query_factor=0.5), "normalize": False},
)


class Decoding:
    """One sequence of steps, drawn from a number."""

    def __init__(self, seed: int, backends: list[str]) -> None:
        self.chance, self.backends = random.Random(seed), backends
        self.generator = torch.Generator().manual_seed(seed)
        self.g, self.r = self.chance.choice([1, 2, 3]), self.chance.choice([1, 2])
        rotary = self.chance.choice([None, Rotary(D), Rotary(D, layout="half", rotary_dim=4)])
        self.how = {"rotary": rotary, **self.chance.choice(MAPS)}
        self.steps = rotary is not None and self.chance.random() < 0.3
        self.units = None if self.how.get("feature_map") == "softmax" else D
        if self.units and rotary is not None:
            self.units -= rotary.rotary_dim // 2
        self.decay = None
        if self.chance.random() < 0.5:
            self.decay = torch.tensor(
                [self.chance.choice([0.5, 0.9, 0.999, 1.0]) for _ in range(self.g)]
            ).double()
        takes_erase = not isinstance(self.how.get("feature_map", "elu+1"), str)
        self.erases = takes_erase and self.chance.random() < 0.6
        self.copied = self.call(self.inputs(POOL, 3, first=True), None, "eager")[1]
        self.pool = self.copied.clone()
        self.slots = torch.arange(POOL)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def inputs(self, rows: int, tokens: int, first: bool = False) -> dict[str, Tensor]:
        g, chance = self.g, self.chance
        made = {"q": self.rand(rows, tokens, g * self.r, D), "k": self.rand(rows, tokens, g, D)}
        made["v"] = self.rand(rows, tokens, g, E)
        if chance.random() < 0.2:  # strides that are not those of a new tensor
            made = {name: x.transpose(0, 2).contiguous().transpose(0, 2) for name, x in made.items()}
        if chance.random() < 0.5:
            kept = chance.choice([0.01, 0.3, 3.0])
            units = [self.units] if self.units and chance.random() < 0.5 else []
            made["log_decay"] = -kept * self.rand(rows, tokens, chance.choice([1, g]), *units).abs()
            made["log_decay"] = made["log_decay"].to(chance.choice([torch.float32, torch.float64]))
        if self.steps:
            pairs = self.how["rotary"].rotary_dim // 2
            made["angle_steps"] = self.rand(rows, tokens, g, pairs)
        if self.erases and (first or chance.random() < 0.8):  # a pool's rows then have no z
            made["erase"] = (
                chance.choice([0, 1, 2]) * self.rand(rows, tokens, chance.choice([1, g])).sigmoid()
            )
            fmap = self.how["feature_map"]
            psi = made["k"] if fmap is None else fmap.keys(made["k"])
            squared = psi.square().sum(-1).amax(2, keepdim=True)
            made["erase"] = made["erase"] / squared.clamp(min=1e-3)
        return made

    def backend(self, inputs: dict[str, Tensor]) -> str:
        """One of those that compute these inputs."""
        return self.chance.choice([name for name in self.backends if inputs.keys().isdisjoint(refused(name))])

    def call(
        self, inputs: dict[str, Tensor], state: Any, backend: str
    ) -> tuple[Tensor, LinearAttentionState]:
        options: dict[str, Any] = {**inputs, **self.how, "state": state, "decay": self.decay}
        with torch.no_grad():
            out, last = linear_rope_attention(**options, return_state=True, backend=backend)
        return out, last

    def change(self) -> None:
        """Changes something that both sides share, or moves states about."""
        chance = self.chance
        event = chance.choice(
            ["decay", "decay's numbers", "join", "fork", "file", "memory", "kernels", "none"]
        )
        if event == "decay" and self.decay is not None:
            self.decay = self.decay.clone()
        elif event == "decay's numbers" and self.decay is not None:
            self.decay[chance.randrange(self.g)] = chance.choice([0.25, 0.95, 1.0])
        elif event == "join":  # a new sequence in the place of one that has ended
            slot = torch.tensor([chance.randrange(POOL)])
            new = self.call(self.inputs(1, chance.choice([1, 4])), None, "eager")[1]
            self.pool.at(slot).write(new)
            self.copied = self.put(new, slot)
        elif event == "fork":
            order = torch.tensor([chance.randrange(POOL) for _ in range(POOL)])
            self.pool, self.copied = self.pool.reorder(order), self.copied.reorder(order)
        elif event == "file":
            file = io.BytesIO()
            torch.save(self.pool, file)
            self.pool = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        elif event == "memory":  # the same numbers with strides that a kernel may not like
            kv = self.pool.kv.mT.contiguous().mT
            self.pool = replace(self.pool, kv=kv)
        elif event == "kernels" and "native" in self.backends:
            native.use_instruction_set(chance.choice(native.instruction_sets()))

    def put(self, rows: LinearAttentionState, slots: Tensor) -> LinearAttentionState:
        """The copied state with these rows in the slots."""
        old = self.copied.tensors()
        new = rows.rows().tensors()
        merged: dict[str, Any] = {name: x.index_copy(0, slots, new[name]) for name, x in old.items()}
        return replace(self.copied, **merged)

    def step(self) -> None:
        chance = self.chance
        tokens = chance.choice([1] * 9 + [3])
        if chance.random() < 0.5:  # some rows of the pool
            slots = torch.tensor(chance.sample(range(POOL), chance.randint(1, POOL)))
            inputs = self.inputs(len(slots), tokens)
            out, _ = self.call(inputs, self.pool.at(slots), self.backend(inputs))
            before = self.copied.reorder(slots)
        else:
            slots, inputs = torch.arange(POOL), self.inputs(POOL, tokens)
            memory = self.pool.kv.data_ptr()
            out, self.pool = self.call(inputs, self.pool.donate(), self.backend(inputs))
            assert (self.pool.kv.data_ptr() == memory) == (tokens == 1)
            before = self.copied
        expected, after = self.call(inputs, before, self.backend(inputs))
        self.copied = self.put(after, slots)
        self.compare("out", out, expected)
        for name, x in self.copied.tensors().items():
            self.compare(name, self.pool.tensors()[name], x)

    def compare(self, name: str, x: Tensor, y: Tensor) -> None:
        if not x.is_floating_point():
            assert torch.equal(x, y), name
            return
        largest = max(1.0, float(y.abs().max()))
        assert float((x.double() - y.double()).abs().max()) <= EQUAL * largest, name


def run(count: int, seed: int, length: int = 200) -> int:
    """Steps in sequences of ``length``; returns their number, or raises an error with the seed to repeat it."""
    backends = ["reference", "eager", *([] if native.why_not() else ["native"] * 3)]
    best = native.instruction_set()
    try:
        for first in range(0, count, length):
            decoding = Decoding(seed + first, backends)
            for i in range(min(length, count - first)):
                try:
                    decoding.change()
                    decoding.step()
                except Exception as error:
                    where = f"sequence {seed + first}, step {i}: --seed {seed + first} --count {i + 1}"
                    raise AssertionError(where) from error
    finally:
        if best is not None:
            native.use_instruction_set(best)
    return count


def main(count: int, seed: int) -> int:
    print(f"{run(count, seed)} steps in place, equal to copied ones")
    return 0


if __name__ == "__main__":
    sys.exit(main(**numbers(__doc__, count=100000, seed=0)))
