"""Bad input gets an error that names the argument, what it got and what was expected; odd input works."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.layer.norm import RMSNorm
from linrope.rotation.rotary import MAX_POSITION

B, N, H, G, D, E = 2, 5, 4, 2, 4, 6
LAST = torch.full((B,), MAX_POSITION)


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def attend(**change):
    """A good call of the operation, with some arguments changed."""
    arguments = {"q": ones(B, N, H, D), "k": ones(B, N, G, D), "v": ones(B, N, G, E), "rotary": Rotary(D)}
    return linear_rope_attention(**arguments | change)


def state(feature_map="elu+1", **fields) -> LinearAttentionState:
    return replace(attend(return_state=True, feature_map=feature_map)[1], **fields)


def layer(*sizes: int, **options) -> LinearRoPEAttention:
    return LinearRoPEAttention(*(sizes or (8, 2)), **options)


POSITIONS = [  # wrong ones, and what is said of them
    (torch.arange(N + 1), r"shape \(6,\), expected \(5,\) or \(2, 5\)"),
    (torch.zeros(3, N).long(), r"shape \(3, 5\), expected \(5,\) or \(2, 5\)"),
    (torch.zeros(B, N, 2).long(), r"shape \(2, 5, 2\), expected \(5,\) or \(2, 5\)"),
    (torch.arange(N) - 1, r"-1 \.\. 3, expected 0 \.\. 2147483647"),
    (torch.arange(N) + MAX_POSITION, r"2147483647 \.\. 2147483651, expected 0 \.\."),
    (torch.zeros(N, device="meta").long(), r"device meta, expected cpu"),
]
PACKED_AT_THE_END = {
    "q": ones(1, N, H, D), "k": ones(1, N, G, D), "v": ones(1, N, G, E), "state": state(position=LAST - 2),
    "cu_seqlens": torch.tensor([0, 1, N], dtype=torch.int32),
}  # fmt: skip
OTHER_SIZES = [feature_maps.make("elu+1", 6), feature_maps.make("softmax", 6), feature_maps.make("favor+", 6)]

# What is changed in a good call, and what the ValueError must say.
VALUES = [
    ({"q": ones(B, N, D)}, r"q: got shape \(2, 5, 4\), expected \(batch"),
    ({"k": ones(1, B, N, G, D)}, r"k: got shape \(1, 2, 5, 2, 4\), exp"),
    ({"v": ones()}, r"v: got shape \(\), expected \(batch"),
    ({"v": ones(B, N + 1, G, E)}, r"k, v: got \(2, 5, 2, 4\), \(2, 6, 2, 6\), expected \(b, m, g, d\), \(b, m, a"),
    ({"v": ones(B, N, 1, E)}, r"k, v: got .*\(2, 5, 1, 6\), expected"),
    ({"q": ones(B, 3, H, D)}, r"k: got length 5, expected q's 3 with causal=True"),
    ({"q": ones(B, N, H, 6)}, r"q, k: got head dims 6, 4, expected equal"),
    ({"q": ones(B, N, 3, D)}, r"k: got 2 heads, expected a divisor of q's 3"),
    ({"k": ones(B, N, 0, D), "v": ones(B, N, 0, E)}, r"k: got 0 heads, expected a divisor of q's 4"),
    ({"q": ones(B, N, 0, D)}, r"k: got 2 heads, expected a divisor of q's 0"),
    ({"v": ones(B, N, 4, E)}, r"v: got 4 heads, expected k's 2; more heads of v require q to have 2"),
    ({"v": ones(B, N, 3, E)}, r"k, v: got .*, expected \(b, m, g, d\), \(b, m, a multiple of g, e\)"),
    ({"v": ones(B, N, 0, E)}, r"k, v: got .*, expected \(b, m, g, d\), \(b, m, a multiple of g, e\)"),
    ({"q": ones(B, N, H, 0), "k": ones(B, N, G, 0)}, r"q, k: got head dims 0, 0, expected equal and positive"),
    ({"v": ones(B, N, G, 0)}, r"v: got head dim 0, expected a positive one"),
    ({"q": ones(3, N, H, D)}, r"k: got batch 2, expected q's 3"),
    ({"k": ones(B, N, G, D, device="meta")}, r"q, k, v: got cpu, meta, cpu, expected one device"),
    *(({name: x}, f"^{name}: got {said}") for name in ("positions", "key_positions") for x, said in POSITIONS),
    ({"state": state(position=LAST)},
     r"state: got positions \[2147483647, .* and 5 more tokens, expected 0 \.\. 2147483647"),
    (PACKED_AT_THE_END, r"state: got positions \[2147483645, .* and 4 more tokens, expected 0 \.\. 2147483647"),
    ({"state": state(position=-torch.ones(B).long())}, r"position.*-1.*expected 0 \.\. 2147483647"),
    ({"key_mask": ones(B, N + 1).bool()}, r"key_mask: got shape \(2, 6\), expected \(2, 5\)"),
    ({"key_mask": ones(N).bool()}, r"key_mask: got shape \(5,\)"),
    ({"key_mask": ones(B, N, dtype=torch.bool, device="meta")}, r"key_mask: got device meta, expected cpu"),
    ({"state": state().reorder(torch.tensor([0]))},
     r"state: got kv of shape \(1, 2, 4, 6\), expected \(b, g, f, e\) = \(2, 2, 4, 6\)"),
    ({"state": state("exp")}, r"state: made with .*exp.*; expected .*elu\+1"),
    ({"state": state(), "rotary": Rotary(D, base=500.0)}, r"state: made with .*base=10000.0.*; expected .*base=500.0"),
    ({"state": state().to("meta")}, r"state: got device meta, expected cpu"),
    *(({"eps": x}, rf"eps={x}: expected a positive finite") for x in (0.0, -1e-6, math.nan, math.inf)),
    ({"feature_map": "silu"}, r"feature_map='silu': its features are signed.*expected normalize=False"),
    ({"feature_map": "elu1"}, r"feature_map='elu1': expected one of elu\+1, .*mean 'elu\+1'"),
    ({"feature_map": "favor+"}, r"feature_map='favor\+': .*expected the object that feature_maps.make"),
    ({"backend": "eagre"},
     r"backend='eagre': expected one of auto, native, triton, eager, reference, onnx; did you mean 'eager'"),
    ({"rotary": Rotary(6)}, r"rotary: got dim=6, expected the number of features, 4"),
    ({"rotary": Rotary.whole_model(H, D)}, r"rotary: got theta for 4 heads, expected 2 key/value heads"),
    *(({"feature_map": fmap, "rotary": None}, r"feature_map.*6.*expected.*4") for fmap in OTHER_SIZES),
]  # fmt: skip
FLOATS = "expected float64, float32, bfloat16 or float16"
NO_FLOATS = (torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn)
NO_INTEGERS = (torch.float32, torch.bool, torch.complex64)
TYPES = [
    ({"q": ones(B, N, H, D).double()}, r"q, k, v: got torch.float64, torch.float32, torch.float32, expected one dtype"),
    *(({x: ones(B, N, G, D, dtype=t)}, f"{x}: got {t}, {FLOATS}") for x in "qkv" for t in NO_FLOATS),
    *(({x: np.ones((B, N, G, D))}, f"{x}: got ndarray, expected a dense torch.Tensor") for x in "qkv"),
    ({"v": None}, r"v: got NoneType, expected a dense torch.Tensor"),
    ({"k": ones(B, N, G, D).to_sparse()}, r"k: got torch.sparse_coo, expected a dense torch.Tensor"),
    *(({x: ones(N, dtype=t)}, f"^{x}: got {t}, expected integers")
      for x in ("positions", "key_positions") for t in NO_INTEGERS),
    ({"key_mask": ones(B, N)}, r"key_mask: got torch.float32, expected torch.bool"),
    ({"positions": [0, 1, 2, 3, 4]}, r"positions: got list, expected"),
    ({"positions": np.arange(N)}, r"positions: got ndarray, expected"),
    ({"state": (1, 2)}, r"state: got tuple, expected LinearAttentionState"),
    ({"feature_map": 3}, r"feature_map: got int, expected a name"),
    ({"feature_map": type("Half", (torch.nn.Module,), {"feature_dim": D})()}, r"feature_map: got Half, expected"),
    ({"rotary": "half"}, r"rotary: got str, expected a Rotary, such as Rotary\(dim\), or None"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "row"), [*((ValueError, row) for row in VALUES), *((TypeError, row) for row in TYPES)]
)
def test_a_call_refuses_values_shapes_and_types_that_do_not_fit(error: type[Exception], row) -> None:
    change, message = row
    with pytest.raises(error, match=message):
        attend(**change)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: state(z=ones(B, G, D, device="meta")), r"state: got .*meta.*expected one device"),
        (lambda: layer(10, 3), r"embed_dim=10: expected a multiple of num_heads=3"),
        (lambda: layer(12, 4, num_kv_heads=3), r"num_kv_heads=3: expected a divisor of num_heads=4"),
        (lambda: layer(num_kv_heads=0), r"num_kv_heads=0: expected a divisor"),
        (lambda: layer(8, 0), r"num_heads=0: expected at least 1"),
        (lambda: layer(0, 2), r"embed_dim=0: expected at least 1"),
        (lambda: layer(head_dim=0), r"head_dim=0, value_head_dim=0: expected at least 1"),
        (lambda: layer(value_head_dim=0), r"value_head_dim=0: expected at least 1"),
        (lambda: layer(10, 2), r"rotary='interleaved': got heads of 5 features, expected an even number"),
        (lambda: LinearRoPEAttention.block(60, 20), r"rotary={.*}: got heads of 3 features, .*; head_dim sets it"),
        (lambda: layer(feature_map="exq"), r"feature_map='exq': .*mean 'exp'"),
        (lambda: layer(feature_map="identity"), r"feature_map=.*'identity'.*signed; expected normalize=False"),
        (lambda: layer(rotary="halve"),
         r"rotary='halve': expected one of interleaved, half, selective, a dict, .* did you mean 'half'"),
        (lambda: layer(rotary=True), r"rotary=True: expected one of interleaved, half, selective, a dict, "),
        (lambda: layer(rotary={"bse": 9.0}), r"rotary: got the key 'bse', expected .* did you mean 'base'"),
        (lambda: layer(rotary={"axes": 2, "scaling": {}}), r"rotary: got the key 'scaling', expected one of axes"),
        (lambda: layer(out_norm=3), r"out_norm=3: expected one of head, all, a dict, True or False"),
        (lambda: layer(out_norm={"of": "all"}), r"out_norm: got the key 'of', expected one of over, eps"),
        (lambda: layer(decay={"longest": 9}), r"decay: got the keys \['longest'\], expected the key 'name'"),
        (lambda: layer(backend="cuda"), r"backend='cuda': expected one of auto, native"),
        (lambda: layer()(ones(3, 8)), r"x: got shape \(3, 8\), expected \(batch, length, 8\)"),
        (lambda: layer()(ones(1, 3, 8), ones(3, 8)), r"context: got shape \(3, 8\), expected \(batch, length, 8\)"),
        (lambda: layer()(ones(1, 3, 8), ones(1, 4, 8)), r"context: got 4 tokens, expected x's 3, or causal=False"),
        (lambda: layer()(ones(1, 3, 8), ones(2, 3, 8)), r"context: got batch 2, expected x's 1"),
        (lambda: layer(context_dim=0), r"context_dim=0: expected at least 1"),
        (lambda: layer(context_dim=6)(ones(1, 3, 8)), r"context: got None, expected \(batch, length, 6\)"),
        (lambda: layer(context_dim=6, forget_gate=True), r"context_dim=6: got forget_gate, for which .* same token"),
        (lambda: layer(context_dim=6, skip="after"), r"context_dim=6: got skip, for which .* same token"),
        (
            lambda: layer(skip="after", causal=False)(ones(1, 3, 8), ones(1, 4, 8)),
            r"context: got a tensor, expected a layer without skip, .* same token",
        ),
        (lambda: layer(decay="spread", causal=False), r"decay: got causal=False, expected causal=True"),
        (lambda: layer(decay="learned", causal=False), r"decay: got causal=False, expected causal=True"),
        (lambda: layer(rotary={"xpos": 9.0}, causal=False), r"rotary: got xpos=9.0, expected causal=True"),
        (lambda: layer(rotary={"axes": 2}, decay="spread"), r"decay: got a rotation with axes=2"),
        (lambda: layer(rotary=Rotary(6)), r"rotary: got dim=6, expected the number of features, 4"),
        (lambda: layer(feature_map=feature_maps.make("elu+1", 6)), r"made for heads of 6, expected 4"),
    ],
)  # fmt: skip
def test_a_state_and_a_layer_refuse_what_does_not_fit(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: state(kv=ones(B, G, D, E).bfloat16()), r"state.kv: got torch.bfloat16, expected float32 or float64"),
        (lambda: layer(feature_map=torch.nn.ReLU()), r"feature_map: got ReLU, expected a name, a dict with"),
        *((lambda model=model: model(ones(1, 3, 8, dtype=torch.int64)),
           r"x: got torch.int64, expected a floating-point torch.Tensor")
          for model in (layer(), RMSNorm(8))),
        (lambda: layer()(ones(1, 3, 8).double()), r"x: got torch.float64, expected the weights' torch.float32"),
        (lambda: layer(rotary={"theta": 1e6}), r"theta: got float, expected a tensor .*; for another base pass"),
        (lambda: layer()(np.ones((1, 3, 8))), r"x: got ndarray, expected a floating-point torch.Tensor"),
        (lambda: layer(context_dim=6.0), r"context_dim=6.0: expected an integer"),
        (lambda: layer("8", 2), r"embed_dim='8': expected an integer"),
        (lambda: layer(8, 2.0), r"num_heads=2.0: expected an integer"),
        (lambda: layer(8, True), r"num_heads=True: expected an integer"),
        (lambda: layer(num_value_heads=2.0), r"num_value_heads=2.0: expected an integer"),
        *((lambda name=name: layer(**{name: "no"}), rf"{name}='no': expected True or False")
          for name in ("causal", "normalize", "qk_norm", "bias")),
        *((lambda name=name: attend(**{name: "no"}), rf"{name}='no': expected True or False")
          for name in ("causal", "normalize", "return_state")),
        (lambda: attend(eps="1e-6"), r"eps='1e-6': expected a number"),
        (lambda: attend(eps=True), r"eps=True: expected a number"),
        (lambda: Rotary("4"), r"dim='4': expected an integer"),
        (lambda: Rotary(4, rotary_dim=2.0), r"rotary_dim=2.0: expected an integer"),
        (lambda: Rotary(4, base="10000"), r"base='10000': expected a number"),
        (lambda: Rotary(8, xpos="a"), r"xpos='a': expected a number"),
        *((lambda name=name: feature_maps.make(name, 4, num_features="a"), r"num_features='a': expected an integer")
          for name in ("favor+", "t2r")),
        (lambda: feature_maps.make("favor+", 4, seed=1.5), r"seed=1.5: expected an integer"),
        (lambda: feature_maps.make("t2r", 4, num_heads=2.0), r"num_heads=2.0: expected an integer"),
        (lambda: feature_maps.PairedMap("relu"), r"inner: got str, expected a FeatureMap"),
        (lambda: feature_maps.make("favor+", 4, kernel_epsilon="a"), r"kernel_epsilon='a': expected a number"),
        (lambda: layer(rotary={"name": "selective", "per_head": "no"}), r"rotary: got per_head='no', expected True"),
    ],
)  # fmt: skip
def test_wrong_types_of_options_are_named(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_refused_call_leaves_the_state_as_it_was() -> None:
    given = state()
    kept = given.clone()
    with pytest.raises(ValueError, match="state: made with"):
        attend(state=given, rotary=None)
    torch.testing.assert_close(given.tensors(), kept.tensors(), rtol=0, atol=0)
