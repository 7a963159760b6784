"""What the tests of the operation share: random inputs, all results of a call, comparisons."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from linrope import LinearAttentionState, backends, feature_maps, linear_rope_attention
from linrope.backends import native
from linrope.conformance.bounds import DATA as DATA
from linrope.conformance.bounds import everything as everything

POSITIVE = ("elu+1", "relu", "relu2", "exp", "softmax", "favor+")
SIGNED = ("silu", "identity", "unit")
BACKENDS = ("reference", "eager")  # those that compute in float64, too
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
)
FAST = ("eager", NATIVE)  # for float32, bfloat16, float16
MAPS = (*POSITIVE, *SIGNED)
every_kernel = pytest.mark.parametrize("backend", ["reference", "eager", NATIVE, "triton"])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_fast = pytest.mark.parametrize("backend", FAST)
every_map = pytest.mark.parametrize("name", MAPS)
both_directions = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


def native_sets(backend: str) -> list[str | None]:
    """This machine's instruction sets for the backend native, to loop over; for others None alone."""
    return [*native.instruction_sets()] if backend == "native" else [None]


def examples(number: int) -> settings:
    """So many random examples in an ordinary run, twenty times as many in a thorough one."""
    return settings(max_examples=number * settings.default.max_examples // 100)


def use_map(name: str, d: int) -> dict[str, Any]:
    """Arguments for that map; signed ones go without the normalizer."""
    fmap = feature_maps.make(name, d, **({"seed": 0, "num_features": 2 * d} if name == "favor+" else {}))
    return {"feature_map": fmap, "normalize": name in POSITIVE}


def computes(backend: str, name: str) -> bool:
    """False for elementwise maps that the backend leaves to others, as native and triton may with a new one."""
    module = backends.load(backend)
    return isinstance(module, str) or name not in feature_maps.ELEMENTWISE or name in module.MAPS


NATIVE_MAPS = tuple(name for name in MAPS if computes("native", name))


def num_features(how: dict[str, Any], d: int) -> int:
    return getattr(how.get("feature_map"), "feature_dim", d)


def randoms(
    b: int, n: int, h: int, d: int, *, g: int | None = None, m: int | None = None, e: int | None = None,
    dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v. No number lies near 0, where relu has its kink."""
    generator = torch.Generator().manual_seed(seed)
    g, m, e = g or h, n if m is None else m, e or d
    made = []
    for shape in ((b, n, h, d), (b, m, g, d), (b, m, g, e)):
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        made.append(((x + 0.05 * x.sign()) * scale).to(torch.get_default_device(), dtype))
    return made[0], made[1], made[2]


def random_state(
    k: Tensor, v: Tensor, how: dict[str, Any], *, position: int = 7, h: int | None = None
) -> LinearAttentionState:
    """A state that such a call could have made, with kv of both signs and z > 0 (with erase 0), leaves of the graph."""
    like = {name: how[name] for name in ("feature_map", "normalize", "rotary", "rope_order") if name in how}
    if (rotary := how.get("rotary")) is not None and rotary.axes is not None:
        like["positions"] = torch.zeros(0, rotary.axes, dtype=torch.int64)
    if how.get("erase") is not None:
        like["erase"] = how["erase"][:, :0]
    if how.get("cu_seqlens") is not None:
        like["cu_seqlens"] = torch.zeros_like(how["cu_seqlens"])
    q = k.new_zeros(len(k), 0, h or k.shape[2], k.shape[3])
    _, state = linear_rope_attention(q, k[:, :0], v[:, :0], **like, return_state=True)
    generator = torch.Generator().manual_seed(99)
    kv = torch.randn(state.kv.shape, generator=generator, dtype=torch.float64, device="cpu").to(state.kv)
    z = torch.rand(state.z.shape, generator=generator, dtype=torch.float64, device="cpu").to(state.z) + 0.5
    z = torch.zeros_like(z) if "erase" in like else z
    where = position + torch.arange(len(kv))
    if state.log_scale is not None:  # of keys that were there, as kv says
        state = replace(
            state, log_scale=torch.rand(state.log_scale.shape, generator=generator).double() - 0.5
        )
    return replace(state, kv=kv.requires_grad_(), z=z.requires_grad_(), position=where)


def random_mask(b: int, m: int) -> Tensor:
    """A third hidden; the first key of the first sequence, and the whole second sequence, hidden too."""
    mask = torch.rand(b, m, generator=torch.Generator().manual_seed(3)) > 1 / 3
    mask[0, :1] = False
    mask[1:2] = False
    return mask


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Equal up to ``tolerance`` of each tensor's largest entry (of 1 if that is less): entries cancel."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        if not x.is_floating_point():
            assert torch.equal(actual[name], x), name
            continue
        bound = tolerance * max(1.0, float(x.abs().max()) if x.numel() else 0.0)
        torch.testing.assert_close(
            actual[name], x, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
        )
