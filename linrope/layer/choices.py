"""From a layer's arguments to its map, rotation and decay."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linrope import feature_maps
from linrope.common.names import check_name
from linrope.feature_maps import FeatureMap
from linrope.layer.selective import ForgetGate, SelectiveSteps, spread
from linrope.rotation.rotary import LAYOUTS, Rotary

DECAYS = ("spread", "learned", "retnet")
ROTATIONS = (*LAYOUTS, "selective")


def make_map(
    choice: str | Mapping[str, Any] | FeatureMap, head_dim: int, num_heads: int, num_kv_heads: int
) -> FeatureMap:
    if isinstance(choice, FeatureMap):
        return choice
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ValueError(f"feature_map={options}: expected the key 'name'")
    if {options["name"], options.get("inner")} & feature_maps.PER_HEAD:
        options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads} | options
    return feature_maps.make(options.pop("name"), head_dim, **options)


def make_rotation(
    choice: str | Mapping[str, Any] | Rotary | nn.Module | None, dim: int, embed_dim: int, heads: int,
    new: dict[str, Any],
) -> tuple[Rotary | None, nn.Module | None]:  # fmt: skip
    """The rotation by positions, and what gives angle_steps from x."""
    if isinstance(choice, nn.Module):
        return getattr(choice, "rotary", None), choice
    if choice == "selective":
        choice = {"name": "selective"}
    if not isinstance(choice, Mapping) or "name" not in choice:
        return _make_rotary(choice, dim), None
    check_name("rotary", choice["name"], ("selective",))
    own = {key: choice[key] for key in ("rank", "bound") if key in choice}
    rest = {key: x for key, x in choice.items() if key not in ("name", "rank", "bound", "per_head")}
    rotary = _make_rotary(rest, dim)
    assert rotary is not None
    return rotary, SelectiveSteps(
        embed_dim, rotary, heads if choice.get("per_head", True) else 1, **own, **new
    )


def _make_rotary(choice: str | Mapping[str, Any] | Rotary | None, dim: int) -> Rotary | None:
    if choice is None or isinstance(choice, Rotary):
        return choice
    if isinstance(choice, str):
        check_name("rotary", choice, ROTATIONS, also="a dict, a Rotary, a module or None")
        return Rotary(dim, layout=choice)
    if "axes" in choice:
        return Rotary.axial(dim, **choice)
    if {"rope_theta", "rope_type"} & set(choice):
        own = {key: choice[key] for key in ("layout", "max_position_embeddings", "seq_len") if key in choice}
        config = {key: value for key, value in choice.items() if key not in own}
        return Rotary.from_config(config, head_dim=dim, **own)
    return Rotary(dim, **choice)


def make_forget_gate(
    choice: bool | Mapping[str, Any], embed_dim: int, heads: int, new: dict[str, Any]
) -> ForgetGate | None:
    if choice is False or choice is None:
        return None
    options = {} if choice is True else choice
    if not isinstance(options, Mapping) or set(options) - {"longest"}:
        raise ValueError(f"forget_gate={choice!r}: expected True, False, or a dict with 'longest'")
    return ForgetGate(embed_dim, heads, **options, **new)


def make_decay(choice: str | Mapping[str, Any] | Sequence[float] | Tensor, heads: int) -> tuple[Tensor, bool]:
    """(heads,) float64, and whether it only starts there and is learned.

    choice: "spread", "learned" (which starts as the spread), "retnet": 1 - 2^(-5 - i) for head i (arXiv
    2307.08621); {"name": "spread" or "learned", "longest": tokens}; or the numbers.
    """
    also = f"{heads} numbers, or None"
    if isinstance(choice, str):
        choice = {"name": choice}
    if isinstance(choice, Mapping):
        name, options = _named(
            "decay", choice, DECAYS, () if choice.get("name") == "retnet" else ("longest",), also
        )
        if name == "retnet":
            return 1 - 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64, device="cpu")), False
        return spread(heads, **options), name == "learned"
    decay = torch.as_tensor(choice, dtype=torch.float64, device="cpu").detach().clone()
    check_decays("decay", decay, heads)
    return decay, False


def check_decays(name: str, decay: Tensor, heads: int) -> None:
    if decay.shape != (heads,) or not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"{name}: got {decay.tolist()}, expected {heads} numbers in (0, 1]")


def _named(
    argument: str, choice: Mapping[str, Any], names: Sequence[str], options: Sequence[str], also: str
) -> tuple[str, dict[str, Any]]:
    """The name, and the options beside it."""
    name, given = choice.get("name"), {key: value for key, value in choice.items() if key != "name"}
    check_name(argument, name, names, also=also)
    if unknown := sorted(set(given) - set(options)):
        raise ValueError(f"{argument}: got {unknown} beside name={name!r}, expected {list(options)} at most")
    return str(name), given
