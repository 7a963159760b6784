"""Random configurations of a call, drawn by hypothesis, with what the equation gives."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from linrope import LinearAttentionState, Rotary, linear_rope_attention
from linrope.rotation.rotary import MAX_POSITION
from tests.equation import Equation, Sizes
from tests.feature_maps.table import plain
from tests.oracle import POSITIVE, SIGNED, num_features, randoms, use_map

CONFIGS = st.fixed_dictionaries(
    {
        "name": st.sampled_from([*POSITIVE, *SIGNED]),
        "layout": st.sampled_from([None, "interleaved", "half"]),
        "partial": st.booleans(),
        "causal": st.booleans(),
        "normalize": st.booleans(),
        "masked": st.booleans(),
        "b": st.integers(1, 2),
        "g": st.integers(1, 2),
        "r": st.integers(1, 2),  # query heads per key/value head
        "n": st.integers(1, 300),
        "before": st.integers(0, 40),  # tokens of the state
        "d": st.sampled_from([4, 8, 16, 32]),
        "e": st.sampled_from([1, 4, 16]),
        "start": st.integers(0, MAX_POSITION - 340),
        "scale": st.sampled_from([0.1, 1.0, 3.0, 6.0]),
        "decay": st.sampled_from([None, 0.5, 0.9, 0.999, 1 - 2.0**-20]),
        "gates": st.sampled_from([None, "weak", "strong"]),
        "steps": st.booleans(),
        "eps_mode": st.sampled_from(["clamp", "add"]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


class Problem:
    """One random configuration: a first piece that only makes a state, and a second that is looked at."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        c = config
        self.before, self.causal = c["before"], c["causal"]
        n = c["before"] + c["n"]
        # Rounding an exponent x costs exp(x) a relative error of u |x|, before any backend sees it.
        scale = min(c["scale"], 1.0) if c["name"] in ("exp", "softmax", "favor+") else c["scale"]
        self.qkv = randoms(
            c["b"], n, c["g"] * c["r"], c["d"], g=c["g"], e=c["e"],
            dtype=dtype, seed=c["seed"], scale=scale,
        )  # fmt: skip
        self.how = use_map(c["name"], c["d"])
        self.how["normalize"] &= c["normalize"]
        f = num_features(self.how, c["d"])
        if c["name"] == "favor+" and dtype == torch.float32:
            # Its float32 exponents are sums, off by many u: the bound is the backend's, on the features.
            (q, k, v), fmap = self.qkv, self.how["feature_map"]
            self.qkv, self.how["feature_map"] = (plain(fmap.queries(q)), plain(fmap.keys(k)), v), None
        self.how["eps_mode"] = c["eps_mode"]
        self.how["rotary"] = c["layout"] and Rotary(
            f, layout=c["layout"], rotary_dim=f // 2 if c["partial"] else f
        )
        self.positions = c["start"] + torch.arange(n)
        self.decay = None
        if c["decay"] is not None and c["causal"]:
            self.decay = torch.tensor([c["decay"], 1.0][: c["g"]], dtype=torch.float64)
        generator = torch.Generator().manual_seed(c["seed"])
        self.data: dict[str, Tensor] = {}
        if c["gates"] is not None and c["causal"]:
            gates = torch.rand(c["b"], n, c["g"], generator=generator, device="cpu")
            gates = -gates.square() * (0.2 if c["gates"] == "weak" else 4)
            if c["gates"] == "strong":
                gates[:, 3::17], gates[:, 7::23], gates[:, 11::29] = -20, 0, -1e4
            self.data["log_decay"] = gates.to(torch.get_default_device(), dtype)
        if c["steps"]:
            pairs = f // 2 if not self.how["rotary"] else self.how["rotary"].rotary_dim // 2
            steps = 2 * torch.randn(c["b"], n, c["g"], pairs, generator=generator, device="cpu")
            self.data["angle_steps"] = steps.to(torch.get_default_device(), dtype)
        mask = torch.rand(c["b"], n, generator=generator, device="cpu") > 0.3
        self.mask = mask.to(torch.get_default_device()) if c["masked"] else None

    def beside(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """The same with other numbers in q, k and v."""
        problem = copy(self)
        q, k, v = self.qkv
        problem.qkv = change(q), change(k), change(v)
        return problem

    def piece(self, which: slice, dtype: torch.dtype | None) -> tuple[list[Tensor], dict[str, Any]]:
        more: dict[str, Any] = {name: x[:, which].to(dtype) for name, x in self.data.items()}
        more |= {"key_mask": None if self.mask is None else self.mask[:, which], "decay": self.decay}
        return [x[:, which].to(dtype) for x in self.qkv], self.how | more

    def state(self, dtype: torch.dtype | None, backend: str) -> LinearAttentionState | None:
        if self.before == 0:
            return None
        first = slice(0, self.before)
        inputs, how = self.piece(first, dtype)
        how |= {"positions": self.positions[first], "backend": backend}
        return linear_rope_attention(*inputs, return_state=True, **how)[1]

    def second(self, dtype: torch.dtype | None, backend: str) -> tuple[list[Tensor], dict[str, Any]]:
        inputs, how = self.piece(slice(self.before, None), dtype)
        how |= {"causal": self.causal, "state": self.state(dtype, backend), "backend": backend}
        if self.before == 0:
            how["positions"] = self.positions
        return inputs, how

    def exact(self) -> tuple[Tensor, Sizes]:
        """The second piece's output in float64, and the sizes of its terms."""
        state, sizes = None, None
        if self.before:
            first = slice(0, self.before)
            inputs, how = self.piece(first, torch.float64)
            equation = Equation()
            _, state = equation(*inputs, positions=self.positions[first], **how)
            sizes = equation.sizes
        equation = Equation(sizes)
        inputs, how = self.piece(slice(self.before, None), torch.float64)
        given = None if self.before else self.positions
        out, _ = equation(*inputs, causal=self.causal, state=state, positions=given, **how)
        return out, equation.sizes
