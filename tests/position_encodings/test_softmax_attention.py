"""SoftmaxAttention: softmax of an encoding's scores between projections, masks, states, packing."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import LinearRoPEAttention, Rotary
from linrope.position_encodings import (
    RELATIVE,
    KeyValueState,
    RelativeEncoding,
    Shaw,
    SoftmaxAttention,
)

NAMES = ("rope", "none", *RELATIVE)
every_encoding = pytest.mark.parametrize("name", NAMES)


def make(name: str | Rotary | RelativeEncoding = "rope", **options) -> SoftmaxAttention:
    torch.manual_seed(0)
    layer = SoftmaxAttention(8, 2, positions=name, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def numbers(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(
        torch.get_default_device()
    )


def by_hand(
    layer: SoftmaxAttention,
    x: Tensor,
    context: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    seen: Tensor,
) -> Tensor:
    """Query by query; positions (b, n), (b, m), seen (b, n, m). test_relative has the encodings' scores."""
    (b, n, _), m, h, g = x.shape, context.shape[1], layer.num_heads, layer.num_kv_heads
    heads = torch.arange(h) // (h // g)
    q = layer.q_proj(x).view(b, n, h, -1)
    k = layer.k_proj(context).view(b, m, g, -1)[:, :, heads]
    v = layer.v_proj(context).view(b, m, g, -1)[:, :, heads]
    relative = isinstance(layer.encoding, RelativeEncoding)
    if relative:
        scores = layer.encoding.scores(q, k, positions, key_positions)
    elif layer.encoding is not None:
        q, k = layer.encoding(q, positions), layer.encoding(k, key_positions)
    out = torch.zeros(b, n, h, v.shape[-1], dtype=torch.float64)
    for s in range(b):
        for i in range(n):
            for head in range(h):
                keys = [j for j in range(m) if seen[s, i, j]]
                if relative:
                    logits = scores[s, head, i, keys]
                else:
                    logits = (k[s, keys, head] * q[s, i, head]).sum(-1) / math.sqrt(layer.head_dim)
                for j, weight in zip(keys, logits.exp() / logits.exp().sum()):
                    value = v[s, j, head]
                    if isinstance(layer.encoding, Shaw):
                        reach = layer.encoding.max_distance
                        distance = int(positions[s, i] - key_positions[s, j])
                        value = value + layer.encoding.pv[head, max(-reach, min(distance, reach)) + reach]
                    out[s, i, head] += weight * value
    return layer.o_proj(out.flatten(-2))


def order(b: int, n: int) -> Tensor:
    return torch.ones(b, n, n, dtype=torch.bool).tril()


@every_encoding
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_head_dim": 9},
        {"num_kv_heads": 1, "head_dim": 6, "value_head_dim": 3, "bias": True},
    ],
)
def test_it_is_softmax_of_the_scores(name: str, options) -> None:
    layer, x, positions = make(name, **options), numbers(2, 5, 8), torch.arange(5).expand(2, 5)
    assert_close(layer(x), by_hand(layer, x, x, positions, positions, order(2, 5)))
    positions = torch.tensor([[4, 0, 9, 2, 2], [30, 1, 2, 3, 4]])
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
    seen = order(2, 5) & mask[:, None]
    expected = by_hand(layer, x, x, positions, positions, seen)
    assert_close(layer(x, positions=positions, key_mask=mask), expected)


@every_encoding
def test_cross_attention_sees_all_keys_of_the_context(name: str) -> None:
    layer, x, context = make(name, causal=False), numbers(2, 5, 8), numbers(2, 3, 8, seed=2)
    here, there = torch.arange(5).expand(2, 5), torch.arange(3).expand(2, 3)
    seen = torch.ones(2, 5, 3, dtype=torch.bool)
    assert_close(layer(x, context), by_hand(layer, x, context, here, there, seen))
    out = layer(x, context, positions=here[0] + 7, context_positions=there * 3)
    assert_close(out, by_hand(layer, x, context, here + 7, there * 3, seen))


@every_encoding
def test_a_shift_of_all_positions_changes_nothing(name: str) -> None:
    layer, x = make(name), numbers(2, 6, 8)
    assert_close(layer(x, positions=torch.arange(6) + 100_003), layer(x), rtol=0, atol=1e-9)
    moved = layer(x, positions=torch.tensor([0, 1, 2, 3, 4, 9]))
    assert torch.allclose(moved, layer(x)) == (name == "none")


@every_encoding
def test_cut_anywhere_and_resumed_gives_what_one_call_gives(name: str) -> None:
    layer, x = make(name, num_kv_heads=1), numbers(2, 7, 8)
    mask = torch.tensor([[True] * 7, [False, True, True, False, True, True, True]])
    for key_mask in (None, mask):
        whole, end = layer(x, key_mask=key_mask, return_state=True)
        for cuts in ([3], [0, 4], [1, 2, 3, 4, 5, 6]):
            state, pieces = None, []
            for a, b in zip([0, *cuts], [*cuts, 7]):
                part = None if key_mask is None else key_mask[:, a:b]
                out, state = layer(
                    x[:, a:b], key_mask=part, state=state and state.donate(), return_state=True
                )
                pieces.append(out)
            assert_close(torch.cat(pieces, 1), whole)
            assert_close((state.k, state.v), (end.k, end.v))
            assert torch.equal(state.mask, end.mask)
            assert state.position.tolist() == [7, 7]


def test_a_state_goes_on_from_its_last_position() -> None:
    layer, x = make(), numbers(2, 4, 8)
    positions = torch.tensor([[5, 6, 7, 8], [50, 51, 52, 53]])
    whole = layer(x, positions=positions)
    _, state = layer(x[:, :2], positions=positions[:, :2], return_state=True)
    assert state.position.tolist() == [7, 52]
    assert_close(layer(x[:, 2:], state=state), whole[:, 2:])


def test_states_are_copied_and_reordered() -> None:
    layer, x = make(), numbers(2, 4, 8).requires_grad_()
    _, state = layer(x, return_state=True)
    copied = state.clone()
    assert copied.k.requires_grad
    assert copied.k.data_ptr() != state.k.data_ptr()
    assert not state.detach().v.requires_grad
    assert state.donate() is state
    swapped, token = state.reorder(torch.tensor([1, 0, 1])), numbers(1, 1, 8).expand(2, 1, 8)
    assert_close(
        layer(token[:1].expand(3, 1, 8), state=swapped), layer(token, state=state)[torch.tensor([1, 0, 1])]
    )
    assert torch.equal(state.reorder(torch.tensor([1, 0, 1], dtype=torch.uint8)).k, swapped.k)
    with pytest.raises(TypeError, match=r"index: got torch.bool, expected integers"):
        state.reorder(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"index: got shape \(1, 1\), expected \(b,\)"):
        state.reorder(torch.tensor([[0]]))


def test_a_state_of_another_theta_is_refused() -> None:
    theta, x = torch.rand(16), torch.zeros(1, 3, 32)
    one, other = (SoftmaxAttention(32, 1, positions=Rotary(32, theta=y)) for y in (theta, theta.flip(0)))
    with pytest.raises(ValueError, match="state: made with"):
        other(x, state=one(x, return_state=True)[1])


@every_encoding
def test_packed_sequences_are_separate_ones(name: str) -> None:
    layer, x = make(name), numbers(1, 9, 8)
    for cuts in ([0, 4, 9], [0, 0, 3, 3, 4, 9, 9], [0, 9]):
        out = layer(x, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
        separate = [layer(x[:, a:b]) for a, b in pairwise(cuts)]
        assert_close(out, torch.cat(separate, 1))


@every_encoding
def test_later_tokens_do_not_change_one_bit(name: str) -> None:
    layer, x = make(name), numbers(1, 40, 8)
    changed = x.clone()
    changed[:, 25:] = 99.0
    assert torch.equal(layer(x)[:, :25], layer(changed)[:, :25])


@every_encoding
def test_a_query_without_keys_gives_zero_and_finite_gradients(name: str) -> None:
    layer, x = make(name), numbers(2, 6, 8).requires_grad_()
    mask = torch.tensor([[False] * 6, [False, False, True, False, True, True]])
    y = layer(x, key_mask=mask)
    assert torch.equal(y[0], torch.zeros(6, 8, dtype=torch.float64))
    assert not y[1, :2].any()
    assert y[1, 2:].all()
    y.sum().backward()
    for grad in (x.grad, *(parameter.grad for parameter in layer.parameters())):
        assert grad is not None
        assert grad.isfinite().all()
    layer.causal = False
    assert not layer(x, x[:, :0]).any()


@every_encoding
def test_what_masked_keys_hold_does_not_matter(name: str) -> None:
    layer, x = make(name), numbers(1, 6, 8)
    mask = torch.tensor([[True, False, True, True, False, True]])
    y = x.clone()
    y[:, ~mask[0]] = torch.inf
    assert torch.equal(layer(x, key_mask=mask)[mask], layer(y, key_mask=mask)[mask])


@every_encoding
def test_gradients_reach_every_parameter(name: str) -> None:
    layer, x = make(name), numbers(2, 6, 8).requires_grad_()
    (layer(x) * numbers(2, 6, 8, seed=3)).sum().backward()
    for name, tensor in (*layer.named_parameters(), ("x", x)):
        assert tensor.grad is not None, name
        assert tensor.grad.any(), name


@every_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_runs_in_half_precision_and_under_autocast(name: str, dtype: torch.dtype) -> None:
    layer, x = make(name), numbers(2, 7, 8)
    expected = layer(x)
    twin = copy.deepcopy(layer).to(dtype)
    y, state = twin(x.to(dtype), return_state=True)
    bound = 16 * torch.finfo(dtype).eps * float(expected.detach().abs().max())  # a chain of rounded products
    assert y.dtype == state.k.dtype == dtype
    assert float((y - expected).detach().abs().max()) < bound
    layer = layer.float()
    with torch.autocast("cpu", dtype):
        y, state = layer(x.float(), return_state=True)
        layer(x[:, :1].float(), state=state)
    assert float((y - expected).detach().abs().max()) < bound


def test_length_0_and_batch_0_give_empty_outputs() -> None:
    for name in NAMES:
        for shape in ((2, 0, 8), (0, 5, 8)):
            y, state = make(name)(numbers(*shape), return_state=True)
            assert y.shape == shape
            assert state.position.shape == shape[:1]


def test_encodings_may_be_given_as_objects() -> None:
    x = numbers(1, 5, 8)
    assert torch.equal(make(Rotary(4))(x), make("rope")(x))
    assert not torch.allclose(make(Rotary(4, base=10.0))(x), make("rope")(x))
    assert make(Shaw(2, 4, max_distance=1))(x).shape == x.shape
    with torch.device("meta"):
        layer = SoftmaxAttention(8, 2, positions="deberta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


def test_attention_factor_scales_queries_and_keys() -> None:
    yarn = Rotary(4, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    layer, plain, x = make(yarn), make(Rotary(4, theta=yarn.theta)), numbers(1, 6, 8)
    with torch.no_grad():
        plain.q_proj.weight *= yarn.attention_factor**2
    assert_close(layer(x), plain(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "show"}, r"positions='show': expected one of rope, .*did you mean 'shaw'"),
        ({"positions": "learned"}, "positions='learned': add an absolute encoding"),
        ({"positions": Shaw(2, 8)}, r"made for .* \(2, 8, 8\), expected \(2, 4, 4\)"),
        ({"positions": Rotary(8)}, "expected dim=4"),
        ({"positions": Rotary(4, xpos=512)}, "without axes and xpos"),
        ({"positions": None}, "positions=None: expected one of rope"),
        ({"num_kv_heads": 3}, "num_kv_heads=3: expected a divisor of num_heads=2"),
        ({"head_dim": 0}, "head_dim=0"),
    ],
)
def test_impossible_layers_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(8, 2, **options)
    with pytest.raises(ValueError, match="embed_dim=9: expected a multiple of num_heads=2"):
        SoftmaxAttention(9, 2)


def test_causal_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="causal='no': expected True or False"):
        SoftmaxAttention(8, 2, causal="no")


X = torch.zeros(2, 3, 8, dtype=torch.float64)
LINEAR_STATE = LinearRoPEAttention(8, 2, dtype=torch.float64)(X, return_state=True)[1]
STATE = KeyValueState(
    torch.zeros(2, 3, 2, 4).double(), torch.zeros(2, 3, 2, 4).double(), torch.arange(3).expand(2, 3),
    torch.ones(2, 3, dtype=torch.bool), Rotary(4, base=5.0).identity,
)  # fmt: skip


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"x: got shape \(3, 8\)"),
        ({"context": X[:, :2]}, ValueError, "context: got 2 tokens, expected x's 3, or causal=False"),
        ({"context": X[:1]}, ValueError, "context: got batch 1, expected x's 2"),
        ({"positions": torch.arange(4)}, ValueError, r"positions: got shape \(4,\), expected \(3,\)"),
        ({"positions": torch.rand(3)}, TypeError, "positions: got torch.float32, expected integers"),
        ({"positions": torch.tensor([0, -1, 2])}, ValueError, r"positions: got -1 \.\. 2, expected 0"),
        ({"context_positions": torch.tensor([0, 1, 2**31])}, ValueError, "key_positions: got 0"),
        ({"key_mask": torch.ones(2, 3)}, TypeError, "key_mask: got torch.float32"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"key_mask: got shape \(2, 4\)"),
        ({"state": LINEAR_STATE}, TypeError, "state: got LinearAttentionState, expected KeyValueState"),
        ({"state": STATE}, ValueError, r"made with Rotary\(4, base=5.0.*expected Rotary\(4, base=1"),
        ({"state": STATE.reorder(torch.tensor([0]))}, ValueError, r"state.k: got .* \(1, 3, 2, 4\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens: got batch 2, expected 1"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 3]), "return_state": True}, ValueError, "return_state"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens: got torch.float32"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens: got shape \(1,\)"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 2, 1, 3])}, ValueError, r"got \[0, 2, 1, 3\], expected"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 4])}, ValueError, r"got \[0, 4\], expected"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(how, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(**({"x": X} | how))
