"""Bad input gets an error that names the argument, what it got and what was expected; odd input works."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from linrope import LinearAttentionState, LinearRoPEAttention, Rotary, feature_maps, linear_rope_attention
from linrope.rotation.rotary import MAX_POSITION

B, N, H, G, D, E = 2, 5, 4, 2, 4, 6
LAST = torch.full((B,), MAX_POSITION)


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def attend(**change):
    """A good call of the operation, with some arguments changed."""
    arguments = {"q": ones(B, N, H, D), "k": ones(B, N, G, D), "v": ones(B, N, G, E), "rotary": Rotary(D)}
    arguments.update(change)
    tensors = [arguments.pop(name) for name in "qkv"]
    return linear_rope_attention(*tensors, **arguments)


def state(**change) -> LinearAttentionState:
    made = attend(return_state=True, **{name: x for name, x in change.items() if name not in STATE_FIELDS})[1]
    return replace(made, **{name: x for name, x in change.items() if name in STATE_FIELDS})


STATE_FIELDS = ("kv", "z", "position", "identity")


def layer(*sizes: int, **options) -> LinearRoPEAttention:
    return LinearRoPEAttention(*(sizes or (8, 2)), **options)


def run(x: torch.Tensor, options=None, **arguments):
    return layer(**(options or {}))(x, **arguments)


# id: (call, exception, what the message must say)
REFUSED = {
    # shapes
    "q of rank 3": (
        lambda: attend(q=ones(B, N, D)),
        ValueError,
        r"q: got shape \(2, 5, 4\), expected \(batch",
    ),
    "k of rank 5": (
        lambda: attend(k=ones(1, B, N, G, D)),
        ValueError,
        r"k: got shape \(1, 2, 5, 2, 4\), exp",
    ),
    "v of rank 0": (lambda: attend(v=ones()), ValueError, r"v: got shape \(\), expected \(batch"),
    "lengths of k and v": (
        lambda: attend(v=ones(B, N + 1, G, E)),
        ValueError,
        r"k, v: got \(2, 5, 2, 4\), \(2, 6, 2, 6\), expected \(b, m, g, d\), \(b, m, g, e\)",
    ),
    "heads of k and v": (
        lambda: attend(v=ones(B, N, 1, E)),
        ValueError,
        r"k, v: got .*\(2, 5, 1, 6\), expected",
    ),
    "lengths while causal": (
        lambda: attend(q=ones(B, 3, H, D)),
        ValueError,
        r"k: got length 5, expected q's 3 with causal=True",
    ),
    "head dims": (
        lambda: attend(q=ones(B, N, H, 6)),
        ValueError,
        r"q, k: got head dims 6, 4, expected equal",
    ),
    "heads do not divide": (
        lambda: attend(q=ones(B, N, 3, D)),
        ValueError,
        r"k: got 2 heads, expected a divisor of q's 3",
    ),
    "g = 0": (
        lambda: attend(k=ones(B, N, 0, D), v=ones(B, N, 0, E)),
        ValueError,
        r"k: got 0 heads, expected a divisor of q's 4",
    ),
    "h = 0": (lambda: attend(q=ones(B, N, 0, D)), ValueError, r"k: got 2 heads, expected a divisor of q's 0"),
    "d = 0": (
        lambda: attend(q=ones(B, N, H, 0), k=ones(B, N, G, 0)),
        ValueError,
        r"q, k: got head dims 0, 0, expected equal and positive",
    ),
    "batches": (lambda: attend(q=ones(3, N, H, D)), ValueError, r"k: got batch 2, expected q's 3"),
    "devices": (
        lambda: attend(k=ones(B, N, G, D, device="meta")),
        ValueError,
        r"q, k, v: got cpu, meta, cpu, expected one device",
    ),
    # types
    "mixed dtypes": (
        lambda: attend(q=ones(B, N, H, D, dtype=torch.float64)),
        TypeError,
        r"q, k, v: got torch.float64, torch.float32, torch.float32, expected one dtype",
    ),
    **{
        f"{dtype} {name}": (
            lambda name=name, dtype=dtype: attend(**{name: ones(B, N, G, D, dtype=dtype)}),
            TypeError,
            rf"{name}: got {dtype}, expected float64, float32, bfloat16 or float16",
        )
        for name in "qkv"
        for dtype in (torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn)
    },
    **{
        f"numpy {name}": (
            lambda name=name: attend(**{name: np.ones((B, N, G, D))}),
            TypeError,
            rf"{name}: got ndarray, expected a dense torch.Tensor",
        )
        for name in "qkv"
    },
    "None as v": (lambda: attend(v=None), TypeError, r"v: got NoneType, expected a dense torch.Tensor"),
    "sparse k": (
        lambda: attend(k=ones(B, N, G, D).to_sparse()),
        TypeError,
        r"k: got torch.sparse_coo, expected a dense torch.Tensor",
    ),
    # positions
    **{
        f"{dtype} {name}": (
            lambda name=name, dtype=dtype: attend(**{name: ones(N, dtype=dtype)}),
            TypeError,
            rf"^{name}: got {dtype}, expected integers",
        )
        for name in ("positions", "key_positions")
        for dtype in (torch.float32, torch.bool, torch.complex64)
    },
    **{
        f"{kind} of {name}": (
            lambda name=name, wrong=wrong: attend(**{name: wrong}),
            ValueError,
            f"^{name}: got {message}",
        )
        for name in ("positions", "key_positions")
        for kind, wrong, message in (
            ("length", torch.arange(N + 1), r"shape \(6,\), expected \(5,\) or \(2, 5\)"),
            ("batch", torch.zeros(3, N).long(), r"shape \(3, 5\), expected \(5,\) or \(2, 5\)"),
            ("rank", torch.zeros(B, N, 2).long(), r"shape \(2, 5, 2\), expected \(5,\) or \(2, 5\)"),
            ("negative number", torch.arange(N) - 1, r"-1 \.\. 3, expected 0 \.\. 2147483647"),
            (
                "number past the end",
                torch.arange(N) + MAX_POSITION,
                r"2147483647 \.\. 2147483651, expected 0 \.\.",
            ),
            ("device", torch.zeros(N, device="meta").long(), r"device meta, expected cpu"),
        )
    },
    "list as positions": (
        lambda: attend(positions=[0, 1, 2, 3, 4]),
        TypeError,
        r"positions: got list, expected",
    ),
    "numpy positions": (
        lambda: attend(positions=np.arange(N)),
        TypeError,
        r"positions: got ndarray, expected",
    ),
    "state at the last position": (
        lambda: attend(state=state(position=LAST)),
        ValueError,
        r"state: got positions \[2147483647, .* and 5 more tokens, expected 0 \.\. 2147483647",
    ),
    "packed sequences past the last position": (
        lambda: attend(
            q=ones(1, N, H, D),
            k=ones(1, N, G, D),
            v=ones(1, N, G, E),
            state=state(position=LAST - 2),
            cu_seqlens=torch.tensor([0, 1, N], dtype=torch.int32),
        ),
        ValueError,
        r"state: got positions \[2147483645, .* and 4 more tokens, expected 0 \.\. 2147483647",
    ),
    "state at a negative position": (
        lambda: attend(state=state(position=-torch.ones(B).long())),
        ValueError,
        r"position.*-1.*expected 0 \.\. 2147483647",
    ),
    # mask
    "shape of the mask": (
        lambda: attend(key_mask=ones(B, N + 1, dtype=torch.bool)),
        ValueError,
        r"key_mask: got torch.bool \(2, 6\), expected torch.bool \(2, 5\)",
    ),
    "mask without batch": (
        lambda: attend(key_mask=ones(N).bool()),
        ValueError,
        r"key_mask: got torch.bool \(5,\)",
    ),
    "dtype of the mask": (
        lambda: attend(key_mask=ones(B, N)),
        ValueError,
        r"key_mask: got torch.float32 \(2, 5\), expected torch.bool \(2, 5\)",
    ),
    "device of the mask": (
        lambda: attend(key_mask=ones(B, N, dtype=torch.bool, device="meta")),
        ValueError,
        r"key_mask: got device meta, expected cpu",
    ),
    # state
    "tuple as state": (
        lambda: attend(state=(1, 2)),
        TypeError,
        r"state: got tuple, expected LinearAttentionState",
    ),
    "shape of the state": (
        lambda: attend(state=state().reorder(torch.tensor([0]))),
        ValueError,
        r"state: got kv of shape \(1, 2, 4, 6\), expected \(b, g, f, e\) = \(2, 2, 4, 6\)",
    ),
    "state of another map": (
        lambda: attend(state=state(feature_map="exp")),
        ValueError,
        r"state: made with .*exp.*; expected .*elu\+1",
    ),
    "state of another rotation": (
        lambda: attend(state=state(), rotary=Rotary(D, base=500.0)),
        ValueError,
        r"state: made with .*base=10000.0.*; expected .*base=500.0",
    ),
    "half-precision state": (
        lambda: state(kv=ones(B, G, D, E, dtype=torch.bfloat16)),
        TypeError,
        r"state.kv: got torch.bfloat16, expected float32 or float64",
    ),
    "device of the state": (
        lambda: attend(state=state().to("meta")),
        ValueError,
        r"state: got device meta, expected cpu",
    ),
    "state in two places": (
        lambda: state(z=ones(B, G, D, device="meta")),
        ValueError,
        r"state: got .*meta.*expected one device",
    ),
    # values and names
    **{
        f"eps={eps}": (lambda eps=eps: attend(eps=eps), ValueError, rf"eps={eps}: expected a positive finite")
        for eps in (0.0, -1e-6, math.nan, math.inf)
    },
    "signed map": (
        lambda: attend(feature_map="silu"),
        ValueError,
        r"feature_map='silu': its features are signed.*expected normalize=False",
    ),
    "unknown map": (
        lambda: attend(feature_map="elu1"),
        ValueError,
        r"feature_map='elu1': expected one of elu\+1, .*mean 'elu\+1'",
    ),
    "map that needs an object": (
        lambda: attend(feature_map="favor+"),
        ValueError,
        r"feature_map='favor\+': .*expected the object that feature_maps.make",
    ),
    "number as map": (lambda: attend(feature_map=3), TypeError, r"feature_map: got int, expected a name"),
    "unknown backend": (
        lambda: attend(backend="eagre"),
        ValueError,
        r"backend='eagre': expected one of auto, native, triton, eager, reference; did you mean 'eager'",
    ),
    "backend that cannot run": (
        lambda: attend(
            backend="triton",
            q=ones(B, N, H, D).double(),
            k=ones(B, N, G, D).double(),
            v=ones(B, N, G, E).double(),
        ),
        RuntimeError,
        r"backend='triton' cannot run: float64: use backend='eager'",
    ),
    "name as rotary": (lambda: attend(rotary="half"), TypeError, r"rotary: got str, expected Rotary or None"),
    "rotary of another size": (
        lambda: attend(rotary=Rotary(6)),
        ValueError,
        r"rotary: got dim=6, expected the number of features, 4",
    ),
    "theta for other heads": (
        lambda: attend(rotary=Rotary.whole_model(H, D)),
        ValueError,
        r"rotary: got theta for 4 heads, expected 2 key/value heads",
    ),
    **{
        f"{name} map object of another head dim": (
            lambda name=name, options=options: attend(
                feature_map=feature_maps.make(name, 6, **options), rotary=None
            ),
            ValueError,
            r"feature_map.*6.*expected.*4",
        )
        for name, options in (("elu+1", {}), ("softmax", {}), ("favor+", {"num_features": 4}))
    },
    # the layer
    "heads of the layer": (
        lambda: layer(10, 3),
        ValueError,
        r"embed_dim=10: expected a multiple of num_heads=3",
    ),
    "kv heads of the layer": (
        lambda: layer(12, 4, num_kv_heads=3),
        ValueError,
        r"num_kv_heads=3: expected a divisor of num_heads=4",
    ),
    "no kv heads": (lambda: layer(num_kv_heads=0), ValueError, r"num_kv_heads=0: expected a divisor"),
    "no heads": (lambda: layer(8, 0), ValueError, r"expected a divisor of num_heads=0"),
    "no width": (lambda: layer(0, 2), ValueError, r"embed_dim.*positive"),
    "no head dim": (
        lambda: layer(head_dim=0),
        ValueError,
        r"head_dim=0, value_head_dim=0: expected at least 1",
    ),
    "no value head dim": (
        lambda: layer(value_head_dim=0),
        ValueError,
        r"value_head_dim=0: expected at least 1",
    ),
    "odd features": (lambda: layer(10, 2), ValueError, r"dim=5: expected a positive even number"),
    "unknown map of the layer": (
        lambda: layer(feature_map="exq"),
        ValueError,
        r"feature_map='exq': .*mean 'exp'",
    ),
    "signed map of the layer": (
        lambda: layer(feature_map="identity"),
        ValueError,
        r"feature_map=.*'identity'.*signed; expected normalize=False",
    ),
    "unknown layout of the layer": (
        lambda: layer(rotary="halve"),
        ValueError,
        r"rotary='halve': expected one of interleaved, half, selective, a dict, .* did you mean 'half'",
    ),
    "unknown backend of the layer": (
        lambda: run(ones(1, 3, 8), {"backend": "cuda"}),
        ValueError,
        r"backend='cuda'",
    ),
    "rank of x": (
        lambda: run(ones(3, 8)),
        ValueError,
        r"x: got shape \(3, 8\), expected \(batch, length, 8\)",
    ),
    "rank of the context": (
        lambda: run(ones(1, 3, 8), context=ones(3, 8)),
        ValueError,
        r"context: got shape \(3, 8\), expected \(batch, length, 8\)",
    ),
    "length of the context": (
        lambda: run(ones(1, 3, 8), context=ones(1, 4, 8)),
        ValueError,
        r"k: got length 4, expected q's 3 with causal=True",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_a_message_that_says_why(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("causal", [True, False])
def test_double_backward_says_that_it_is_not_supported(causal: bool) -> None:
    q = ones(B, N, H, D).requires_grad_()
    (grad,) = torch.autograd.grad(attend(q=q, causal=causal).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="linrope"):
        grad.sum().backward()


def test_a_refused_call_leaves_the_state_as_it_was() -> None:
    given = state()
    kept = given.clone()
    with pytest.raises(ValueError, match="state: made with"):
        attend(state=given, rotary=None)
    assert torch.equal(given.kv, kept.kv)
    assert torch.equal(given.z, kept.z)
