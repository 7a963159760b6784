"""The checks of arguments that all modules share: names out of a list, numbers that may be looked at."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope.common.names import check_name, expected_one_of, readable
from linrope.feature_maps import Cosformer
from linrope.position_encodings import LearnedAbsolute

LAYOUTS = ("interleaved", "half")


def test_a_known_name_passes() -> None:
    check_name("layout", "half", LAYOUTS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hlf", "layout='hlf': expected one of interleaved, half; did you mean 'half'?"),
        ("xyz", "layout='xyz': expected one of interleaved, half"),
        (None, "layout=None: expected one of interleaved, half"),
        (["half"], "layout=['half']: expected one of interleaved, half; did you mean 'half'?"),
        ({}, "layout={}: expected one of interleaved, half"),
    ],
)
def test_another_value_raises_and_names_the_nearest(value: object, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is compared
        check_name("layout", value, LAYOUTS)
    assert str(error.value) == message


def test_what_else_is_accepted_stands_after_the_names() -> None:
    assert expected_one_of("x", LAYOUTS, also="a dict or None") == (
        "expected one of interleaved, half, a dict or None"
    )


def test_numbers_on_a_cpu_are_readable() -> None:
    assert readable(torch.ones(2))
    assert readable(torch.device("cpu"))


def test_numbers_elsewhere_are_not_readable() -> None:
    assert not readable(torch.ones(2, device="meta"))
    assert not readable(torch.device("meta"))
    assert not readable(torch.device("cuda"))


def test_a_fake_tensor_is_not_readable_in_its_mode_and_after_it() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
        assert not readable(fake)
        assert not readable(torch.device("cpu"))
    assert not readable(fake)
    assert readable(torch.device("cpu"))


def test_a_vmapped_tensor_is_not_readable() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(readable(x))
        return x

    torch.vmap(look)(torch.ones(3, 2))
    assert seen == [False]


def test_nothing_is_readable_in_a_compiled_graph() -> None:
    def look(x: Tensor) -> Tensor:
        return x + 1 if readable(x) or readable(x.device) else x - 1

    compiled = torch.compile(look, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.zeros(2))


def test_modules_that_check_positions_and_tokens_run_on_fake_tensors() -> None:
    with FakeTensorMode():
        where = torch.arange(5)
        assert LearnedAbsolute(4, 10)(torch.ones(1, 5, 4), where).shape == (1, 5, 4)
        cosformer = Cosformer(2, max_length=10)
        assert cosformer.queries(torch.ones(1, 5, 1, 2), where[None]).shape == (1, 5, 1, 4)
