"""Builds the parts of a layer from strings, numbers, dicts or objects."""

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from linrope import feature_maps
from linrope.common.argument_checks import check_keys, check_name
from linrope.feature_maps import FeatureMap
from linrope.layer.selective import ForgetGate, SelectiveSteps, WriteGate, spread
from linrope.layer.short_convolution import MOST_TAPS, ShortConvolution, is_number_of_taps
from linrope.ops.norm import OVER
from linrope.rotation.rotary import LAYOUTS, Rotary

DECAYS = ("spread", "learned", "retnet")
WRITE_GATES = ("tied", "independent")
ROTATIONS = (*LAYOUTS, "selective")


def make_map(
    choice: str | Mapping[str, Any] | FeatureMap, head_dim: int, num_heads: int, num_kv_heads: int
) -> FeatureMap:
    if isinstance(choice, FeatureMap):
        return choice
    if not isinstance(choice, str | Mapping):
        raise TypeError(
            f"feature_map: got {type(choice).__name__}, expected a name, a dict with the key 'name', or a FeatureMap"
        )
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ValueError(f"feature_map={options}: expected the key 'name'")
    if {options["name"], options.get("inner")} & feature_maps.PER_HEAD:
        options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads} | options
    return feature_maps.make(options.pop("name"), head_dim, **options)


def make_rotation(
    choice: str | Mapping[str, Any] | Rotary | nn.Module | None,
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
    if choice == "selective":
        choice = {"name": "selective"}
    if not isinstance(choice, Mapping) or "name" not in choice:
        return make_rotary(choice, dim), None
    check_name("rotary", choice["name"], ("selective",))
    step_options = {key: choice[key] for key in ("rank", "bound") if key in choice}
    rotary_options = {key: x for key, x in choice.items() if key not in ("name", "rank", "bound", "per_head")}
    rotary = make_rotary(rotary_options, dim)
    assert rotary is not None
    per_head = choice.get("per_head", True)
    if not isinstance(per_head, bool):
        raise TypeError(f"rotary: got per_head={per_head!r}, expected True or False")
    heads = heads if per_head else 1
    return rotary, SelectiveSteps(embed_dim, rotary, heads, **step_options, **factory)


def make_rotary(choice: str | Mapping[str, Any] | Rotary | None, dim: int) -> Rotary | None:
    """The rotation of dim features."""
    if choice is None or isinstance(choice, Rotary):
        return choice
    if not isinstance(choice, Mapping):
        check_name("rotary", choice, ROTATIONS, also="a dict, a Rotary, a module or None")
        if dim % 2:
            raise ValueError(
                f"rotary={choice!r}: got heads of {dim} features, expected an even number, or None"
            )
        return Rotary(dim, layout=choice)
    if {"rope_theta", "rope_type"} & set(choice):
        keywords = ("layout", "max_position_embeddings", "seq_len")
        options = {key: choice[key] for key in keywords if key in choice}
        config = {key: value for key, value in choice.items() if key not in keywords}
        return Rotary.from_config(config, head_dim=dim, **options)
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
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor={share!r}: expected a number above 0 and at most 1")
    return max(2, int(dim * share) // 2 * 2)


def make_forget_gate(
    choice: bool | Mapping[str, Any], embed_dim: int, heads: int, factory: dict[str, Any]
) -> ForgetGate | None:
    if choice is False:
        return None
    options = {} if choice is True else choice
    if not isinstance(options, Mapping) or set(options) - {"longest"}:
        raise ValueError(f"forget_gate={choice!r}: expected True, False, or a dict with 'longest'")
    return ForgetGate(embed_dim, heads, **options, **factory)


def make_write_gate(
    choice: str | None, forget_gate: ForgetGate | None, embed_dim: int, heads: int, factory: dict[str, Any]
) -> WriteGate | None:
    if choice is None:
        return None
    check_name("write_gate", choice, WRITE_GATES, also="None")
    if forget_gate is None:
        raise ValueError(f"write_gate={choice!r}: expected None without a forget_gate")
    return WriteGate(embed_dim, heads, forget_gate.longest, tied=choice == "tied", **factory)


def make_decay(choice: str | Mapping[str, Any] | Sequence[float] | Tensor, heads: int) -> tuple[Tensor, bool]:
    """Each head's decay at the start, (heads,) float64, and whether it is then learned.

    choice: a name as in LinearRoPEAttention, {"name": "spread" or "learned", "longest": tokens}, or the numbers.
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
    if decay.shape != (heads,) or not bool(((decay > 0) & (decay <= 1)).all()):
        raise ValueError(f"decay: got {decay.tolist()}, expected {heads} numbers in (0, 1]")
    return decay, False


def make_short_convolution(
    choice: int | Mapping[str, Any] | None, channels: int, factory: dict[str, Any]
) -> ShortConvolution | None:
    if choice is None:
        return None
    options = dict(choice) if isinstance(choice, Mapping) else {"taps": choice}
    check_keys("short_conv", options, ("taps", "activation", "bias", "start"))
    if "taps" in options and not is_number_of_taps(taps := options["taps"]):
        raise ValueError(f"short_conv={taps!r}: expected the number of taps, 2 .. {MOST_TAPS}, or None")
    return ShortConvolution(channels, **options, **factory)


def norm_options(choice: bool | str | Mapping[str, Any]) -> tuple[str | None, float]:
    """The span of the output norm, None without one, and its eps."""
    if isinstance(choice, bool):
        return ("head" if choice else None), 1e-6
    options: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else {"over": choice}
    check_keys("out_norm", options, ("over", "eps"))
    over = options.get("over", "head")
    check_name("out_norm", over, OVER, also="a dict, True or False")
    eps = options.get("eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < math.inf:
        raise ValueError(f"out_norm: got eps={eps!r}, expected a positive finite number")
    return over, float(eps)


def _named(
    argument: str, choice: Mapping[str, Any], names: Sequence[str], options: Sequence[str], also: str
) -> tuple[str, dict[str, Any]]:
    """Splits {"name": .., ..} into the name and its options, and checks both against the known ones."""
    if "name" not in choice:
        raise ValueError(f"{argument}: got the keys {sorted(choice)}, expected the key 'name'")
    name, chosen = choice["name"], {key: value for key, value in choice.items() if key != "name"}
    check_name(argument, name, names, also=also)
    if unknown := sorted(set(chosen) - set(options)):
        raise ValueError(
            f"{argument}: got {unknown} with name={name!r}, expected {list(options) or 'nothing'}"
        )
    return str(name), chosen
