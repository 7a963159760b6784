"""Helpers for the tests of the layer: random inputs, tables of options, and the layer written out."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from linrope import LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.layer.state import LayerState
from tests.support.oracle import NATIVE

# Options of layers in float32, which "auto" computes with the native kernels if they are built
PLAIN = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "one kv head": {"num_kv_heads": 1},
    "head dims": {"head_dim": 6, "value_head_dim": 10},
    "norm": {"out_norm": True},
    "gate": {"gate": True, "bias": True},
    "bidirectional": {"causal": False},
    "half layout": {"rotary": "half"},
    "Rotary": {"rotary": Rotary(4, base=100.0, rotary_dim=2)},
    "whole model": {"rotary": Rotary.whole_model(4, 4)},
    "no rotary": {"rotary": None},
    "softmax": {"feature_map": "softmax"},
    "favor+": {"feature_map": "favor+"},
    "map object": {"feature_map": feature_maps.FavorPlus(4, num_features=12, seed=0)},
    "signed": {"feature_map": "silu", "normalize": False, "out_norm": True},
    "reference": {"backend": "reference"},
    "learned map": {"feature_map": "hedgehog", "num_kv_heads": 2},
    "paired learned map": {"feature_map": {"name": "paired", "inner": "t2r"}, "num_kv_heads": 2},
    "decay": {"decay": "retnet", "num_kv_heads": 2},
    "decay as numbers": {"decay": [0.5, 0.6, 0.9, 1.0]},
    "before": {"rope_order": "before", "feature_map": {"name": "paired"}},
    "rotary as dict": {"rotary": {"layout": "half", "base": 100.0}},
    "rope_parameters": {"rotary": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    "xpos": {"rotary": {"xpos": 30.0}},
    "several": {"num_kv_heads": 2, "value_head_dim": 6, "out_norm": True, "gate": True, "bias": True},
}
# Options of layers in float64
GATED = {
    "spread": {"decay": {"name": "spread", "longest": 50}},
    "learned decay": {"decay": "learned"},
    "forget gate": {"forget_gate": True},
    "selective": {"rotary": "selective"},
    "selective, added": {
        "rotary": {"name": "selective", "bound": "add", "rank": 3, "per_head": False, "layout": "half"}
    },
    "convolution": {"short_conv": 4},
    "norms": {"qk_norm": True, "out_norm": True},
    "exponential": {"forget_gate": True, "short_conv": 2, "feature_map": "exp", "out_norm": True},
    "signed, forget gate": {"forget_gate": True, "feature_map": "silu", "normalize": False, "rotary": None},
    "all": {
        "decay": "learned", "forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4,
        "qk_norm": True, "out_norm": True, "gate": True, "bias": True, "num_kv_heads": 2, "value_head_dim": 6,
        "feature_map": "hedgehog",
    },
    "block": {
        "short_conv": {"taps": 4, "activation": "silu", "bias": True, "start": "uniform"}, "forget_gate": True,
        "write_gate": "tied", "out_norm": True, "skip": "after", "gate": True, "value_head_dim": 8,
    },
    "mamba-2": {
        "num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 8, "feature_map": "identity",
        "normalize": False, "rotary": None, "short_conv": {"activation": "silu", "bias": True}, "forget_gate": True,
        "write_gate": "independent", "out_norm": {"over": "all", "eps": 1e-5}, "skip": "before", "gate": "before",
    },
    "one key head": {
        "num_heads": 1, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 8, "qk_norm": True,
        "forget_gate": True, "skip": "before", "out_norm": "head", "gate": "before",
    },
    "skip alone": {"skip": "after", "num_kv_heads": 2},
    "delta rule": {"erase_gate": "tied", "feature_map": "unit", "normalize": False, "num_kv_heads": 2, "qk_norm": True},
    "gated delta rule": {
        "num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 8, "forget_gate": True,
        "erase_gate": {"name": "tied", "largest": 2}, "feature_map": {"name": "unit", "query_factor": 6**-0.5},
        "normalize": False, "short_conv": {"activation": "silu"}, "out_norm": True, "gate": True,
        "rotary": {"partial_rotary_factor": 0.4},
    },
    "independent erase gate": {
        "erase_gate": "independent", "forget_gate": True, "write_gate": "independent", "decay": "learned",
        "feature_map": {"name": "unit", "activation": "silu"}, "normalize": False, "rotary": "selective",
        "skip": "after",
    },
    "forget gate per feature": {
        "forget_gate": {"per": "feature", "longest": 64, "rank": 3}, "rotary": {"partial_rotary_factor": 0.5},
        "num_kv_heads": 2, "write_gate": "independent", "decay": "learned",
    },
    "kimi delta attention": {
        "forget_gate": {"per": "feature", "bound": 5}, "erase_gate": "tied", "feature_map": "unit", "normalize": False,
        "num_heads": 2, "num_value_heads": 4, "head_dim": 6, "value_head_dim": 8, "rotary": "selective",
        "short_conv": {"activation": "silu"}, "out_norm": True, "gate": True,
    },
}  # fmt: skip
ALL = {**{name: {**options, "dtype": torch.float32} for name, options in PLAIN.items()}, **GATED}
every_option = pytest.mark.parametrize("options", ALL.values(), ids=ALL)
# Layers whose modules differ
MODULES = {name: ALL[name] for name in ("gate", "favor+", "map object", "paired learned map", *GATED)}
every_module = pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
(needs_native,) = NATIVE.marks
every_gated = pytest.mark.parametrize("options", GATED.values(), ids=GATED)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(dtype: torch.dtype = torch.float64, **options) -> LinearRoPEAttention:
    torch.manual_seed(0)
    layer = LinearRoPEAttention(16, **{"num_heads": 4, **options}).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():  # or what starts at zero or one could be left out unnoticed
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def inputs(layer: LinearRoPEAttention, b: int = 2, n: int = 9, seed: int = 1) -> Tensor:
    return numbers(b, n, 16, seed=seed).to(layer.o_proj.weight.dtype)


def assert_same_state(a: LayerState, b: LayerState, rows: slice = slice(None)) -> None:
    """Asserts that a has these rows of b. Sums in another order may differ by rounding, copies may not."""
    assert a.identity == b.identity
    xs, ys, dtype = a.tensors(), b.tensors(), a.sums.kv.dtype
    assert xs.keys() - {"angle_gradient_path"} == ys.keys() - {"angle_gradient_path"}
    assert torch.equal(a.position, b.position[rows])
    for name in xs.keys() & {"kv", "z", "log_scale", "conv"}:
        assert_close(xs[name].to(dtype), ys[name][rows].to(dtype))  # z is wide, also of float32 features
    if "angle" in xs:
        assert int((xs["angle"] - ys["angle"][rows]).abs().max()) < 2**20  # of 2^64 in a turn


def mean_square_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def by_hand(layer: LinearRoPEAttention, options: dict, x: Tensor, context: Tensor, **how) -> Tensor:
    """The layer's parts around the operation."""
    h, keys, g = layer.num_heads, layer.num_kv_heads, layer.num_state_heads
    q, k, v = layer.q_proj(x), layer.k_proj(context), layer.v_proj(context)
    if (conv := layer.short_conv) is not None:
        line = F.pad(torch.cat((q, k, v), -1).mT, (conv.weight.shape[-1] - 1, 0))
        y = F.conv1d(line, conv.weight, conv.bias, groups=len(conv.weight)).mT
        y = F.silu(y) if "silu" in str(options["short_conv"]) else y
        q, k, v = y.split([part.shape[-1] for part in (q, k, v)], -1)
    q, k, v = q.unflatten(-1, (h, -1)), k.unflatten(-1, (keys, -1)), v.unflatten(-1, (g, -1))
    if layer.q_norm is not None:
        q, k = mean_square_norm(q, layer.q_norm), mean_square_norm(k, layer.k_norm)
    if shared := options.get("num_value_heads"):
        q, k = q.repeat_interleave(shared // h, 2), k.repeat_interleave(shared // h, 2)
        h = shared
    write = log_decay = None
    if layer.forget_gate is not None:
        if (gate := options["forget_gate"]) is True or "per" not in gate:
            keep = (x @ layer.forget_gate.weight.T + layer.forget_gate.bias).sigmoid()
            log_decay = keep.log()
        else:
            y = torch.einsum("bnr,gur->bngu", x @ layer.forget_gate.down.T, layer.forget_gate.up)
            y = y + layer.forget_gate.bias
            log_decay = -5 * (-y).sigmoid() if "bound" in gate else y.sigmoid().log()
        if options.get("write_gate") == "tied":
            write = 1 - keep
        elif "write_gate" in options:
            write = (x @ layer.write_gate.weight.T + layer.write_gate.bias).sigmoid()
    erase = None
    if "erase_gate" in options:
        largest = 2 if "2" in str(options["erase_gate"]) else 1
        erase = largest * (x @ layer.erase_gate.weight.T + layer.erase_gate.bias).sigmoid()
        write = erase if "tied" in str(options["erase_gate"]) else write
    steps = None if layer.angle_steps is None else layer.angle_steps(x)
    # The norm of a head cancels the normalizer, which the layer therefore leaves out
    cancelled = options.get("out_norm") in (True, "head") and options.get("skip") != "before"
    out = linear_rope_attention(
        q, k, v if write is None else v * write[..., None], feature_map=layer.feature_map, rotary=layer.rotary,
        causal=layer.causal, rope_order=layer.rope_order, decay=layer.decay, log_decay=log_decay, angle_steps=steps,
        erase=erase,
        normalize=layer.normalize and not (cancelled and not layer.feature_map.log_scaled), **how,
    )  # fmt: skip
    gate = 1 if layer.g_proj is None else F.silu(layer.g_proj(x)).view(out.shape)
    skipped = 0 if layer.skip is None else layer.skip[:, None] * v.repeat_interleave(h // g, 2)
    if options.get("skip") == "before":
        out = out + skipped
    if options.get("gate") == "before":
        out = out * gate
    if layer.out_norm is not None:
        rows = out.flatten(-2) if "all" in str(options["out_norm"]) else out
        out = mean_square_norm(rows, layer.out_norm).view(out.shape)
    if options.get("skip") == "after":
        out = out + skipped
    if options.get("gate") is True:
        out = out * gate
    return layer.o_proj(out.flatten(-2))
