"""LayerState: the sums of a layer and its last inputs go the same way."""

import copy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from linrope import LinearRoPEAttention, linear_rope_state
from linrope.layer.state import LayerState

G, D, E, ROWS = 2, 4, 6, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "convolution": {"short_conv": 3},
}
every_layer = pytest.mark.parametrize("name", OPTIONS)


def make(name: str) -> LinearRoPEAttention:
    torch.manual_seed(1)
    return LinearRoPEAttention(8, G, value_head_dim=E, **OPTIONS[name])


def some_state(name: str = "convolution", n: int = 5, rows: int = ROWS) -> LayerState:
    x = torch.randn(rows, n, 8, generator=torch.Generator().manual_seed(n))
    return make(name)(x, return_state=True)[1].detach()


def assert_equal(a: LayerState, b: LayerState) -> None:
    assert a.identity == b.identity
    torch.testing.assert_close(a.tensors(), b.tensors(), rtol=0, atol=0)


@every_layer
def test_a_layer_returns_one_type_with_the_tensors_of_its_options(name: str) -> None:
    state, options = some_state(name), OPTIONS[name]
    assert type(state) is LayerState
    assert (state.conv is not None) == ("short_conv" in options)
    assert list(state.tensors())[:3] == ["kv", "z", "position"]
    assert state.position.tolist() == [5] * ROWS
    assert (state.sequences, state.slots, state.donated) == (ROWS, None, False)


@every_layer
def test_copies_have_all_tensors(name: str, tmp_path) -> None:
    state = some_state(name)
    state.save(tmp_path / "state")
    torch.save(state, tmp_path / "state.pt")
    copies = [
        state.clone(),
        copy.deepcopy(state),
        LayerState.load(tmp_path / "state"),
        torch.load(tmp_path / "state.pt", weights_only=True),
        LayerState.cat([state.reorder(torch.tensor([0])), state.reorder(torch.tensor([1, 2]))]),
        state.to("cpu"),
        LayerState.from_tensors(state.clone().tensors(), state.identity),
        pytree.tree_map(torch.clone, state),
    ]
    for other in copies:
        assert_equal(other, state)
        memory = zip(other.tensors().values(), state.tensors().values(), strict=True)
        assert not any(x.data_ptr() == y.data_ptr() for x, y in memory)
    detached = state.detach().tensors()
    assert not any(x.requires_grad for x in detached.values())
    assert {x.device.type for x in state.to("meta").tensors().values()} == {"meta"}
    assert state.to(dtype=torch.float64).sums.kv.dtype == torch.float64


def test_the_pytree_has_names_and_can_be_written_down() -> None:
    leaves, spec = pytree.tree_flatten_with_path(some_state())
    assert ".sums.kv" in {pytree.keystr(path) for path, _ in leaves}
    assert ".conv" in {pytree.keystr(path) for path, _ in leaves}
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_repr_names_the_tensors() -> None:
    text = repr(some_state())
    assert text.startswith("LayerState(LinearAttentionState(kv (3, 2, 4, 6) float32, ")
    assert text.endswith(", conv (3, 2, 28))")


@every_layer
@torch.no_grad()
def test_rows_of_a_pool_are_selected_reordered_and_written_together(name: str) -> None:
    pool, slots = some_state(name, rows=4), torch.tensor([3, 1])
    before = pool.clone()
    part = pool.at(slots)
    assert part.sequences == 2
    assert_equal(part.rows(), before.reorder(slots))
    assert_equal(part.reorder(torch.tensor([1, 1])), before.reorder(torch.tensor([1, 1])))
    new = some_state(name, n=7, rows=2)
    part.write(new)
    assert_equal(part.rows(), new)
    others = torch.tensor([0, 2])
    assert_equal(pool.reorder(others), before.reorder(others))
    part.write(before.reorder(slots).tensors())
    assert_equal(pool, before)


@torch.no_grad()
def test_memory_that_cannot_be_written_is_named_and_nothing_changes() -> None:
    layer, good, x = make("convolution"), some_state(), torch.randn(ROWS, 1, 8)
    bad = LayerState(good.sums, good.conv[:1].expand_as(good.conv))
    before = bad.clone()
    for held in (bad.donate(), bad.at(torch.arange(ROWS))):
        with pytest.raises(ValueError, match=r"^state\.conv: got entries that share memory"):
            layer(x, state=held, return_state=True)
    with pytest.raises(ValueError, match=r"^state\.conv: got entries that share memory"):
        bad.write(some_state(n=7))
    assert_equal(bad, before)


@torch.no_grad()
def test_write_checks_everything_first() -> None:
    pool, new = some_state(), some_state(n=7)
    before, row = pool.clone(), torch.tensor([1])
    with pytest.raises(ValueError, match=r"^state\.conv: got shape \(3, 2, 28\), expected \(1, 2, 28\)"):
        pool.at(row).write({"kv": new.sums.kv[:1], "conv": new.conv})
    with pytest.raises(ValueError, match=r"^state\.kv: got shape"):
        pool.at(row).write({"kv": new.sums.kv, "conv": new.conv[:1]})
    with pytest.raises(ValueError, match=r"^state: got kv, z, position; expected kv, z, position, conv"):
        pool.write(LayerState(new.sums))
    with pytest.raises(ValueError, match=r"^state: got conv; expected some of kv, z, position$"):
        some_state("plain").write({"conv": new.conv})
    with pytest.raises(ValueError, match=r"^state: made with "):
        pool.write(LayerState.from_tensors(new.tensors(), "another"))
    assert_equal(pool, before)


SUMS = linear_rope_state(torch.zeros(ROWS, 1, G, D), torch.zeros(ROWS, 1, G, E))


@pytest.mark.parametrize(
    ("name", "x", "error", "message"),
    [("conv", torch.zeros(ROWS, 8), ValueError, r"^state.conv: got \(3, 8\), expected \(3, taps - 1, channels\)"),
     ("conv", torch.zeros(ROWS + 1, 3, 8), ValueError, r"^state.conv: got \(4, 3, 8\)"),
     ("conv", [1.0], TypeError, "^state.conv: got list, expected Tensor"),
     ("conv", torch.zeros(ROWS, 3, 8, device="meta"), ValueError, "^state.conv: got a tensor on meta, expected cpu"),
     ("sums", torch.zeros(3), TypeError, "^state.sums: got Tensor, expected LinearAttentionState"),
     ("more", 1, ValueError, "^state: got sums, conv, more; expected sums, conv$")],
)  # fmt: skip
def test_states_and_pickles_of_other_types_and_shapes_are_refused(
    name: str, x: Any, error, message: str
) -> None:
    state = LayerState(SUMS)
    with pytest.raises(error, match=message):
        state.__setstate__(vars(state) | {name: x})  # as torch.load does
    if name != "more":
        with pytest.raises(error, match=message):
            LayerState(**vars(LayerState(SUMS)) | {name: x})


def test_states_of_other_kinds_are_not_joined() -> None:
    a, b = some_state(), some_state("plain")
    with pytest.raises(ValueError, match=r"^states: got neither and conv \(b, 2, 28\) torch.float32"):
        LayerState.cat([a, b])
    with pytest.raises(ValueError, match=r"^states: got none"):
        LayerState.cat([])


@pytest.mark.parametrize("content", ["sums", "text"])
def test_a_file_of_something_else_is_refused(content: str, tmp_path) -> None:
    path = tmp_path / "state"
    if content == "sums":
        SUMS.save(path)
    else:
        path.write_text("text")
    with pytest.raises(ValueError, match=str(path)):
        LayerState.load(path)
