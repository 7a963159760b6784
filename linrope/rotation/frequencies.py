"""Frequencies of RoPE and of its extensions, under the names and parameters of Hugging Face's configs.

Each method returns theta (dim/2,), float64, in radians per position, and the attention factor by which q and k
are multiplied.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linrope.common.argument_checks import check_name, expected_one_of, is_number


def default(dim: int, base: float) -> tuple[Tensor, float]:
    """theta_l = base^(-2l/dim): the frequencies of RoFormer (arXiv 2104.09864, eq. 15)."""
    pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    return base ** -(2 * pairs / dim), 1.0


def linear(dim: int, base: float, *, factor: float) -> tuple[Tensor, float]:
    """theta / factor: position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return default(dim, base)[0] / factor, 1.0


def ntk(dim: int, base: float, *, factor: float) -> tuple[Tensor, float]:
    """base' = base factor^(dim/(dim-2)), which keeps the first theta and divides the last one by factor.

    NTK-aware scaling (bloc97 2023; arXiv 2309.00071). Hugging Face has no name for this method.
    """
    if dim == 2:
        raise ValueError(f"rotary_dim={dim}: expected at least 4: the NTK-aware base requires two pairs")
    return default(dim, base * factor ** (dim / (dim - 2)))


def dynamic(
    dim: int, base: float, *, factor: float, max_position_embeddings: float, seq_len: float | None = None
) -> tuple[Tensor, float]:
    """NTK-aware scaling by the length N of the stream if N exceeds the trained length L.

        factor' = factor N / L - (factor - 1),   N = max(seq_len, L)

    Dynamic NTK (emozilla 2023; Hugging Face). Here N is fixed for the whole stream.
    """
    length = max(seq_len or 0, max_position_embeddings)
    return ntk(dim, base, factor=factor * length / max_position_embeddings - (factor - 1))


def yarn(
    dim: int,
    base: float,
    *,
    factor: float,
    original_max_position_embeddings: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> tuple[Tensor, float]:
    """Pairs that turn often within the trained length L keep theta. Pairs that hardly turn are interpolated.

        l(r) = dim ln(L / (2 pi r)) / (2 ln base)         the pair that turns r times in L positions
        ramp_l = clamp((l - low) / (high - low), 0, 1),   low = floor l(beta_fast), high = ceil l(beta_slow)
        theta'_l = (1 - ramp_l) theta_l + ramp_l theta_l / factor
        attention factor = m(1), or m(mscale) / m(mscale_all_dim),   m(c) = 0.1 c ln(factor) + 1

    YaRN (Peng et al. 2023, arXiv 2309.00071); the attention factor with mscale is DeepSeek's.
    """
    if not base > 1:
        raise ValueError(f"base={base}: expected more than 1: YaRN divides by its logarithm")
    if beta_fast < beta_slow:
        raise ValueError(f"beta_fast={beta_fast}: expected at least beta_slow={beta_slow}")
    length = original_max_position_embeddings
    low, high = (
        dim * math.log(length / (2 * math.pi * r)) / (2 * math.log(base)) for r in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)  # dim - 1, not dim/2 - 1, as in the authors' code
    if low > high:
        raise ValueError(
            f"original_max_position_embeddings={length}: expected a length within which some pair "
            f"turns {beta_slow} to {beta_fast} times"
        )
    ramp = torch.arange(dim // 2, dtype=torch.float64, device="cpu").sub(low)
    ramp = (ramp / (high - low or 0.001)).clamp(0, 1)  # low = high makes the ramp a step
    theta, _ = default(dim, base)

    def m(c: float) -> float:
        return 0.1 * c * math.log(factor) + 1

    if attention_factor is None:
        attention_factor = m(mscale) / m(mscale_all_dim) if mscale and mscale_all_dim else m(1)
    return (1 - ramp) * theta + ramp * theta / factor, attention_factor


def longrope(
    dim: int,
    base: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: float,
    factor: float | None = None,
    attention_factor: float | None = None,
    seq_len: float | None = None,
) -> tuple[Tensor, float]:
    """theta_l / lambda_l: lambda is long_factor if seq_len exceeds the trained length L, else short_factor.

        attention factor = sqrt(1 + ln(factor) / ln(L))

    LongRoPE (Ding et al. 2024, arXiv 2402.13753).
    """
    for key, value in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(value) != dim // 2:
            raise ValueError(f"{key}={value}: got {len(value)} numbers, expected one per pair, {dim // 2}")
    if attention_factor is None:
        if factor is None:
            raise ValueError(
                "factor: missing key of rope_type='longrope', expected factor or attention_factor"
            )
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))
    divisors = long_factor if (seq_len or 0) > original_max_position_embeddings else short_factor
    return default(dim, base)[0] / torch.tensor(divisors, dtype=torch.float64, device="cpu"), attention_factor


def llama3(
    dim: int,
    base: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> tuple[Tensor, float]:
    """Fast pairs keep theta and slow pairs get theta / factor, by their turns within the trained length L.

        t = clamp((L theta / 2 pi - low) / (high - low), 0, 1)
        theta' = t theta + (1 - t) theta / factor

    Source: the code of Llama 3.1 and Hugging Face. The report, arXiv 2407.21783, does not give the formula.
    """
    if low_freq_factor >= high_freq_factor:
        raise ValueError(f"low_freq_factor={low_freq_factor}: expected less than {high_freq_factor=}")
    theta, _ = default(dim, base)
    turns = original_max_position_embeddings * theta / (2 * math.pi)
    t = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return t * theta + (1 - t) * theta / factor, 1.0


def proportional(
    dim: int, base: float, *, partial_rotary_factor: float = 1.0, factor: float = 1.0
) -> tuple[Tensor, float]:
    """theta_l / factor for the first partial_rotary_factor of the pairs, and 0 for the slower rest.

    The exponents still run over all of dim, unlike those of a smaller rotary_dim. p-RoPE (Barbero et al. 2024,
    arXiv 2410.06205); factor is Hugging Face's addition.
    """
    theta = default(dim, base)[0] / factor
    theta[int(partial_rotary_factor * dim // 2) :] = 0
    return theta, 1.0


MROPE_AXES = 3  # a position is (time, row, column)


FrequencyMethod = Callable[..., tuple[Tensor, float]]
METHODS: dict[str, FrequencyMethod] = {
    method.__name__: method
    for method in (default, linear, ntk, dynamic, yarn, longrope, llama3, proportional)
}


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


_POSITIVE = (_is_positive, "a positive finite number")
_NOT_NEGATIVE = (lambda x: is_number(x) and x >= 0, "a finite number of at least 0")
_AT_LEAST_1 = (lambda x: is_number(x) and x >= 1, "a finite number of at least 1")
_LENGTH = (lambda x: is_number(x) and x > 1, "a length of more than 1")
_SHARE = (lambda x: is_number(x) and 0 <= x <= 1, "a number from 0 to 1")
_LIST = (lambda x: isinstance(x, (list, tuple)) and all(map(_is_positive, x)), "a list of positive numbers")
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("rope_theta", "beta_fast", "beta_slow", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NOT_NEGATIVE),
    **dict.fromkeys(("factor", "seq_len"), _AT_LEAST_1),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _LENGTH),
    **dict.fromkeys(("short_factor", "long_factor"), _LIST),
    "partial_rotary_factor": _SHARE,
    "truncate": (lambda x: isinstance(x, bool), "True or False"),
}


def _check(key: str, value: Any) -> Any:
    """Raises ValueError if the key cannot have this value. Returns the value, with its numbers as floats."""
    accepts, expected = _EXPECTED[key]
    if not accepts(value):
        raise ValueError(f"{key}={value!r}: expected {expected}")
    if isinstance(value, bool):
        return value
    return [float(x) for x in value] if isinstance(value, (list, tuple)) else float(value)


def _method(name: Any) -> tuple[FrequencyMethod, dict[str, Any]]:
    """The method called ``name``, and its keys with their defaults. A required key has inspect.Parameter.empty."""
    check_name("rope_type", name, list(METHODS))
    parameters = list(inspect.signature(METHODS[name]).parameters.values())[2:]  # all but dim and base
    return METHODS[name], {parameter.name: parameter.default for parameter in parameters}


def resolve(scaling: Mapping[str, Any]) -> tuple[FrequencyMethod, dict[str, Any]]:
    """The method that a dict {"rope_type": .., ..} names, and all of its parameters, checked.

    Raises:
        ValueError: scaling is not a dict, its rope_type is unknown, a key is missing or unknown, or a value is
            impossible.

    >>> method, parameters = resolve({"rope_type": "linear", "factor": 2})
    >>> method(4, 10000.0, **parameters)
    (tensor([0.5000, 0.0050], dtype=torch.float64), 1.0)
    """
    if not isinstance(scaling, Mapping) or "rope_type" not in scaling:
        raise ValueError(f"scaling={scaling!r}: expected None or a dict with the key 'rope_type'")
    name = scaling["rope_type"]
    method, parameters = _method(name)
    for key, value in scaling.items():
        if key == "rope_type" or value is None:
            continue
        if key not in parameters:
            known = expected_one_of(key, list(parameters)) if parameters else "expected none"
            raise ValueError(f"{key}={value!r}: unknown key of rope_type={name!r}, {known}")
        parameters[key] = _check(key, value)
    missing = [key for key, value in parameters.items() if value is inspect.Parameter.empty]
    if missing:
        raise ValueError(f"{missing[0]}: missing key of rope_type={name!r}, got {', '.join(scaling)}")
    return method, parameters


def read_config(
    rope_parameters: Mapping[str, Any], head_dim: int, trained: int | None, seq_len: int | None
) -> tuple[float, int, dict[str, Any], list[int] | None]:
    """Reads base, rotary_dim, scaling and each pair's axis from a Hugging Face config. See Rotary.from_config."""
    if not isinstance(rope_parameters, Mapping):
        raise ValueError(f"rope_parameters={rope_parameters!r}: expected a dict")
    nested = [str(key) for key, value in rope_parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            "rope_parameters: got one dict per layer type, expected the dict of one layer type, such as "
            f"rope_parameters[{nested[0]!r}]"
        )
    scaling = {key: value for key, value in rope_parameters.items() if value is not None}
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    scaling.pop("type", None)  # the older spelling
    sections, interleaved = scaling.pop("mrope_section", None), scaling.pop("mrope_interleaved", None)
    if sections is None and (interleaved is not None or scaling["rope_type"] == "mrope"):
        raise ValueError(f"mrope_section: missing key, got {', '.join(rope_parameters)}")
    if scaling["rope_type"] == "mrope":  # older configs of Qwen2-VL: the default theta on three axes
        scaling["rope_type"] = "default"
    base, rotary_dim = _check("rope_theta", scaling.pop("rope_theta", 10000.0)), head_dim
    _, keys = _method(scaling["rope_type"])
    if "partial_rotary_factor" not in keys:
        share = _check("partial_rotary_factor", scaling.pop("partial_rotary_factor", 1.0))
        rotary_dim = int(head_dim * share)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor={share}: got {rotary_dim} of head_dim={head_dim} features, "
                "expected a positive even number"
            )
    original = "original_max_position_embeddings"
    for key, length in (("max_position_embeddings", trained), (original, trained), ("seq_len", seq_len)):
        if key in keys and length is not None:
            scaling.setdefault(key, length)
    if scaling["rope_type"] in ("yarn", "longrope") and trained is not None:
        scaling.setdefault("factor", trained / _check(original, scaling[original]))
    axes = None if sections is None else _mrope_axes(sections, interleaved, rotary_dim // 2)
    return base, rotary_dim, scaling, axes


def _mrope_axes(sections: Any, interleaved: Any, pairs: int) -> list[int]:
    """The axis of each pair: 0 0 .. 1 1 .. 2 2 .. (Qwen2-VL, arXiv 2409.12191), or interleaved 0 1 2 0 1 2 .. 0 0.

    In the interleaved order (Qwen3-VL), axes 1 and 2 take every third pair until their sections are full. Axis 0 has
    all other pairs.
    """
    if interleaved is not None and not isinstance(interleaved, bool):
        raise ValueError(f"mrope_interleaved={interleaved!r}: expected True or False")
    positive = isinstance(sections, (list, tuple)) and all(type(n) is int and n > 0 for n in sections)
    if not positive or len(sections) != MROPE_AXES or sum(sections) != pairs:
        raise ValueError(f"mrope_section={sections!r}: expected three positive integers, {pairs} in all")
    if not interleaved:
        return [axis for axis, section in enumerate(sections) for _ in range(section)]
    axes = [0] * pairs
    for axis in (1, 2):
        most = (pairs - axis + 2) // 3
        if sections[axis] > most:
            raise ValueError(
                f"mrope_section={sections!r}: got {sections[axis]} pairs in section {axis}, expected at most {most}, "
                f"since it takes every third of {pairs} pairs"
            )
        axes[axis : axis + 3 * sections[axis] : 3] = [axis] * sections[axis]
    return axes


def critical_dimension(dim: int, base: float, length: float) -> int:
    """The number of features, out of dim, that make at least one whole turn within a training length.

        d_c = min(dim, 2 ceil((dim/2) log_base(length / 2 pi)))

    Beyond that length, the other features meet angles that they were never trained on.

    Raises:
        ValueError: base <= 1, or length <= 2 pi.

    Source: Liu et al. 2023, arXiv 2310.05209.

    >>> critical_dimension(128, 10000.0, 4096)
    92
    """
    _check_lengths(base, length)
    return min(dim, 2 * math.ceil(dim / 2 * math.log(length / (2 * math.pi), base)))


def base_for_length(length: float, base: float = 10000.0, trained: float = 4096) -> float:
    """The base that has the same critical dimension at a new length as the old base has at the trained length.

        base' = base^(log_(trained / 2 pi)(length / 2 pi))

    Raises:
        ValueError: base <= 1, or a length <= 2 pi.

    Source: Liu et al. 2023, arXiv 2310.05209.

    >>> round(base_for_length(16384))
    71738
    """
    _check_lengths(base, length, trained)
    return float(base ** math.log(length / (2 * math.pi), trained / (2 * math.pi)))


def _check_lengths(base: float, *lengths: float) -> None:
    if not (base > 1 and all(length > 2 * math.pi for length in lengths)):
        raise ValueError(f"base={base}, lengths {lengths}: expected base > 1, lengths > 2 pi")


def checked_copy(theta: Tensor, pairs: int, axes: int | None) -> Tensor:
    """Checks theta's shape and values, and returns a float64 copy on the CPU."""
    expected = (pairs,) if axes is None else (axes, pairs)
    if not isinstance(theta, Tensor):
        raise TypeError(
            f"theta: got {type(theta).__name__}, expected a tensor of frequencies; for another base pass base=1e6"
        )
    if theta.shape[-len(expected) :] != expected or theta.ndim - len(expected) not in (0, 1):
        shape = ", ".join(map(str, expected))
        raise ValueError(
            f"theta: got shape {tuple(theta.shape)}, expected ({shape}) or (num_kv_heads, {shape})"
        )
    theta = theta.detach().to("cpu", torch.float64, copy=True)
    if not bool(theta.isfinite().all()):
        raise ValueError(f"theta: got {theta.tolist()}, expected finite numbers")
    return theta
