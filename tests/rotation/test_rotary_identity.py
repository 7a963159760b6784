"""A rotation cannot be changed, and its identity and its copies are of the same theta."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from linrope import Rotary, linear_rope_attention
from linrope.rotation.rotary import grid_positions
from tests.support.scalings import SCALINGS, scaled


def test_later_changes_of_the_given_theta_and_scaling_do_not_reach_in() -> None:
    theta = torch.ones(2, dtype=torch.float64)
    scaling: dict[str, Any] = {"rope_type": "longrope", **copy.deepcopy(SCALINGS["longrope"])}
    by_theta, by_scaling = Rotary(4, theta=theta), Rotary(16, scaling=scaling)
    theta.zero_()
    scaling["long_factor"][0] = 99.0
    assert torch.equal(by_theta.theta, torch.ones(2, dtype=torch.float64))
    assert repr(by_scaling) == scaled("longrope").identity


@pytest.mark.parametrize(
    "rotary",
    [Rotary(8, xpos=9), Rotary(8, theta=torch.ones(2, 4)), Rotary.axial(8)],
    ids=["base", "theta", "axes"],
)
def test_theta_cannot_be_changed_behind_the_identity_of_a_rotation(rotary: Rotary) -> None:
    """A state says by whose rotation its keys are turned."""
    where = torch.arange(3) if rotary.axes is None else grid_positions(3, 1)
    x, identity, cpu = torch.randn(1, 3, 2, 8), rotary.identity, torch.device("cpu")
    turns = rotary.turns_per_position(cpu).clone()
    y, log_decay = rotary(x, where), rotary.xpos_log_decay
    rotary.theta.mul_(2)
    rotary.frequencies.mul_(2)
    if rotary.xpos_log_decay is not None:
        rotary.xpos_log_decay.mul_(2)
        assert torch.equal(rotary.xpos_log_decay, log_decay)
    assert torch.equal(rotary(x, where), y)
    assert torch.equal(rotary.turns_per_position(cpu), turns)
    assert rotary.identity == identity
    for name in ("theta", "frequencies", "xpos_log_decay"):
        with pytest.raises(AttributeError):
            setattr(rotary, name, torch.ones(4))


ROTATIONS = [Rotary(8, base=7.0, layout="half", xpos=512), Rotary.whole_model(2, 4), Rotary.axial(8)]
ROTATIONS += map(scaled, SCALINGS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rotary: pickle.loads(pickle.dumps(rotary))])
@pytest.mark.parametrize("rotary", ROTATIONS, ids=lambda rotary: rotary.identity[:40])
def test_copies_turn_alike_and_have_the_same_identity(rotary: Rotary, copied: Callable[[Any], Any]) -> None:
    rotary.turns_per_position(torch.device("cpu"))
    x, positions, twin = torch.randn(1, 3, 2, rotary.dim), torch.arange(3), copied(rotary)
    positions = positions if rotary.axes is None else positions[:, None].expand(3, rotary.axes)
    assert twin.attention_factor == rotary.attention_factor
    assert torch.equal(twin(x, positions), rotary(x, positions))
    assert twin.identity == rotary.identity


def test_identity_tells_rotations_apart() -> None:
    ones, nearly = torch.ones(4), torch.ones(4).double() + 1e-15
    options = [{}, {"base": 9999.0}, {"layout": "half"}, {"rotary_dim": 4}, {"xpos": 512}, {"theta": ones}]
    options += [{"theta": nearly}, {"theta": ones, "attention_factor": 2}, {"theta": ones[None], "axes": 1}]
    different = [
        *(Rotary(8, **own) for own in options), Rotary(10), Rotary.whole_model(2, 8), *map(scaled, SCALINGS),
        scaled("yarn", factor=3.0), scaled("yarn", attention_factor=1.0),
        scaled("longrope", seq_len=800), scaled("dynamic", seq_len=800),
    ]  # fmt: skip
    assert len({rotary.identity for rotary in different}) == len(different)
    assert Rotary(8).identity == Rotary(8, base=10000).identity == repr(Rotary(8, rotary_dim=8))
    as_default = scaled("yarn", beta_fast=32, beta_slow=1.0, truncate=True, mscale=None, factor=4)
    assert as_default.identity == scaled("yarn").identity
    assert Rotary(8, scaling={"rope_type": "default"}).identity == Rotary(8).identity
    assert Rotary(8, xpos=512).identity == Rotary(8, xpos=512.0).identity
    assert Rotary(8, theta=ones, attention_factor=1.0).identity == Rotary(8, theta=ones).identity


class Times(Rotary):
    """Its angles are a multiple of those of a plain Rotary."""

    def __init__(self, dim: int, factor: int) -> None:
        super().__init__(dim)
        self.factor = factor

    @property
    def identity(self) -> str:
        return f"{super().identity} times {self.factor}"

    def turns_per_position(self, device: torch.device) -> torch.Tensor:
        return super().turns_per_position(device) * self.factor


def test_a_subclass_has_calls_and_states_of_its_own() -> None:
    thrice, twice, plain = Times(8, 3), Times(8, 2), Rotary(8)
    assert thrice.identity != plain.identity
    q = k = v = torch.rand(1, 5, 1, 8)
    outs = [linear_rope_attention(q, k, v, rotary=x) for x in (thrice, twice, plain)]
    for rotary, out in zip((thrice, twice), outs, strict=False):
        expected = linear_rope_attention(q, k, v, rotary=Rotary(8, theta=rotary.factor * plain.theta))
        torch.testing.assert_close(out, expected)
    _, state = linear_rope_attention(q, k, v, rotary=thrice, return_state=True)
    for other in (plain, twice):
        with pytest.raises(ValueError, match=r"Times.* times 3"):
            linear_rope_attention(q, k, v, rotary=other, state=state)


class Halved(Rotary):
    identity = "halved"  # type: ignore[assignment]

    def turns_per_position(self, device: torch.device) -> torch.Tensor:
        return super().turns_per_position(device) // 2


def test_a_call_with_a_subclass_is_one_graph() -> None:
    q, rotary = torch.rand(1, 5, 1, 8), Halved(8)
    compiled = torch.compile(linear_rope_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(q, q, q, rotary=rotary), linear_rope_attention(q, q, q, rotary=rotary)
    )


def test_no_name_of_a_rotation_can_be_set() -> None:
    rotary, other = Rotary(8), Times(8, 3)
    for name in ("angles", "turns_per_position", "layout", "attention_factor"):
        with pytest.raises(AttributeError, match=f"^{name}: a Rotary never changes"):
            setattr(rotary, name, getattr(other, name))
    other.factor = 2
    assert other.identity.endswith("times 2")


@pytest.mark.parametrize("shape", [(32,), (1, 32), (16, 32), (4, 2, 32)])
def test_a_repr_leaves_out_long_lists(shape: tuple[int, ...]) -> None:
    axes = 2 if len(shape) == 3 else None
    rotary = Rotary(64, theta=torch.rand(shape) - 0.5, axes=axes, attention_factor=2)
    end = rotary.identity[rotary.identity.index(", layout") :]
    assert repr(rotary) == f"Rotary(64, theta=[..]{end}"
