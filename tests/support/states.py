"""Small states, and calls that make them, for the tests of LinearAttentionState."""

import torch
from torch.testing import assert_close

from linrope import LinearAttentionState, Rotary, linear_rope_attention

B, G, H, D, E = 3, 2, 4, 4, 6
ROTARY = Rotary(D)
IDENTITY = "some map; some rotation"


def tokens(n: int, seed: int = 0, dtype: torch.dtype = torch.float32, b: int = B) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, n, H, D), (b, n, G, D), (b, n, G, E)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def attend(inputs, state=None, **how) -> tuple[torch.Tensor, LinearAttentionState]:
    return linear_rope_attention(*inputs, state=state, return_state=True, **{"rotary": ROTARY, **how})


def some_state(n: int = 5, **how) -> LinearAttentionState:
    return attend(tokens(n), **how)[1]


def tensors(state: LinearAttentionState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return state.kv, state.z, state.position


def assert_same(a: LinearAttentionState, b: LinearAttentionState) -> None:
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert_close(x, y, atol=0, rtol=0)
    assert a.identity == b.identity
