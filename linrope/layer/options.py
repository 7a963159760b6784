"""The options of LayerConfig that have options of their own, and the short forms in which they may be given.

Like config.py, nothing here imports PyTorch at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from linrope.common.argument_checks import (
    ORDERS,
    SPANS,
    check_bools,
    check_keys,
    check_name,
    is_integer,
    is_number,
    plain,
)

_Kind = TypeVar("_Kind")

DECAYS = ("spread", "learned", "retnet")
ERASE_GATES = ("tied", "independent")
GATES_PER = ("head", "feature")
ROTATIONS = ("interleaved", "half", "selective")
STARTS = ("identity", "uniform")
ACTIVATIONS = ("silu",)
MOST_TAPS = 2**16
MOST_RANK = 2**16  # the largest rank of a gate's projection
LONGEST = 4096.0  # default half-life of the slowest head, in tokens


@dataclass(frozen=True)
class ForgetGateOptions:
    """The options of ``linrope.layer.selective.ForgetGate`` and ``linrope.layer.feature_gate.FeatureForgetGate``.

    Args:
        longest: half-life of the slowest head, or of a head's slowest feature, at the start, in tokens.
        per: "head", or "feature": the features of a head decay at rates of their own.
        rank: with per="feature", the rank of the projection. Default: the size of a key.
        bound: with per="feature", the largest decay: no gate keeps less than e^-bound. Default: no bound.
    """

    longest: float = LONGEST
    per: str = "head"
    rank: int | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        check_longest(self.longest)
        check_name("forget_gate", self.per, GATES_PER)
        for name in ("rank", "bound"):
            if self.per == "head" and getattr(self, name) is not None:
                raise ValueError(f"forget_gate: got {name} with per='head', expected per='feature' with it")
        rank = 1 if self.rank is None else self.rank
        if not (is_integer(rank) and 1 <= rank <= MOST_RANK):
            raise ValueError(
                f"forget_gate: got rank={rank!r}, expected an integer, 1 .. {MOST_RANK}, or None"
            )
        bound = 1 if self.bound is None else self.bound
        if not (is_number(bound) and bound >= 1):
            raise ValueError(
                f"forget_gate: got bound={bound!r}, expected a finite number, at least 1, or None"
            )


@dataclass(frozen=True)
class DecayOptions:
    """A decay by name, fixed or learned.

    Args:
        name: "spread", "learned" or "retnet".
        longest: half-life of the slowest head, in tokens; "retnet" has none. Default: 4096.
    """

    name: str
    longest: float | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        check_name("decay", self.name, DECAYS, also="numbers, or None")
        if self.name == "retnet":
            if self.longest is not None:
                raise ValueError("decay: got ['longest'] with name='retnet', expected nothing")
            return
        if self.longest is None:
            object.__setattr__(self, "longest", LONGEST)
        check_longest(self.longest)


@dataclass(frozen=True)
class EraseGateOptions:
    """The options of ``linrope.layer.selective.EraseGate``, which explains them.

    Args:
        name: "tied" (the gate writes too) or "independent".
        largest: 1 or 2, the upper end of the gate's range.
    """

    name: str
    largest: int = 1

    def __post_init__(self) -> None:
        _make_plain(self)
        check_name("erase_gate", self.name, ERASE_GATES, also="a dict, or None")
        if isinstance(self.largest, bool) or self.largest not in (1, 2):
            raise ValueError(f"erase_gate: got largest={self.largest!r}, expected 1 or 2")


@dataclass(frozen=True)
class ShortConvOptions:
    """The options of ``linrope.layer.short_convolution.ShortConvolution``, which explains them."""

    taps: int = 4
    activation: str | None = None
    bias: bool = False
    start: str = "identity"

    def __post_init__(self) -> None:
        _make_plain(self)
        if not (is_integer(self.taps) and 2 <= self.taps <= MOST_TAPS):
            raise ValueError(
                f"short_conv={self.taps!r}: expected the number of taps, 2 .. {MOST_TAPS}, or None"
            )
        if self.activation is not None:
            check_name("activation", self.activation, ACTIVATIONS, also="None")
        check_name("start", self.start, STARTS)
        check_bools(bias=self.bias)


@dataclass(frozen=True)
class OutNormOptions:
    """The RMS norm of the output.

    Args:
        over: "head" (each head alone) or "all" (all heads together).
        eps: added to the mean square. Default: 1e-6, or 1e-12 where the norm replaces the normalizer.
    """

    over: str = "head"
    eps: float | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        check_name("out_norm", self.over, SPANS, also="a dict, True or False")
        if self.eps is not None and not (is_number(self.eps) and self.eps > 0):
            raise ValueError(f"out_norm: got eps={self.eps!r}, expected a positive finite number")


# For each class: its option in LayerConfig; the field that a value other than a dict sets, if there is one; and whether
# True gives the class with its defaults
_FORMS: dict[type, tuple[str, str | None, bool]] = {
    ForgetGateOptions: ("forget_gate", None, True),
    DecayOptions: ("decay", "name", False),
    EraseGateOptions: ("erase_gate", "name", False),
    ShortConvOptions: ("short_conv", "taps", False),
    OutNormOptions: ("out_norm", "over", True),
}


def _make_plain(options: object) -> None:
    """Puts Python's own numbers in the place of numpy's in a frozen dataclass."""
    for name, value in vars(options).items():
        object.__setattr__(options, name, plain(value))


def options_of(kind: type[_Kind], given: Any) -> _Kind | None:
    """The options of a kind in ``_FORMS`` from themselves, None, a dict, or a short form."""
    if given is None or isinstance(given, kind):
        return given
    option, alone, switch = _FORMS[kind]
    if switch and isinstance(given, bool):
        return kind() if given else None
    known = [*kind.__annotations__]
    if alone is None and not isinstance(given, Mapping):
        raise ValueError(f"{option}={given!r}: expected True, False, or a dict with {', '.join(known)}")
    options: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {alone: given}
    check_keys(option, options, known)
    if alone == "name" and "name" not in options:
        raise ValueError(f"{option}: got the keys {sorted(options)}, expected the key 'name'")
    return kind(**options)


def decay_options(given: Any, heads: int) -> DecayOptions | tuple[float, ...] | None:
    """From a name, a dict, None, or a number for each of the heads, which become a tuple."""
    if given is None or isinstance(given, str | Mapping | DecayOptions):
        return options_of(DecayOptions, given)
    values = given.tolist() if hasattr(given, "tolist") else given
    try:
        factors = tuple(float(x) for x in values)
        fits = len(factors) == heads and all(0 < x <= 1 for x in factors)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"decay: got {values}, expected {heads} numbers in (0, 1]")
    return factors


def gate_order(given: object) -> Any:
    """ "after" or "before" the norm, or None without a gate; True: "after"."""
    if given is None or isinstance(given, bool):
        return "after" if given else None
    check_name("gate", given, ORDERS, also="True or False")
    return given


def map_options(given: object) -> Any:
    """A dict of a map's name and options, or a FeatureMap."""
    if isinstance(given, str):
        return {"name": given}
    if isinstance(given, Mapping):
        if "name" not in given:
            raise ValueError(f"feature_map={dict(given)}: expected the key 'name'")
        return dict(given)
    from linrope.feature_maps import FeatureMap

    if not isinstance(given, FeatureMap):
        raise TypeError(
            f"feature_map: got {type(given).__name__}, expected a name, a dict with the key 'name', or a FeatureMap"
        )
    return given


def map_in_words(options: object) -> str:
    """A feature map in a message: its name, if it has no options."""
    return repr(options["name"]) if isinstance(options, Mapping) and len(options) == 1 else str(options)


def rotary_options(given: object) -> Any:
    """A dict of a rotation's options, a Rotary, a module or None."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        options = dict(given)
        if "name" in options:
            check_name("rotary", options["name"], ("selective",))
            if not isinstance(per_head := options.get("per_head", True), bool):
                raise TypeError(f"rotary: got per_head={per_head!r}, expected True or False")
        return options
    if isinstance(given, str) and given in ROTATIONS:
        return {"name": given} if given == "selective" else {"layout": given}
    from torch import nn

    from linrope.rotation.rotary import Rotary

    if not isinstance(given, Rotary | nn.Module):
        check_name("rotary", given, ROTATIONS, also="a dict, a Rotary, a module or None")
    return given


def check_longest(longest: Any) -> None:
    """Raises ValueError unless longest is a half-life in tokens."""
    if not (is_number(longest) and longest >= 1):
        raise ValueError(f"longest={longest!r}: expected a finite number of tokens, at least 1")


def as_json(name: str, option: Any) -> Any:
    """An option of LayerConfig as JSON types.

    Raises:
        ValueError: it is an object, such as a module.
    """
    if type(option) in _FORMS:
        return {key: value for key, value in vars(option).items() if value is not None}
    if isinstance(option, tuple):
        return list(option)
    if isinstance(option, dict):
        return {key: plain(value) for key, value in option.items()}
    option = plain(option)
    if option is not None and not isinstance(option, bool | int | float | str):
        raise ValueError(
            f"{name}: got a {type(option).__name__}, which JSON cannot hold; expected a name or a dict"
        )
    return option
