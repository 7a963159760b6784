"""One file for the states of a whole model."""

from pathlib import Path

import pytest
import torch

from linrope.common.files import load_tensors, save_tensors
from linrope.layer.states import load_states, save_states
from tests.layer.test_state import OPTIONS, some_state

STATES = [some_state(name) for name in OPTIONS]


def test_a_file_gives_the_states_that_were_saved_and_of_a_pool_the_rows_at_the_slots(tmp_path: Path) -> None:
    save_states([STATES[0].at(torch.tensor([2, 0])), *STATES], tmp_path / "states")
    expected = [STATES[0].reorder(torch.tensor([2, 0])), *STATES]
    for loaded, state in zip(load_states(tmp_path / "states", device="cpu"), expected, strict=True):
        assert (type(loaded), loaded.identity) == (type(state), state.identity)
        assert loaded.tensors().keys() == state.tensors().keys()
        for name, x in state.tensors().items():
            assert torch.equal(loaded.tensors()[name], x), name
        assert loaded.nbytes == sum(x.numel() * x.element_size() for x in state.tensors().values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"layers": "0"}, r"\(list index out of range\)"), ({"layers": "x"}, "invalid literal"),
     ({"version": "2"}, "version .2., expected .1."), ({"format": "linrope.X"}, r"expected .linrope\.States.")],
)  # fmt: skip
def test_another_file_is_refused(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "states"
    save_states(STATES, path)
    tensors, metadata = load_tensors(path, "linrope.States", 1)
    save_tensors(path, tensors, metadata | changed)
    with pytest.raises(ValueError, match=message) as caught:
        load_states(path)
    assert str(path) in str(caught.value)
