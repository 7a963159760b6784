"""Redrawing projections in training."""

import copy

import pytest
import torch
from torch import nn

from linrope import LinearRoPEAttention
from linrope.feature_maps import Redraw


def model() -> nn.Module:
    random = {"name": "favor+", "seed": 1}
    maps = (random, random, {"name": "paired", "inner": "favor++", "seed": 2}, "t2r")
    return nn.ModuleList([LinearRoPEAttention(8, 2, feature_map=fmap) for fmap in maps])


def identities(model: nn.Module) -> list[str]:
    return [layer.feature_map.identity for layer in model]


def test_random_maps_are_redrawn_every_so_many_steps_and_others_never() -> None:
    layers = model()
    redraw, start = Redraw(layers, every=3), identities(layers)
    assert [redraw.step() for _ in range(2)] == [False, False]
    assert identities(layers) == start
    assert redraw.step()
    now = identities(layers)
    assert [a == b for a, b in zip(start, now)] == [False, False, False, True]
    assert now[0] == now[1]  # equal before, equal after
    assert [redraw.step() for _ in range(3)] == [False, False, True]
    assert identities(layers)[0] not in (start[0], now[0])


def test_every_process_draws_alike_whatever_its_generator_and_a_run_goes_on() -> None:
    first = model()
    second, redraw = copy.deepcopy(first), Redraw(first, every=2)
    for _ in range(5):
        redraw.step()
    torch.manual_seed(99)
    done = 0
    for steps in (3, 2):
        redraw = Redraw(second, every=2, done=done)
        for _ in range(steps):
            redraw.step()
        done = redraw.done
    assert identities(second) == identities(first)


@pytest.mark.parametrize(("every", "done"), [(0, 0), (-1, 0), (1, -1)])
def test_steps_are_counted_in_positive_numbers(every: int, done: int) -> None:
    with pytest.raises(ValueError, match=f"every={every}, done={done}: expected every >= 1 and done >= 0"):
        Redraw(model(), every, done)
