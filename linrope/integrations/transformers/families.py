"""``enable`` and ``disable``: linrope's functions in place of transformers', by model family."""

import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from linrope import backends
from linrope.common.argument_checks import expected_one_of
from linrope.common.optional import need
from linrope.common.private_names import forward_behind_hooks
from linrope.decode.with_cache import CACHES
from linrope.integrations.transformers import delta_rule, mamba2, minimax, packing, past, refusals, shared

# Folders of transformers.models
MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
GATED_DELTA_NET = ("lara_mini", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")
KIMI_DELTA_ATTENTION = ("bailing_hybrid", "glm5_next", "kimi_linear")
CONVOLUTION = ("inkling", "lfm2", "lfm2_moe", "lfm3")  # alone
_MAMBA1 = "its recurrent layers are Mamba-1's, with a decay for each channel and feature"
_SOFTMAX = "all its attention is softmax; MiniMax's lightning attention is in the family minimax alone"
# Well-known families, and why
NOT_RUN = dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), _MAMBA1) | {
    "minimax_m2": _SOFTMAX,
    "minimax_m3_vl": _SOFTMAX,
    "recurrent_gemma": "its recurrent layers are RG-LRUs, with a state per channel, without queries and keys",
    "rwkv": "its recurrent layers are RWKV-4's, with a state per channel, without queries",
    "xlstm": "its mLSTM divides by the larger of |q . n| and 1, and its exponential gates require a running maximum",
}

_CALLED = {"ling": "bailing_hybrid", "codestral": "mamba2"}  # by model, where no family begins so

_log = logging.getLogger("linrope.integrations.transformers")
_Function = Callable[..., Any]


class _Target(NamedTuple):
    """A function, method or flag of transformers that enable() replaces."""

    owner: Any  # a module or a class
    name: str
    make: Callable[[Any], Any]  # the replacement, from transformers' own
    like: _Function | None  # has the parameters that transformers' function must have
    computes: str | None = None  # the part of a model, in words for ``replaced``


class _Ours(NamedTuple):
    """linrope's function in place of one of transformers'."""

    function: _Function
    why_not: Callable[..., str | None]  # the reason why it does not compute a call
    computes: str | None


def _gated_norm(of_mamba2: bool) -> dict[str, _Ours]:
    function = partial(shared.norm_forward, of_mamba2=of_mamba2)
    return {"RMSNormGated.forward": _Ours(function, refusals.norm, "gated norm")}


_CONVOLUTION = {
    "causal_conv1d_fn": _Ours(shared.causal_conv1d_fn, refusals.convolution, "convolution"),
    "causal_conv1d_update": _Ours(shared.causal_conv1d_update, refusals.update, "convolution"),
}
_SCAN = {
    "mamba2_chunk_scan": _Ours(mamba2.mamba2_chunk_scan, refusals.scan, "scan"),
    "mamba2_selective_state_update": _Ours(mamba2.mamba2_selective_state_update, refusals.step, "step"),
    "mamba2_split_conv1d_scan_combined": _Ours(mamba2.no_combined_kernel, refusals.combined, None),
}
_LIGHTNING = {
    "MiniMaxLightningAttention.forward": _Ours(minimax.forward, refusals.lightning, "lightning attention")
}
_CHUNK = _Ours(delta_rule.chunk, refusals.delta_rule, "delta rule")
_RECURRENT = _Ours(delta_rule.recurrent, refusals.delta_rule, "step")
_DELTA_RULE = {"torch_chunk_gated_delta_rule": _CHUNK, "torch_recurrent_gated_delta_rule": _RECURRENT}
_KIMI = {"chunk_kimi_delta_attention": _CHUNK, "recurrent_kimi_delta_attention": _RECURRENT}
# By family, the functions of its file, and the methods of its classes whose names end so
FUNCTIONS: dict[str, dict[str, _Ours]] = (
    dict.fromkeys(MAMBA2, _CONVOLUTION | _SCAN | _gated_norm(of_mamba2=True))
    | {"minimax": _LIGHTNING}
    | dict.fromkeys(GATED_DELTA_NET, _CONVOLUTION | _DELTA_RULE | _gated_norm(of_mamba2=False))
    | dict.fromkeys(KIMI_DELTA_ATTENTION, _CONVOLUTION | _KIMI | _gated_norm(of_mamba2=False))
    | dict.fromkeys(CONVOLUTION, _CONVOLUTION)
)
FAMILIES = tuple(FUNCTIONS)


class _Replaced(NamedTuple):
    original: _Function
    users: set[str]  # the enabled families that use it
    computes: str | None


_replaced: dict[tuple[Any, str], _Replaced] = {}  # by owner and name


class Enabled:
    """The families that a call of ``enable`` has enabled. Leaving it as a context manager disables them again."""

    def __init__(self, families: tuple[str, ...], already: tuple[str, ...] = ()) -> None:
        self.families, self.already = families, already

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *_: object) -> None:
        if self.families:
            disable(*self.families)

    def __repr__(self) -> str:
        already = f"enabled before: {', '.join(self.already)}" if self.already else ""
        kernels = [name for name, reason in backends.kernels_here().items() if reason is None]
        backend = f"backend: {', '.join(kernels) or 'none, transformers computes'}"
        return f"Enabled({'; '.join(filter(None, (', '.join(self.families), already, backend)))})"


def enable(*families: str) -> Enabled:
    """Makes transformers' models of these families compute with linrope, both existing models and models made later.

    It replaces what runs between the layers' projections: the scan, the step, the convolution and the gated norm of
    Mamba-2, MiniMax's lightning attention, the delta rule, the step, the convolution and the gated norm of Gated
    DeltaNet and Kimi Delta Attention, and the convolution of LFM2, LFM3 and Inkling. Weights and configurations stay
    the same, and results agree up to rounding. So do caches, except MiniMax's in half precision, whose sums are
    float32. On a CPU the backend "native" computes, on a GPU "triton"; but there scan and step stay mamba_ssm's, the
    convolution causal_conv1d's and the delta rule flash-linear-attention's, if these packages are installed. A call
    that linrope does not support runs as before, and the logger "linrope.integrations.transformers" says why, once. If
    kernels for this machine's devices are missing, a RuntimeWarning says why, once.

    Args:
        families: some of ``FAMILIES``. Default: all that the installed transformers has and linrope can replace. The
            same logger names a family that transformers has and linrope cannot replace.

    Returns:
        A context manager that disables what this call enabled. It need not be used. Gradient checkpointing repeats the
        forward pass in the backward pass, so leave it after the backward pass.

    Raises:
        ImportError: transformers is not installed, or lacks a family asked for by name.
        TypeError: an argument that is no name.
        ValueError: an unknown family.
        RuntimeError: a function of a family asked for by name has other parameters than linrope knows. Nothing is
            replaced then.

    >>> from linrope.integrations import transformers as linrope_transformers
    >>> linrope_transformers.enable("mamba2", "minimax")  # doctest: +ELLIPSIS
    Enabled(mamba2, minimax; backend: ...)
    >>> linrope_transformers.disable()
    """
    _check_families(families)
    enabled = {family for entry in _replaced.values() for family in entry.users}
    wanted = [x for x in dict.fromkeys(families or filter(_in_transformers, FAMILIES)) if x not in enabled]
    targets = {family: _targets(family) for family in wanted} if families else dict(_that_fit(wanted))
    try:
        for family in targets:
            for target in targets[family]:
                _replace(family, target)
    except BaseException:
        disable(*targets)
        raise
    for name, reason in backends.kernels_here().items():
        if reason is not None:
            backends.warn_of_missing(name, reason)
    return Enabled(tuple(targets), tuple(sorted(enabled.intersection(families or FAMILIES))))


def disable(*families: str) -> None:
    """Puts transformers' functions back: those of these families, or all.

    Raises:
        TypeError, ValueError: as ``enable``.
    """
    _check_families(families)
    for (owner, name), entry in list(_replaced.items()):
        entry.users.difference_update(families or FAMILIES)
        if not entry.users:
            setattr(owner, name, entry.original)
            del _replaced[owner, name]


def replaced(model: nn.Module) -> tuple[str, ...]:
    """Names the parts of this model in whose place enable() has put linrope's; none if the C++ kernels are missing.

    It looks at no sizes. A call beyond the kernels' limits, such as Mamba-2 with a state_size of 512, still runs
    transformers' own code, and the logger "linrope.integrations.transformers" says why.

    Raises TypeError if model is not an nn.Module.

    >>> from transformers import Mamba2Config, Mamba2Model
    >>> from linrope.backends import native
    >>> from linrope.integrations import transformers as linrope_transformers
    >>> config = Mamba2Config(hidden_size=16, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=1)
    >>> model = Mamba2Model(config)
    >>> with linrope_transformers.enable("mamba2"):
    ...     computed = linrope_transformers.replaced(model)
    >>> computed == (("convolution", "gated norm", "scan", "step") if native.why_not() is None else ())
    True
    >>> linrope_transformers.replaced(model)
    ()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got a {type(model).__name__}, expected a model, not the name of its family")
    # Offloaded weights are on the meta device
    if backends.native.why_not() is not None and any(
        x.device.type in ("cpu", "meta") for x in model.parameters()
    ):
        return ()
    computed = {
        entry.computes
        for (owner, name), entry in _replaced.items()
        if entry.computes and any(_uses(module, owner, name) for module in model.modules())
    }
    return tuple(sorted(computed))


def families_of(model: nn.Module) -> list[str]:
    """The families of a model's layers, which config.model_type does not always name: Qwen3.5's is qwen3_5_text.

    A part without a config does not count: in transformers 5.17 Nemotron-H has Zamba2's norm.
    """
    folders = {
        type(x).__module__.split(".")[2]
        for x in model.modules()
        if type(x).__module__.startswith("transformers.models.") and hasattr(x, "config")
    }
    return sorted(folders.intersection(FAMILIES))


def _uses(module: nn.Module, owner: Any, name: str) -> bool:
    """True if the module's forward is the replaced function, or a method calls it by its name in the class's file."""
    if not isinstance(owner, ModuleType):
        function = getattr(forward_behind_hooks(module), "__func__", None)
        return isinstance(module, owner) and function is getattr(owner, name)
    return any(past.calls(x, name) for x in type(module).__mro__ if x.__module__ == owner.__name__)


def _check_families(families: tuple[object, ...]) -> None:
    for family in families:
        if isinstance(family, nn.Module):
            names = " and ".join(map(repr, families_of(family)))
            hint = f"expected the name of a family{f', here {names}' if names else ''}"
            raise TypeError(f"families: got a {type(family).__name__}, {hint}")
        if not isinstance(family, str):
            raise TypeError(
                f"families: got a {type(family).__name__}, expected names as separate arguments, such as "
                "'mamba2', 'bamba'"
            )
        if family in FAMILIES:
            continue
        known = family.isidentifier() and _in_transformers(family)
        not_run, why = family in NOT_RUN or known, f" ({NOT_RUN[family]})" if family in NOT_RUN else ""
        got = f"a family of transformers that linrope does not run{why}; " if not_run else ""
        alike = [] if why else _alike(family)
        if alike or not_run:
            hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else ""
            raise ValueError(f"families={family!r}: {got}expected one of {', '.join(FAMILIES)}{hint}")
        raise ValueError(f"families={family!r}: {expected_one_of(family, FAMILIES)}")


def _alike(name: str) -> list[str]:
    """The families whose names begin as this one: granitemoehybrid for "granite" and for "Granite 4.0-H"."""
    wanted = re.sub("[^a-z0-9]", "", name.rpartition("/")[2].lower())
    names = [*((family.replace("_", ""), family) for family in FAMILIES), *_CALLED.items()]
    for start in (wanted, re.split("[0-9]", wanted)[0]):
        found = [family for x, family in names if start and (x.startswith(start) or start.startswith(x))]
        if found:
            return found
    return []


def _in_transformers(family: str) -> bool:
    need("transformers", "linrope[huggingface]")
    return importlib.util.find_spec(f"transformers.models.{family}") is not None


def _that_fit(families: list[str]) -> Iterator[tuple[str, list[_Target]]]:
    """The families whose functions can be replaced, with these. Says once why others cannot."""
    for family in families:
        try:
            yield family, _targets(family)
        except (ImportError, RuntimeError) as error:
            say_once(f"transformers.models.{family}", str(error))


def _targets(family: str) -> list[_Target]:
    """The functions to replace in a family. Raises RuntimeError if they are not as linrope knows them."""
    need("transformers", "linrope[huggingface]")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = {name: x for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__}
    models = [x for name, x in classes.items() if name.endswith("Model") and _reads_tokens(x)]
    targets = [_Target(x, "forward", partial(packing.forward_of_model, family=family), None) for x in models]
    for name, ours in FUNCTIONS[family].items():
        end, _, attribute = name.rpartition(".")
        owners = [x for kind, x in vars(module).items() if kind.endswith(end)] if end else [module]
        found = [_target(owner, attribute, *ours) for owner in owners]
        targets += found or [_target(module, name, *ours)]  # which it lacks
    targets += [_Target(*x, like=None) for x in past.targets(classes.values())]
    if family == "mamba2":
        targets += [_Target(module.Mamba2ForCausalLM, "forward", packing.forward_with_head, None)]
    for target in targets:
        _check_signature(target)
    return targets


def _reads_tokens(model: type) -> bool:
    """True if the class has a ``forward`` that reads tokens, and no images: the model with the layers."""
    forward = vars(model).get("forward")
    names = () if forward is None else inspect.signature(forward).parameters
    return "input_ids" in names and "pixel_values" not in names


def _target(
    owner: Any, name: str, ours: _Function, why_not: Callable[..., str | None], computes: str | None
) -> _Target:
    like = None if ours is mamba2.no_combined_kernel else ours
    return _Target(owner, name, partial(_replacement, ours=ours, why_not=why_not), like, computes)


def _check_signature(target: _Target) -> None:
    """Rejects a version of transformers whose function takes other arguments than ours."""
    owner, name = target.owner, target.name
    version = f"transformers {sys.modules['transformers'].__version__}"
    where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    if not hasattr(owner, name):
        raise RuntimeError(f"{version}: {where} has no {name}")
    if target.like is None:
        return
    got, expected = _named(getattr(owner, name)), _named(target.like)
    if got != expected:
        raise RuntimeError(
            f"{version}: {where}.{name} has the parameters {', '.join(got)}; expected {', '.join(expected)}"
        )


def _named(function: _Function) -> list[str]:
    """The parameters that may be passed by position. transformers has the packing among its **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    return ["cache" if x in CACHES else x for x in names]


def _replace(family: str, target: _Target) -> None:
    key = target.owner, target.name
    if key in _replaced:  # two families may share a class
        _replaced[key].users.add(family)
        return
    original = getattr(target.owner, target.name)
    setattr(target.owner, target.name, target.make(original))
    _replaced[key] = _Replaced(original, {family}, target.computes)


def _replacement(original: _Function, ours: _Function, why_not: Callable[..., str | None]) -> _Function:
    accepted = inspect.signature(ours).parameters.keys()
    full_name = f"{original.__module__}: {original.__qualname__}"

    @wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        known = {name: x for name, x in options.items() if name in accepted}
        reason = why_not(*arguments, **known)
        if reason is None:
            return ours(*arguments, **known)
        packed = options.get("seq_idx") is not None or options.get("cu_seqlens") is not None
        if packed and not isinstance(reason, refusals.OtherKernels):
            # transformers' own function mixes the sequences, or raises an error that knows nothing of linrope.
            raise ValueError(f"packed sequences: {full_name}: {reason}; expected one sequence per row")
        if not torch.compiler.is_compiling():
            say_once(full_name, reason)
        return original(*arguments, **options)

    return call


@cache
def say_once(name: str, reason: str) -> None:
    """Logs that transformers' own code runs, and why."""
    _log.warning("%s runs transformers' own code: %s", name, reason)
