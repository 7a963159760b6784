"""Builds a layer's map, rotation and decay from the options of its LayerConfig."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from linrope import feature_maps
from linrope.common.argument_checks import check_keys, is_number
from linrope.feature_maps import FeatureMap
from linrope.layer.options import LONGEST, DecayOptions
from linrope.layer.selective import SelectiveSteps, spread
from linrope.rotation.rotary import Rotary


def make_map(
    choice: Mapping[str, Any] | FeatureMap, head_dim: int, num_heads: int, num_kv_heads: int
) -> FeatureMap:
    if isinstance(choice, FeatureMap):
        return choice
    options = dict(choice)
    if {options["name"], options.get("inner")} & feature_maps.PER_HEAD:
        options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads} | options
    return feature_maps.make(options.pop("name"), head_dim, **options)


def make_rotation(
    choice: Mapping[str, Any] | Rotary | nn.Module | None,
    dim: int,
    embed_dim: int,
    heads: int,
    factory: dict[str, Any],
) -> tuple[Rotary | None, nn.Module | None]:
    """The rotation by positions, and the module that computes angle_steps from x. Each may be None.

    factory: the device and dtype of new weights.
    """
    if isinstance(choice, nn.Module):
        return getattr(choice, "rotary", None), choice
    if not isinstance(choice, Mapping) or "name" not in choice:
        return make_rotary(choice, dim), None
    step_options = {key: choice[key] for key in ("rank", "bound") if key in choice}
    rotary_options = {key: x for key, x in choice.items() if key not in ("name", "rank", "bound", "per_head")}
    rotary = make_rotary(rotary_options, dim)
    assert rotary is not None
    heads = heads if choice.get("per_head", True) else 1
    return rotary, SelectiveSteps(embed_dim, rotary, heads, **step_options, **factory)


def make_rotary(choice: Mapping[str, Any] | Rotary | None, dim: int) -> Rotary | None:
    """The rotation of dim features."""
    if choice is None or isinstance(choice, Rotary):
        return choice
    if {"rope_theta", "rope_type"} & set(choice):
        keywords = ("layout", "max_position_embeddings", "seq_len")
        options = {key: choice[key] for key in keywords if key in choice}
        config = {key: value for key, value in choice.items() if key not in keywords}
        return Rotary.from_config(config, head_dim=dim, **options)
    if dim % 2:
        name = repr(choice["layout"]) if choice.keys() == {"layout"} else str(dict(choice))
        raise ValueError(
            f"rotary={name}: got heads of {dim} features, expected an even number, or None; head_dim sets it"
        )
    make = Rotary.axial if "axes" in choice else Rotary
    known = [name for name in signature(make).parameters if name != "dim"]
    check_keys("rotary", choice, [*known, "partial_rotary_factor"])
    options = dict(choice)
    if (share := options.pop("partial_rotary_factor", None)) is not None:
        if "rotary_dim" in options:
            raise ValueError("rotary: got rotary_dim and partial_rotary_factor, expected one of them")
        options["rotary_dim"] = partial_dim(dim, share)
    return make(dim, **options)


def partial_dim(dim: int, share: float) -> int:
    """The number of rotated features: this share of dim, rounded down to an even number, but at least 2."""
    if not (is_number(share) and 0 < share <= 1):
        raise ValueError(f"partial_rotary_factor={share!r}: expected a number above 0 and at most 1")
    return max(2, int(dim * share) // 2 * 2)


def decay_units(features: int, rotary: Rotary | None, angle_steps: nn.Module | None) -> int:
    """The number of decays per head: one for each pair of features that turns, one for each feature that does not."""
    if rotary is None and angle_steps is not None:
        raise ValueError(
            f"rotary: got a {type(angle_steps).__name__} without an attribute rotary, of which the number of pairs is "
            "not known; expected one with it, or a forget_gate per head"
        )
    return features - (0 if rotary is None else rotary.rotary_dim // 2)


def make_decay(choice: DecayOptions | Sequence[float], heads: int) -> tuple[Tensor, bool]:
    """Each head's decay at the start, (heads,) float64, and whether it is then learned."""
    if not isinstance(choice, DecayOptions):
        return torch.tensor(choice, dtype=torch.float64, device="cpu"), False
    if choice.name == "retnet":
        return 1 - 2.0 ** -(5 + torch.arange(heads, dtype=torch.float64, device="cpu")), False
    return spread(heads, choice.longest or LONGEST), choice.name == "learned"
