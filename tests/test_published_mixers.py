"""The examples that load published weights, against plain loops over tokens that share no code with linrope.

The loops are written from the published code's equations, in float64, with its parameters' names: Mamba3 of
github.com/state-spaces/mamba (the one-token step of its SISO kernels), and the linear attention of
inclusionAI/Ring-mini-linear-2.0.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from tests.examples import load

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="the examples run on the CPU"
)
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


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x (b, heads, d): the pairs (0, 1), (2, 3), .. turned by the angles (b, heads, pairs), the rest as it is."""
    y, rest = x.clone(), x.shape[-1] // 2 - angles.shape[-1]
    cos, sin = F.pad(angles.cos(), (0, rest), value=1.0), F.pad(angles.sin(), (0, rest))
    y[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    y[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
    return y


def mamba3_loop(
    weights: dict[str, Tensor], u: Tensor, *, d_state: int, headdim: int, ngroups: int = 1, expand: int = 2,
    rope_fraction: float = 0.5, A_floor: float = 1e-4, is_outproj_norm: bool = False, a_activation=F.softplus,
) -> Tensor:  # fmt: skip
    b, inner = u.shape[0], expand * u.shape[2]
    heads, pairs = inner // headdim, int(d_state * rope_fraction) // 2
    angle_state = u.new_zeros(b, heads, pairs)
    ssm_state = u.new_zeros(b, heads, headdim, d_state)
    k_state, v_state = u.new_zeros(b, heads, d_state), u.new_zeros(b, heads, headdim)
    outs = []
    for token in u.unbind(1):
        z, x, B, C, dd_dt, dd_A, trap, angle = torch.split(
            token @ weights["in_proj.weight"].T,
            [inner, inner, ngroups * d_state, ngroups * d_state, heads, heads, heads, pairs], -1,
        )  # fmt: skip
        z, v = z.view(b, heads, headdim), x.view(b, heads, headdim)
        A = torch.clamp(-a_activation(dd_A), max=-A_floor)
        dt = F.softplus(dd_dt + weights["dt_bias"])
        trap = trap.sigmoid()
        k, q = (
            torch.stack([normed[:, head // (heads // ngroups)] for head in range(heads)], 1) + bias[:, 0]
            for normed, bias in (
                (rms(B.view(b, ngroups, d_state), weights["B_norm.weight"], 1e-5), weights["B_bias"]),
                (rms(C.view(b, ngroups, d_state), weights["C_norm.weight"], 1e-5), weights["C_bias"]),
            )
        )
        angle_state = angle_state + math.pi * angle.tanh()[:, None, :] * dt[..., None]
        k, q = turned(k, angle_state), turned(q, angle_state)
        alpha = (A * dt).exp()[..., None, None]
        beta, gamma = ((1 - trap) * dt)[..., None, None] * alpha, (trap * dt)[..., None, None]
        ssm_state = (
            alpha * ssm_state
            + beta * v_state[..., :, None] * k_state[..., None, :]
            + gamma * v[..., :, None] * k[..., None, :]
        )
        k_state, v_state = k, v
        y = (ssm_state * q[..., None, :]).sum(-1) + weights["D"][:, None] * v
        if is_outproj_norm:
            y = rms(y, weights["norm.weight"].view(heads, headdim), 1e-5)
        y = y * z * z.sigmoid()
        outs.append(y.reshape(b, inner) @ weights["out_proj.weight"].T)
    return torch.stack(outs, 1)


def alibi_slopes(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def ring_loop(
    weights: dict[str, Tensor], hidden: Tensor, *, num_attention_heads: int, layer_idx: int, num_hidden_layers: int,
    head_dim: int, group_norm_size: int = 1, partial_rotary_factor: float = 0.5, rope_theta: float = 600_000.0,
    rms_norm_eps: float = 1e-6, use_qk_norm: bool = True, use_qkv_bias: bool = False, use_bias: bool = False,
) -> Tensor:  # fmt: skip
    b, heads, d = hidden.shape[0], num_attention_heads, head_dim
    slope = -torch.tensor(alibi_slopes(heads), dtype=torch.float64) * (
        1 - (layer_idx - 1) / (num_hidden_layers - 1) + 1e-5
    )
    half = int(d * partial_rotary_factor) // 2
    inverse = 1.0 / rope_theta ** (torch.arange(half, dtype=torch.float64) / half)
    state, outs = hidden.new_zeros(b, heads, d, d), []
    for position, x in enumerate(hidden.unbind(1)):
        qkv = x @ weights["query_key_value.weight"].T
        if use_qkv_bias:
            qkv = qkv + weights["query_key_value.bias"]
        q, k, v = (part.reshape(b, heads, d) for part in qkv.split(heads * d, -1))
        if use_qk_norm:
            q = rms(q, weights["query_layernorm.weight"], rms_norm_eps)
            k = rms(k, weights["key_layernorm.weight"], rms_norm_eps)
        cos, sin = (position * inverse).cos(), (position * inverse).sin()
        q, k = (
            torch.cat((
                y[..., :half] * cos - y[..., half : 2 * half] * sin,
                y[..., half : 2 * half] * cos + y[..., :half] * sin, y[..., 2 * half :],
            ), -1)
            for y in (q, k)
        )  # fmt: skip
        state = slope.exp()[:, None, None] * state + k[..., :, None] * v[..., None, :]
        out = ((q * d**-0.5)[..., :, None] * state).sum(-2).reshape(b, group_norm_size, -1)
        normed = rms(out, weights["g_norm.weight"].view(group_norm_size, -1), rms_norm_eps).reshape(b, -1)
        gated = normed * (x @ weights["g_proj.weight"].T).sigmoid()
        y = gated @ weights["dense.weight"].T
        outs.append(y + weights["dense.bias"] if use_bias else y)
    return torch.stack(outs, 1)


def make(kind: str, options: dict) -> tuple[nn.Module, dict]:
    """A layer of the example with weights that are all away from their initial values, and the loop's options."""
    torch.manual_seed(0)
    if kind == "mamba3":
        options = {"d_state": 8, "headdim": 4, **options}
        layer = mamba3.Mamba3(8, **options)
    else:
        options = {
            "num_attention_heads": 4,
            "layer_idx": 0,
            "num_hidden_layers": 20,
            "head_dim": 8,
            **options,
        }
        layer = ring_linear.RingLinearAttention(12, **options)
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer, options


def loop(kind: str, layer: nn.Module, x: Tensor, options: dict) -> Tensor:
    return (mamba3_loop if kind == "mamba3" else ring_loop)(dict(layer.named_parameters()), x, **options)


def inputs(layer: nn.Module, b: int = 2, n: int = N) -> Tensor:
    width = layer.out_proj.out_features if hasattr(layer, "out_proj") else layer.dense.out_features
    return torch.randn(b, n, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES = [("mamba3", options) for options in MAMBAS.values()] + [
    ("ring", options) for options in RINGS.values()
]
every_case = pytest.mark.parametrize(
    ("kind", "options"),
    CASES,
    ids=[f"mamba3, {name}" for name in MAMBAS] + [f"ring, {name}" for name in RINGS],
)


@every_case
def test_outputs_and_gradients_are_those_of_the_published_equations(kind: str, options) -> None:
    layer, options = make(kind, options)
    x = inputs(layer).requires_grad_()
    y, expected = layer(x), loop(kind, layer, x, options)
    assert_close(y, expected, rtol=1e-11, atol=1e-11)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad((y * weight).sum(), list(leaves.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(leaves.values()))
    for name, a, b in zip(leaves, found, wanted, strict=True):
        assert bool(b.any()), name
        assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@every_case
@torch.no_grad()
def test_a_prompt_with_its_state_and_steps_of_one_token_are_the_whole(kind: str, options) -> None:
    layer, options = make(kind, options)
    x = inputs(layer)
    expected = loop(kind, layer, x, options)
    y, state = layer(x[:, :6], return_state=True)
    pieces = [y]
    for token in x[:, 6:].split(1, 1):
        y, state = layer(token, state=state.donate(), return_state=True)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), expected, rtol=1e-11, atol=1e-11)


@every_case
@torch.no_grad()
def test_packed_sequences_are_those_alone(kind: str, options) -> None:
    layer, options = make(kind, options)
    x, cuts = inputs(layer, 1), [0, 4, 5, N]
    packed = layer(x, cu_seqlens=torch.tensor(cuts))
    for a, b in pairwise(cuts):
        assert_close(packed[:, a:b], loop(kind, layer, x[:, a:b], options), rtol=1e-11, atol=1e-11)


@every_case
@torch.no_grad()
def test_in_float32_and_bfloat16_they_stay_near(kind: str, options) -> None:
    layer, options = make(kind, options)
    x = inputs(layer)
    expected = loop(kind, layer, x, options)
    for dtype, units in ((torch.float32, 100), (torch.bfloat16, 24)):
        y = layer.to(dtype)(x.to(dtype))
        assert y.dtype == dtype
        error = float((y.double() - expected).abs().max()) / float(expected.abs().max())
        assert error < units * torch.finfo(dtype).eps, (dtype, error)


def test_hidden_tokens_on_the_left_change_nothing_of_ring_linear() -> None:
    layer, _ = make("ring", {})
    x = inputs(layer)
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
