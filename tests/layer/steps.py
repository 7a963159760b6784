"""A layer with one more token and the state before it, and whether its call takes the operator of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import LinearRoPEAttention
from linrope.backends import library, native
from linrope.layer.state import LayerState

needs_native = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
Layer = LinearRoPEAttention


def make(b: int = 2, kind: type[Layer] = Layer, **options: Any) -> tuple[Layer, Tensor, LayerState]:
    """A layer whose parameters all matter, one more token and the state before it."""
    torch.manual_seed(0)
    options = {name: x for name, x in options.items() if name != "feed_forward"}
    layer = kind.block(32, 4, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        x = torch.randn(b, 8, 32)
        _, state = layer(x[:, :7], return_state=True)
    return layer, x[:, 7:], state


@contextmanager
def steps() -> Iterator[list[str]]:
    """The operators that the library runs, without those that refuse their arguments."""
    names, run = [], library.run

    def look(name: str, *arguments: Any) -> Any:
        result = run(name, *arguments)
        names.append(name)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run", look)
        yield names


def other_code(layer: Layer, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
    with steps() as names:
        result = layer(x, state=state.clone(), return_state=True, positions=state.position[:, None])
    assert "mixer_step" not in names
    return result


def assert_same(
    actual: tuple[Tensor, LayerState], expected: tuple[Tensor, LayerState], digits: float = 1e-5
) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=digits, atol=digits)
    assert actual[1].identity == expected[1].identity
    assert actual[1].donated is actual[1].sums.donated is False
    torch.testing.assert_close(actual[1].tensors(), expected[1].tensors(), rtol=digits, atol=digits)


def taken(layer: Layer, x: Tensor, state: LayerState, digits: float = 1e-5) -> bool:
    """Whether the call takes the operator. Checks that the result is the other code's."""
    with steps() as names:
        result = layer(x, state=state.clone().donate(), return_state=True)
    assert_same(result, other_code(layer, x, state), digits)
    return "mixer_step" in names
