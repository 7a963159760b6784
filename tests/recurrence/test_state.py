"""LinearAttentionState: its contract, and its independence of every other tensor."""

import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

from linrope import LinearAttentionState, Rotary, linear_rope_attention, linear_rope_state
from tests.support.oracle import randoms
from tests.support.states import B, D, E, G, assert_same, attend, some_state, tensors, tokens


def test_position_goes_on_from_the_state() -> None:
    state = some_state(5)
    for n in (3, 0, 1):
        expected = state.position + n
        _, state = attend(tokens(n), state)
        assert torch.equal(state.position, expected)


@pytest.mark.parametrize(
    ("how", "expected"),
    [({"positions": torch.tensor([4, 9, 7])}, [8, 8, 8]),
     ({"positions": torch.tensor([[0, 1, 2], [5, 6, 7], [9, 9, 9]], dtype=torch.int32)}, [3, 8, 10]),
     ({"positions": torch.tensor([1, 2, 3]), "key_positions": torch.tensor([4, 5, 6])}, [7, 7, 7])],
)  # fmt: skip
def test_position_follows_the_last_key_where_positions_are_given(how, expected) -> None:
    _, state = attend(tokens(3), **how)
    assert state.position.tolist() == expected
    _, after = attend(tokens(2), state)
    assert after.position.tolist() == [position + 2 for position in expected]


def test_position_counts_keys_where_queries_are_of_another_length() -> None:
    _, k, v = tokens(5)
    for n in (0, 2):
        _, state = attend((tokens(n)[0], k, v), causal=False)
        assert state.position.tolist() == [5] * B


def test_detach_keeps_the_numbers_and_cuts_the_graph_which_clone_keeps() -> None:
    inputs = [x.requires_grad_() for x in tokens(4)]
    state = attend(inputs)[1]
    state.clone().kv.sum().backward()
    assert inputs[1].grad is not None
    assert not any(x.requires_grad for x in tensors(state.detach()))
    assert_same(state.detach(), state)


def test_to_moves_every_tensor_and_converts_kv_alone() -> None:
    state = some_state()
    assert {x.device.type for x in tensors(state.to("meta"))} == {"meta"}
    for dtype in (torch.float32, torch.float64):
        moved = state.to("cpu", dtype)
        assert (moved.kv.dtype, moved.z.dtype, moved.position.dtype) == (dtype, torch.float64, torch.int64)
        assert_same(replace(moved, kv=moved.kv.float()), state)
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        with pytest.raises(TypeError, match=f"dtype: got {dtype}, expected float32 or float64"):
            state.to(dtype=dtype)


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 0], [2], [0, 0, 1, 1, 2, 2], []])
def test_reorder_is_as_if_the_sequences_had_been_fed_in_that_order(index: list[int]) -> None:
    order = torch.tensor(index, dtype=torch.int64)
    history, now = tokens(5), tokens(2, seed=1, b=len(index))
    out, state = attend(now, attend(history)[1].reorder(order))
    expected, expected_state = attend(now, attend([x[order] for x in history])[1])
    assert torch.equal(out, expected)
    assert_same(state, expected_state)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.uint16])
def test_reorder_of_a_pool_counts_its_slots(dtype: torch.dtype) -> None:
    pool = some_state(5)
    chosen = pool.at(torch.tensor([2, 0])).reorder(torch.tensor([1, 0, 1], dtype=dtype))
    assert chosen.slots is None
    assert_same(chosen, pool.reorder(torch.tensor([0, 2, 0], dtype=dtype)))


@pytest.mark.parametrize(
    ("slots", "index", "error", "message"),
    [([2, 0], torch.tensor([0, 2]), IndexError, r"^index: got .*, expected numbers 0 .. 1$"),
     ([2, 0], torch.tensor([-1, 0]), IndexError, r"^index: got .*, expected numbers 0 .. 1$"),
     (None, torch.tensor([B]), IndexError, r"^index: got .*, expected numbers 0 .. 2$"),
     (None, torch.zeros(2, 1).long(), ValueError, r"index: got shape \(2, 1\), expected \(b,\)"),
     (None, torch.zeros(2), TypeError, "index: got torch.float32, expected integers"),
     (None, torch.zeros(3).bool(), TypeError, "index: got torch.bool, expected integers")],
)  # fmt: skip
def test_reorder_refuses_all_but_numbers_of_sequences_that_exist(slots, index, error, message) -> None:
    state = some_state() if slots is None else some_state().at(torch.tensor(slots))
    with pytest.raises(error, match=message):
        state.reorder(index)


def test_copies_share_no_memory_with_the_state() -> None:
    state = some_state()
    kept = pickle.loads(pickle.dumps(state))
    for copied in (
        state.detach(), state.clone(), state.to(), state.to("cpu", state.kv.dtype), state.reorder(torch.arange(B)),
    ):  # fmt: skip
        for x in tensors(copied):
            x.fill_(77)
        assert_same(state, kept)


@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_neither_changes_nor_shares_the_state_it_is_given(backend, causal, n, grad) -> None:
    given = some_state()
    inputs = [x.requires_grad_(grad) for x in tokens(n, seed=1)]
    kept = pickle.loads(pickle.dumps(given))
    _, state = attend(inputs, given, backend=backend, causal=causal)
    assert_same(given, kept)
    returned = pickle.loads(pickle.dumps(state.detach()))
    with torch.no_grad():
        for x in (*tensors(given), *inputs):
            x.fill_(77)
        assert_same(state.detach(), returned)
        for x in tensors(state):
            x.fill_(55)
    assert all(bool((x == 77).all()) for x in tensors(given))


@torch.no_grad()
def test_a_state_goes_in_and_out_of_an_exported_program() -> None:
    class Step(torch.nn.Module):
        def forward(self, q, k, v, state):
            return attend((q, k, v), state)

    inputs = (*tokens(5), some_state())
    out, after = torch.export.export(Step(), inputs).module()(*inputs)
    expected, expected_state = Step()(*inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(after.kv, expected_state.kv)
    assert torch.equal(after.position, expected_state.position)


def test_state_is_a_pytree() -> None:
    state = some_state()
    leaves, spec = pytree.tree_flatten({"layer": state})
    assert all(x is y for x, y in zip(leaves, tensors(state), strict=True))
    assert_same(pytree.tree_unflatten(leaves, spec)["layer"], state)
    pool = pytree.tree_map(torch.clone, state.at(torch.tensor([0])))
    assert pool.slots.tolist() == [0]
    doubled = pytree.tree_map(lambda x: 2 * x, state)
    assert isinstance(doubled, LinearAttentionState)
    assert torch.equal(doubled.kv, 2 * state.kv)
    assert doubled.identity == state.identity
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize(
    ("name", "tensor", "error", "message"),
    [("kv", torch.zeros(B, G, D, E).bfloat16(), TypeError, "state.kv: got torch.bfloat16"),
     ("z", torch.zeros(B, G, D).half(), TypeError, "state.z: got torch.float16, expected float32"),
     ("position", torch.zeros(B).int(), TypeError, "state.position: got torch.int32, expected int64"),
     ("kv", torch.zeros(B, G, D), ValueError, r"kv \(3, 2, 4\), .* expected \(b, g, f, e\)"),
     ("z", torch.zeros(B, G, D + 1), ValueError, r"z \(3, 2, 5\)"),
     ("position", torch.zeros(B + 1).long(), ValueError, r"position \(4,\)"),
     ("angle", torch.zeros(B, D).long(), ValueError, r"state.angle: got \(3, 4\), expected \(3, g or 1, pairs\)"),
     ("angle", torch.zeros(B + 1, G, 2).long(), ValueError, r"state.angle: got \(4, 2, 2\)"),
     ("log_scale", torch.zeros(B).double(), ValueError, r"state.log_scale: got \(3,\), expected \(3, 2\)"),
     ("log_scale", torch.zeros(B + 1, G).double(), ValueError, r"state.log_scale: got \(4, 2\)"),
     ("log_scale", torch.zeros(B, G).long(), TypeError, r"log_scale: got torch.int64, expected float32 or float64")],
)  # fmt: skip
def test_construction_refuses_other_types_and_shapes(name, tensor, error, message) -> None:
    with pytest.raises(error, match=message):
        replace(some_state(), **{name: tensor})


@pytest.mark.parametrize(
    "how",
    [*({"feature_map": x} for x in ("exp", None)),
     *({"rotary": x} for x in (None, Rotary(D, base=500.0), Rotary(D, layout="half"), Rotary(D, rotary_dim=2)))],
    ids=str,
)  # fmt: skip
def test_a_call_refuses_the_state_of_another_map_or_rotation(how) -> None:
    with pytest.raises(ValueError, match=r"state: made with .*; expected .*, as in this call"):
        attend(tokens(2), some_state(), **how)


def test_a_state_names_the_order_in_which_older_files_name_it() -> None:
    q, names = torch.randn(1, 3, 2, 4), []
    for order in ("after", "before"):
        state = linear_rope_attention(q, q, q, rotary=Rotary(4), rope_order=order, return_state=True)[1]
        names.append(state.identity)
        alone = linear_rope_state(q, q, rotary=Rotary(4), rope_order=order)
        assert_same(alone, state)
    assert names[1] == f"{names[0]} before"


def test_states_join_in_one_batch_and_go_on_as_if_each_were_alone() -> None:
    inputs = tokens(6)
    alone = [attend([x[i : i + 1, : 3 + i] for x in inputs])[1] for i in range(3)]
    both = LinearAttentionState.cat([alone[0], LinearAttentionState.cat(alone[1:])])
    assert both.position.tolist() == [3, 4, 5]
    out, after = attend([x[:, -1:] for x in inputs], both)
    for i, state in enumerate(alone):
        one, last = attend([x[i : i + 1, -1:] for x in inputs], state)
        assert torch.equal(out[i : i + 1], one)
        assert torch.equal(after.kv[i : i + 1], last.kv)


@pytest.mark.parametrize("order", [1, -1])
def test_states_of_calls_with_and_without_gradients_join(order: int) -> None:
    q, k, v = randoms(2, 4, 2, 4)
    steps = torch.rand(2, 4, 1, 2, dtype=torch.float64).requires_grad_()
    fixed, chosen = steps.detach(), [0, 1][::order]
    states = [
        linear_rope_state(k[i : i + 1, :3], v[i : i + 1, :3], angle_steps=x[i : i + 1, :3])
        for i, x in enumerate((steps, fixed))
    ]

    def gradient(rows: list[int], state: LinearAttentionState) -> torch.Tensor:
        out = linear_rope_attention(
            *(x[rows, 3:] for x in (q, k, v)), angle_steps=fixed[rows, 3:], state=state
        )
        return torch.autograd.grad(out.sum(), steps, retain_graph=True)[0]

    both = LinearAttentionState.cat([states[i] for i in chosen])
    torch.testing.assert_close(gradient(chosen, both), gradient([0], states[0]))


def test_one_state_joins_to_itself_and_one_of_a_compiled_call_to_others() -> None:
    known = replace(some_state(), identity="T2R#0123456789abcdef; None")
    assert_same(LinearAttentionState.cat([known]), known)
    inside = replace(known, identity="T2R#?; None")
    for states in ([known, inside], [inside, known]):
        assert LinearAttentionState.cat(states).identity == known.identity
    with pytest.raises(ValueError, match="states: got identities"):
        LinearAttentionState.cat([inside, known, replace(known, identity="T2R#fedcba9876543210; None")])


def test_a_pool_has_rows_for_no_sequence() -> None:
    assert some_state().at(torch.zeros(0, dtype=torch.int64)).sequences == 0


def test_states_that_differ_do_not_join() -> None:
    k = v = torch.randn(1, 3, 2, 4)
    state = linear_rope_state(k, v)
    others = {
        "states: got identities": linear_rope_state(k, v, feature_map="relu"),
        "states: got kv (2, 4, 4) torch.float64 cpu and kv (2, 4, 4) torch.float32": state.to(dtype=torch.float64),
        "expected equal shapes apart from the batch": linear_rope_state(k[:, :, :1], v[:, :, :1]),
        "states: got angle (2, 2) torch.int64 cpu and angle None, expected equal shapes":
            linear_rope_state(k, v, angle_steps=torch.zeros(1, 3, 2, 2)),
    }  # fmt: skip
    for cause, other in others.items():
        with pytest.raises(ValueError, match=re.escape(cause)):
            LinearAttentionState.cat([state, other])
    with pytest.raises(ValueError, match="states: got none"):
        LinearAttentionState.cat([])


def test_a_repr_is_short() -> None:
    state = some_state()
    assert len(repr(state)) < 120
    assert state.identity not in repr(state)
    assert f"position [{state.position[0]}" in repr(state)
    for rows, shown in ((4, "[5, 5, 5, 5])"), (5, "[5, 5, 5, 5, ..])")):
        assert repr(state.reorder(torch.zeros(rows).long())).endswith(shown)
