"""SoftmaxAttention: softmax of rotated products between projections, masks, states, packing."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from linrope import LinearRoPEAttention, Rotary
from linrope.layer.key_value_state import KeyValueState
from linrope.layer.softmax_attention import SoftmaxAttention

ROTATIONS = ("interleaved", None)
every_rotation = pytest.mark.parametrize("rotary", ROTATIONS)


class Slower(Rotary):
    identity = "slower"  # type: ignore[assignment]

    def turns_per_position(self, device: torch.device) -> Tensor:
        return super().turns_per_position(device) // 2


def make(rotary: str | Rotary | None = "interleaved", **options) -> SoftmaxAttention:
    torch.manual_seed(0)
    layer = SoftmaxAttention(8, 2, rotary=rotary, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def numbers(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device())


def by_hand(
    layer: SoftmaxAttention, x: Tensor, context: Tensor, positions: Tensor, key_positions: Tensor, seen: Tensor
) -> Tensor:  # fmt: skip
    """The layer's equation. positions (b, n), key_positions (b, m); seen (b, n, m): the keys that each query sees."""
    h, g, rotary = layer.num_heads, layer.num_kv_heads, layer.rotary
    q = layer.q_proj(x).unflatten(-1, (h, -1))
    k, v = (
        y(context).unflatten(-1, (g, -1)).repeat_interleave(h // g, 2) for y in (layer.k_proj, layer.v_proj)
    )
    if rotary is not None:
        q, k = rotary(q, positions), rotary(k, key_positions)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(layer.head_dim)
    weights = scores.exp() * seen[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)  # a query without keys: 0
    out = torch.einsum("bhnm,bmhe->bnhe", weights, v)
    return layer.o_proj(out.flatten(-2))


def order(b: int, n: int) -> Tensor:
    return torch.ones(b, n, n, dtype=torch.bool).tril()


@every_rotation
@pytest.mark.parametrize(
    "options", [{}, {"value_head_dim": 9}, {"num_kv_heads": 1, "head_dim": 6, "value_head_dim": 3, "bias": True}]
)  # fmt: skip
def test_it_is_softmax_of_the_scores(rotary, options) -> None:
    layer, x, positions = make(rotary, **options), numbers(2, 5, 8), torch.arange(5).expand(2, 5)
    assert_close(layer(x), by_hand(layer, x, x, positions, positions, order(2, 5)))
    positions = torch.tensor([[4, 0, 9, 2, 2], [30, 1, 2, 3, 4]])
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, False, True]])
    seen = order(2, 5) & mask[:, None]
    expected = by_hand(layer, x, x, positions, positions, seen)
    assert_close(layer(x, positions=positions, key_mask=mask), expected)


@every_rotation
def test_cross_attention_sees_all_keys_of_the_context(rotary) -> None:
    layer, x, context = make(rotary, causal=False), numbers(2, 5, 8), numbers(2, 3, 8, seed=2)
    here, there = torch.arange(5).expand(2, 5), torch.arange(3).expand(2, 3)
    seen = torch.ones(2, 5, 3, dtype=torch.bool)
    assert_close(layer(x, context), by_hand(layer, x, context, here, there, seen))
    out = layer(x, context, positions=here[0] + 7, context_positions=there * 3)
    assert_close(out, by_hand(layer, x, context, here + 7, there * 3, seen))


@every_rotation
def test_a_shift_of_all_positions_changes_nothing(rotary) -> None:
    layer, x = make(rotary), numbers(2, 6, 8)
    assert_close(layer(x, positions=torch.arange(6) + 100_003), layer(x), rtol=0, atol=1e-9)
    moved = layer(x, positions=torch.tensor([0, 1, 2, 3, 4, 9]))
    assert torch.allclose(moved, layer(x)) == (rotary is None)


@every_rotation
def test_cut_anywhere_and_resumed_gives_what_one_call_gives(rotary) -> None:
    layer, x = make(rotary, num_kv_heads=1), numbers(2, 7, 8)
    mask = torch.tensor([[True] * 7, [False, True, True, False, True, True, True]])
    for key_mask in (None, mask):
        whole, end = layer(x, key_mask=key_mask, return_state=True)
        for cuts in ([3], [0, 4], [1, 2, 3, 4, 5, 6]):
            state, pieces = None, []
            for a, b in zip([0, *cuts], [*cuts, 7]):
                how = {"key_mask": None if key_mask is None else key_mask[:, a:b], "return_state": True}
                out, state = layer(x[:, a:b], state=state and state.donate(), **how)
                pieces.append(out)
            assert_close((torch.cat(pieces, 1), state.k, state.v), (whole, end.k, end.v))
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
    index, token = torch.tensor([1, 0, 1]), numbers(1, 1, 8)
    swapped = state.reorder(index)
    expected = layer(token.expand(2, 1, 8), state=state)[index]
    assert_close(layer(token.expand(3, 1, 8), state=swapped), expected)
    assert torch.equal(state.reorder(index.byte()).k, swapped.k)
    with pytest.raises(TypeError, match=r"index: got torch.bool, expected integers"):
        state.reorder(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"index: got shape \(1, 1\), expected \(b,\)"):
        state.reorder(torch.tensor([[0]]))
    with pytest.raises(IndexError, match=r"index: got \[2\], expected numbers 0 .. 1"):
        state.reorder(torch.tensor([2]))


def test_a_state_of_another_theta_is_refused() -> None:
    theta, x = torch.rand(16), torch.zeros(1, 3, 32)
    one, other = (SoftmaxAttention(32, 1, rotary=Rotary(32, theta=y)) for y in (theta, theta.flip(0)))
    with pytest.raises(ValueError, match="state: made with"):
        other(x, state=one(x, return_state=True)[1])


@every_rotation
def test_packed_sequences_are_separate_ones(rotary) -> None:
    layer, x = make(rotary), numbers(1, 9, 8)
    for cuts in ([0, 4, 9], [0, 0, 3, 3, 4, 9, 9], [0, 9]):
        out = layer(x, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
        separate = [layer(x[:, a:b]) for a, b in pairwise(cuts)]
        assert_close(out, torch.cat(separate, 1))


@every_rotation
def test_later_tokens_do_not_change_one_bit(rotary) -> None:
    layer, x = make(rotary), numbers(1, 40, 8)
    changed = x.clone()
    changed[:, 25:] = 99.0
    assert torch.equal(layer(x)[:, :25], layer(changed)[:, :25])


@every_rotation
def test_a_query_without_keys_gives_zero_and_finite_gradients_that_reach_every_parameter(rotary) -> None:
    layer, x = make(rotary), numbers(2, 6, 8).requires_grad_()
    mask = torch.tensor([[False] * 6, [False, False, True, False, True, True]])
    y = layer(x, key_mask=mask)
    assert torch.equal(y[0], torch.zeros(6, 8, dtype=torch.float64))
    assert not y[1, :2].any()
    assert y[1, 2:].all()
    (y * numbers(2, 6, 8, seed=3)).sum().backward()
    for name, tensor in (*layer.named_parameters(), ("x", x)):
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.any(), name
    layer.causal = False
    assert not layer(x, x[:, :0]).any()


@every_rotation
def test_what_masked_keys_hold_does_not_matter(rotary) -> None:
    layer, x = make(rotary), numbers(1, 6, 8)
    mask = torch.tensor([[True, False, True, True, False, True]])
    y = x.clone()
    y[:, ~mask[0]] = torch.inf
    assert torch.equal(layer(x, key_mask=mask)[mask], layer(y, key_mask=mask)[mask])


@every_rotation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_runs_in_half_precision_and_under_autocast(rotary, dtype: torch.dtype) -> None:
    layer, x = make(rotary), numbers(2, 7, 8)
    expected = layer(x)
    twin = copy.deepcopy(layer).to(dtype)
    half, state = twin(x.to(dtype), return_state=True)
    assert half.dtype == state.k.dtype == dtype
    layer = layer.float()
    with torch.autocast("cpu", dtype):
        inside, state = layer(x.float(), return_state=True)
        layer(x[:, :1].float(), state=state)
    bound = 16 * torch.finfo(dtype).eps * float(expected.detach().abs().max())  # a chain of rounded products
    for y in (half, inside):
        assert float((y - expected).detach().abs().max()) < bound


def test_length_0_and_batch_0_give_empty_outputs() -> None:
    for rotary in ROTATIONS:
        for shape in ((2, 0, 8), (0, 5, 8)):
            y, state = make(rotary)(numbers(*shape), return_state=True)
            assert y.shape == shape
            assert state.position.shape == shape[:1]


def test_rotations_may_be_given_as_objects() -> None:
    x = numbers(1, 5, 8)
    assert torch.equal(make(Rotary(4))(x), make()(x))
    assert not torch.allclose(make(Rotary(4, base=10.0))(x), make()(x))
    assert torch.equal(make({"base": 10.0})(x), make(Rotary(4, base=10.0))(x))


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
        ({"rotary": "both"}, "rotary='both': expected one of interleaved, half"),
        ({"rotary": "selective"}, "rotary='selective': expected a rotation without steps"),
        ({"rotary": Rotary(8)}, "expected dim=4"),
        ({"rotary": Rotary(4, xpos=512)}, "without axes and xpos"),
        ({"embed_dim": 9}, "embed_dim=9: expected a multiple of num_heads=2"),
        ({"causal": "no"}, "causal='no': expected True or False"),
        (
            {"rotary": Slower(4)},
            "got Slower with its own turns_per_position, which rope_order='before' does not call",
        ),
    ],
)
def test_impossible_layers_are_refused(options, message: str) -> None:
    of_a_type = "causal" in options or "its own" in message
    with pytest.raises(TypeError if of_a_type else ValueError, match=message):
        SoftmaxAttention(**{"embed_dim": 8, "num_heads": 2, **options})


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
        ({"context_positions": torch.tensor([0, 1, 2**31])}, ValueError, "key_positions: got 0"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"key_mask: got shape \(2, 4\)"),
        ({"state": LINEAR_STATE}, TypeError, "state: got LayerState, expected KeyValueState"),
        ({"state": STATE}, ValueError, r"made with Rotary\(4, base=5.0.*expected Rotary\(4, base=1"),
        ({"state": STATE.reorder(torch.tensor([0]))}, ValueError, r"state.k: got .* \(1, 3, 2, 4\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, "cu_seqlens: got batch 2, expected 1"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 3]), "return_state": True}, ValueError, "return_state"),
        ({"x": X[:1], "cu_seqlens": torch.tensor([0, 4])}, ValueError, r"got \[0, 4\], expected"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(how, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(**({"x": X} | how))
