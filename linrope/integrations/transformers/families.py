"""``enable`` and ``disable``: linrope's functions in place of transformers', by model family."""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linrope import backends
from linrope.backends.native import MAX_DIM
from linrope.common.names import check_name
from linrope.common.values import exporting
from linrope.integrations.transformers import mamba2, minimax
from linrope.layer.operators.native import MAX_TAPS

MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
FAMILIES = (*MAMBA2, "minimax")  # folders of transformers.models

_log = logging.getLogger("linrope.integrations.transformers")
_Reason = Callable[..., str | None]
# What enable() has replaced. The key is a module or class and the name of its function. The value is transformers'
# function, and the enabled families that use it.
_replaced: dict[tuple[Any, str], tuple[Callable[..., Any], set[str]]] = {}


class Enabled:
    """The families that a call of ``enable`` has enabled. Leaving it as a context manager disables them again."""

    def __init__(self, families: tuple[str, ...]) -> None:
        self.families = families

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *_: object) -> None:
        if self.families:
            disable(*self.families)

    def __repr__(self) -> str:
        return f"Enabled({', '.join(self.families)})"


def enable(*families: str) -> Enabled:
    """Makes transformers' models of these families compute with linrope, both existing models and models made later.

    It replaces what runs between the layers' projections: the scan, the step, the convolution and the gated norm of
    Mamba-2, and MiniMax's lightning attention. Weights and configurations stay the same, and results agree up to
    rounding. So do caches, except MiniMax's in half precision, whose sums are float32. On a CPU the
    backend "native" computes, on a GPU "triton"; but there scan and step stay mamba_ssm's and the convolution
    causal_conv1d's if these packages are installed. A call that linrope does not support runs as before, and the logger
    "linrope.integrations.transformers" says why, once.

    Args:
        families: some of ``FAMILIES``. Default: all that the installed transformers has.

    Returns:
        A context manager that disables what this call enabled. It need not be used.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an unknown family.
        RuntimeError: a function of the installed transformers has other parameters than linrope knows. Nothing is
            replaced then.

    >>> from linrope.integrations import transformers as linrope_transformers
    >>> linrope_transformers.enable("mamba2", "minimax")
    Enabled(mamba2, minimax)
    >>> linrope_transformers.disable()
    """
    for family in families:
        check_name("families", family, FAMILIES)
    enabled = {family for _, users in _replaced.values() for family in users}
    wanted = [family for family in families or _installed() if family not in enabled]
    targets = [(family, *target) for family in wanted for target in _targets(family)]
    for _, owner, name, ours, _ in targets:
        _check_signature(owner, name, ours)
    for family, owner, name, ours, why_not in targets:
        if (owner, name) in _replaced:  # two families may share a class
            _replaced[owner, name][1].add(family)
            continue
        original = getattr(owner, name)
        _replaced[owner, name] = original, {family}
        setattr(owner, name, _replacement(original, ours, why_not))
    return Enabled(tuple(wanted))


def disable(*families: str) -> None:
    """Puts transformers' functions back: those of these families, or all.

    Raises:
        ValueError: an unknown family.
    """
    for family in families:
        check_name("families", family, FAMILIES)
    for (owner, name), (original, users) in list(_replaced.items()):
        users.difference_update(families or FAMILIES)
        if not users:
            setattr(owner, name, original)
            del _replaced[owner, name]


def _installed() -> list[str]:
    import transformers

    assert transformers.__file__ is not None
    return [x for x in FAMILIES if importlib.util.find_spec(f"transformers.models.{x}") is not None]


def _targets(family: str) -> list[tuple[Any, str, Callable[..., Any], _Reason]]:
    """The functions to replace in a family: the owner, the name, linrope's function, and when it cannot take over."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "minimax":
        return [(module.MiniMaxLightningAttention, "forward", minimax.forward, _refuses_lightning)]
    norms = [x for name, x in vars(module).items() if name.endswith("RMSNormGated")]
    return [
        (module, "mamba2_chunk_scan", mamba2.mamba2_chunk_scan, _refuses_scan),
        (module, "mamba2_selective_state_update", mamba2.mamba2_selective_state_update, _refuses_step),
        (module, "causal_conv1d_fn", mamba2.causal_conv1d_fn, _refuses_convolution),
        (module, "causal_conv1d_update", mamba2.causal_conv1d_update, _refuses_update),
        (module, "mamba2_split_conv1d_scan_combined", _no_combined_kernel, _refuses_combined),
        *[(norm, "forward", _norm_forward, _refuses_norm) for norm in norms],
    ]


def _check_signature(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Rejects a version of transformers whose function takes other arguments than ours."""
    import transformers

    where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    if not callable(original := getattr(owner, name, None)):
        raise RuntimeError(f"transformers {transformers.__version__}: {where} has no {name}")
    got, expected = _named(original), _named(ours)
    if ours is not _no_combined_kernel and got != expected:
        raise RuntimeError(
            f"transformers {transformers.__version__}: {where}.{name} has the parameters {', '.join(got)}; "
            f"expected {', '.join(expected)}"
        )


def _named(function: Callable[..., Any]) -> list[str]:
    """The parameters that may be passed by position. transformers has the packing among its **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    return [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]


def _replacement(
    original: Callable[..., Any], ours: Callable[..., Any], why_not: _Reason
) -> Callable[..., Any]:
    accepted = set(inspect.signature(ours).parameters)

    @wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        known = {name: x for name, x in options.items() if name in accepted}
        reason = why_not(*arguments, **known)
        if reason is None:
            return ours(*arguments, **known)
        if not torch.compiler.is_compiling():
            _say_once(f"{original.__module__}: {original.__qualname__}", reason)
        return original(*arguments, **options)

    return call


@cache
def _say_once(name: str, reason: str) -> None:
    _log.warning("%s runs transformers' own code: %s", name, reason)


def _refuses(x: Tensor, package: str = "") -> str | None:
    """The reason why linrope does not compute with tensors like x."""
    if exporting():
        return "a graph for other runtimes is being recorded"
    if x.device.type == "cpu":
        return backends.native.why_not()
    if x.device.type != "cuda":
        return f"tensors on {x.device}"
    if package and _is_installed(package):
        return f"{package} is installed"
    triton = backends.load("triton")
    return triton if isinstance(triton, str) else triton.why_not()


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _too_wide(*sizes: int) -> str | None:
    return f"heads of {max(sizes)}, more than {MAX_DIM}" if max(sizes) > MAX_DIM else None


def _refuses_scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any, **__: Any) -> str | None:
    return _refuses(hidden_states, "mamba_ssm") or _too_wide(hidden_states.shape[-1], B.shape[-1])


def _refuses_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **_: Any,
) -> str | None:
    repeated = [dt.stride(-1), A.stride(-1), A.stride(-2), 0 if dt_bias is None else dt_bias.stride(-1)]
    if any(repeated) and hidden_states.shape[-1] > 1:
        return "step sizes or decays that differ between the channels of a head"
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (state, hidden_states, dt, A, B, C, dt_bias)
    ):
        return "gradients through a step that overwrites its state"
    if state.dtype not in (torch.float32, torch.float64):
        return f"a state of {state.dtype}"
    return _refuses(hidden_states, "mamba_ssm") or _too_wide(hidden_states.shape[-1], B.shape[-1])


def _refuses_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> str | None:
    if activation not in (None, *mamba2.SILU):
        return f"activation {activation!r}"
    if weight.shape[-1] > MAX_TAPS:
        return f"{weight.shape[-1]} taps"
    return _refuses(hidden_states, "causal_conv1d")


def _refuses_update(hidden_states: Tensor, conv_state: Tensor, *arguments: Any, **options: Any) -> str | None:
    return _refuses_convolution(hidden_states, *arguments, **options)


def _refuses_combined(zxbcdt: Tensor, *_: Any, **__: Any) -> str | None:
    return _refuses(zxbcdt, "mamba_ssm")


def _no_combined_kernel(*_: Any, **__: Any) -> None:
    """Stands in for the kernel that computes a whole layer. None makes the layer call the other functions."""


def _refuses_lightning(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> str | None:
    return _refuses(hidden_states) or _too_wide(self.head_dim)


def _refuses_norm(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> str | None:
    return _refuses(hidden_states)


def _norm_forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """``forward`` of the classes of gated norms."""
    size = hidden_states.shape[-1]
    return mamba2.norm_of_groups(
        hidden_states,
        self.weight,
        gate,
        groups=size // self.group_size if hasattr(self, "group_size") else getattr(self, "n_groups", 1),
        eps=self.variance_epsilon,
        gate_first=not getattr(self, "norm_before_gate", False),
    )
