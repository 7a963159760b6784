"""The examples that load published weights, against plain equations that share no code with linrope.

They are written from the published code, in float64, with its parameters' names: Mamba3 of
github.com/state-spaces/mamba (the one-token step of its SISO kernels), and the linear attention of
inclusionAI/Ring-mini-linear-2.0.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from tests.support.examples import load
from tests.support.trapezoid_loop import trapezoidal_loop

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")
mamba3, ring_linear = load("mamba3"), load("ring_linear")

N = 11
MAMBAS = {
    "default": {},
    "two groups": {"ngroups": 2},
    "all features turn": {"rope_fraction": 1.0},
    "output norm": {"is_outproj_norm": True, "expand": 1},
    "another A": {"a_activation": mamba3.heavy_tail, "A_floor": 0.8},
}
RINGS = {
    "default": {},
    "groups of heads": {"group_norm_size": 2, "layer_idx": 5},
    "six heads": {"num_attention_heads": 6, "head_dim": 4, "group_norm_size": 3},
    "biases, no norms": {"use_qk_norm": False, "use_bias": True, "use_qkv_bias": True, "rms_norm_eps": 1e-5},
    "all features turn": {"partial_rotary_factor": 1.0, "rope_theta": 100.0, "layer_idx": 18},
}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mamba3_by_hand(
    weights: dict[str, Tensor], u: Tensor, *, d_state: int, headdim: int, ngroups: int = 1, expand: int = 2,
    rope_fraction: float = 0.5, A_floor: float = 1e-4, is_outproj_norm: bool = False, a_activation=F.softplus,
) -> Tensor:  # fmt: skip
    inner = expand * u.shape[2]
    heads, pairs = inner // headdim, int(d_state * rope_fraction) // 2
    sizes = [inner, inner, ngroups * d_state, ngroups * d_state, heads, heads, heads, pairs]
    z, x, B, C, dd_dt, dd_A, trap, angle = torch.split(u @ weights["in_proj.weight"].T, sizes, -1)
    z, v = (y.unflatten(-1, (heads, headdim)) for y in (z, x))
    A = torch.clamp(-a_activation(dd_A), max=-A_floor)
    dt = F.softplus(dd_dt + weights["dt_bias"])
    k, q = (
        rms(y.unflatten(-1, (ngroups, d_state)), weights[f"{name}_norm.weight"], 1e-5)
        .repeat_interleave(heads // ngroups, 2) + weights[f"{name}_bias"][:, 0]
        for y, name in ((B, "B"), (C, "C"))
    )  # fmt: skip
    angles = (math.pi * angle.tanh()[:, :, None] * dt[..., None]).cumsum(1)
    y = torch.stack([trapezoidal_loop(*x) for x in zip(q, k, v, trap.sigmoid(), dt, A * dt, angles)])
    y = y + weights["D"][:, None] * v
    if is_outproj_norm:
        y = rms(y, weights["norm.weight"].view(heads, headdim), 1e-5)
    return (y * z * z.sigmoid()).flatten(2) @ weights["out_proj.weight"].T


def alibi_slopes(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def ring_by_hand(
    weights: dict[str, Tensor], hidden: Tensor, *, num_attention_heads: int, layer_idx: int, num_hidden_layers: int,
    head_dim: int, group_norm_size: int = 1, partial_rotary_factor: float = 0.5, rope_theta: float = 600_000.0,
    rms_norm_eps: float = 1e-6, use_qk_norm: bool = True, use_qkv_bias: bool = False, use_bias: bool = False,
) -> Tensor:  # fmt: skip
    heads, d, n = num_attention_heads, head_dim, hidden.shape[1]
    scale = 1 - (layer_idx - 1) / (num_hidden_layers - 1) + 1e-5
    slope = -torch.tensor(alibi_slopes(heads), dtype=torch.float64) * scale
    qkv = hidden @ weights["query_key_value.weight"].T
    if use_qkv_bias:
        qkv = qkv + weights["query_key_value.bias"]
    q, k, v = (part.unflatten(-1, (heads, d)) for part in qkv.split(heads * d, -1))
    if use_qk_norm:
        q = rms(q, weights["query_layernorm.weight"], rms_norm_eps)
        k = rms(k, weights["key_layernorm.weight"], rms_norm_eps)
    half, positions = int(d * partial_rotary_factor) // 2, torch.arange(n, dtype=torch.float64)
    angles = positions[:, None] / rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k = (
        torch.cat((y[..., :half] * cos - y[..., half : 2 * half] * sin,
                   y[..., half : 2 * half] * cos + y[..., :half] * sin, y[..., 2 * half :]), -1)
        for y in (q, k)
    )  # fmt: skip
    faded = (slope[:, None, None] * (positions[:, None] - positions)).exp().tril()
    out = torch.einsum("bnhd,bmhd,hnm,bmhe->bnhe", q * d**-0.5, k, faded, v).flatten(2)
    groups = out.unflatten(-1, (group_norm_size, -1))
    normed = rms(groups, weights["g_norm.weight"].view(group_norm_size, -1), rms_norm_eps).flatten(2)
    y = (normed * (hidden @ weights["g_proj.weight"].T).sigmoid()) @ weights["dense.weight"].T
    return y + weights["dense.bias"] if use_bias else y


KINDS = {  # a layer of an example, its equations and their sizes, and the width of the inputs
    "mamba3": (mamba3.Mamba3, mamba3_by_hand, {"d_state": 8, "headdim": 4}, 8),
    "ring": (ring_linear.RingLinearAttention, ring_by_hand,
             {"num_attention_heads": 4, "layer_idx": 0, "num_hidden_layers": 20, "head_dim": 8}, 12),
}  # fmt: skip
CASES = [("mamba3", name) for name in MAMBAS] + [("ring", name) for name in RINGS]
every_case = pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}, {name}" for kind, name in CASES])


def make(kind: str, name: str = "default") -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    """A layer whose weights are all away from their initial values, the equations with these weights, and inputs."""
    torch.manual_seed(0)
    make_layer, equations, sizes, width = KINDS[kind]
    options = sizes | {"mamba3": MAMBAS, "ring": RINGS}[kind][name]
    layer = make_layer(width, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, N, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return layer, lambda x: equations(dict(layer.named_parameters()), x, **options), x


@every_case
def test_outputs_and_gradients_are_those_of_the_published_equations(kind: str, name: str) -> None:
    layer, by_hand, x = make(kind, name)
    y, expected = layer(x.requires_grad_()), by_hand(x)
    assert_close(y, expected, rtol=1e-11, atol=1e-11)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = {"x": x, **dict(layer.named_parameters())}
    found, wanted = (
        dict(zip(leaves, torch.autograd.grad((out * weight).sum(), list(leaves.values())), strict=True))
        for out in (y, expected)
    )
    assert all(bool(gradient.any()) for gradient in wanted.values())
    assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@every_case
@torch.no_grad()
def test_a_prompt_with_its_state_and_steps_of_one_token_are_the_whole(kind: str, name: str) -> None:
    layer, by_hand, x = make(kind, name)
    y, state = layer(x[:, :6], return_state=True)
    pieces = [y]
    for token in x[:, 6:].split(1, 1):
        y, state = layer(token, state=state.donate(), return_state=True)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), by_hand(x), rtol=1e-11, atol=1e-11)


@every_case
@torch.no_grad()
def test_packed_sequences_are_those_alone(kind: str, name: str) -> None:
    layer, by_hand, x = make(kind, name)
    cuts = [0, 4, 5, N]
    packed = layer(x[:1], cu_seqlens=torch.tensor(cuts))
    for a, b in pairwise(cuts):
        assert_close(packed[:, a:b], by_hand(x[:1, a:b]), rtol=1e-11, atol=1e-11)


@every_case
@torch.no_grad()
def test_in_float32_and_bfloat16_they_stay_near(kind: str, name: str) -> None:
    layer, by_hand, x = make(kind, name)
    expected = by_hand(x)
    for dtype, units in ((torch.float32, 100), (torch.bfloat16, 24)):
        y = layer.to(dtype)(x.to(dtype))
        assert y.dtype == dtype
        error = float((y.double() - expected).abs().max()) / float(expected.abs().max())
        assert error < units * torch.finfo(dtype).eps, (dtype, error)


def test_hidden_tokens_on_the_left_change_nothing_of_ring_linear() -> None:
    layer, _, x = make("ring")
    mask = torch.tensor([[0, 0, 0] + [1] * 8, [1] * N]).bool()
    y = layer(x, key_mask=mask, positions=(mask.long().cumsum(1) - 1).clamp(min=0))
    assert_close(y[:1, 3:], layer(x[:1, 3:]))
    assert_close(y[1:], layer(x[1:]))


def test_the_names_and_shapes_of_the_weights_are_the_published_ones() -> None:
    """Those of Mamba3(d_model=64, d_state=128, headdim=64, is_outproj_norm=True), and of a layer of Ring-linear."""
    layer = mamba3.Mamba3(64, is_outproj_norm=True)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "dt_bias": (2,), "B_bias": (2, 1, 128), "C_bias": (2, 1, 128), "D": (2,),
        "in_proj.weight": (2 * 128 + 2 * 128 + 3 * 2 + 32, 64), "B_norm.weight": (128,), "C_norm.weight": (128,),
        "norm.weight": (128,), "out_proj.weight": (64, 128),
    }  # fmt: skip
    layer = ring_linear.RingLinearAttention(64, 4, layer_idx=0, num_hidden_layers=20, group_norm_size=4)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "query_key_value.weight": (3 * 64, 64), "query_layernorm.weight": (16,), "key_layernorm.weight": (16,),
        "g_proj.weight": (64, 64), "g_norm.weight": (64,), "dense.weight": (64, 64),
    }  # fmt: skip


@pytest.mark.parametrize("example", [mamba3, ring_linear], ids=["mamba3", "ring_linear"])
def test_the_scripts_run(example, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(length=100, steps=5)
    assert "a prompt of 100 tokens and 5 steps are the whole sequence" in capsys.readouterr().out
