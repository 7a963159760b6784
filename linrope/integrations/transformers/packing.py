"""Packed sequences, several in one row, through a whole model of transformers.

Recurrent layers find the sequences in seq_idx, softmax layers find them in position_ids. A model that gets only one of
the two silently mixes the sequences in its other layers. The functions here therefore replace the models' own
``forward`` and pass both to all layers, whichever argument the caller used.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from linrope.common.private_names import assert_in_graph, softmax_implementation
from linrope.common.tracing import exporting
from linrope.decode.with_cache import CACHES

SAYS_PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_CARRIED = "linrope's packing"  # a key of the attention_mask by which Mamba2ForCausalLM passes the packing on


def forward_of_model(original: Callable[..., Any], family: str) -> Callable[..., Any]:
    """The ``forward`` of a model without its head: tells all layers about packed sequences."""
    names = list(inspect.signature(original).parameters)[1:]

    @wraps(original)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments, strict=False), **options)
        if isinstance(mask := given.get("attention_mask"), dict) and _CARRIED in mask:
            given |= mask[_CARRIED]
            arguments, options = (), given
        starts = _starts(given)
        if starts is None:
            return original(self, *arguments, **options)
        _check_packed(self, family, given)
        numbers = starts.cumsum(1)
        given = {name: x for name, x in given.items() if name != "cu_seqlens"}
        given |= {"seq_idx": numbers.int(), "use_cache": False}
        if "position_ids" in names:
            given["position_ids"] = _positions(given.get("position_ids"), starts)
            # The mask hides nothing, but with a mask softmax layers would ignore the positions.
            if _is_flat(given.get("attention_mask")):
                given["attention_mask"] = None
        return original(self, **given)

    return forward


def forward_with_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """The ``forward`` of Mamba2ForCausalLM. transformers' own passes no packing arguments on to its backbone."""
    names = list(inspect.signature(original).parameters)[1:]

    @wraps(original)
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments, strict=False), **options)
        packing = {x: given[x] for x in (*SAYS_PACKED, "position_ids") if given.get(x) is not None}
        if not packing or exporting():
            return original(self, *arguments, **options)
        carried = packing | {"attention_mask": given.get("attention_mask")}
        return original(self, **given | {"attention_mask": {_CARRIED: carried}})

    return forward


def _starts(given: dict[str, Any]) -> Tensor | None:
    """(b, n), True at the first token of each packed sequence. None: each row is one sequence."""
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    position_ids = given.get("position_ids")
    said = {name: given[name] for name in SAYS_PACKED if given.get(name) is not None}
    if tokens is None or (not said and position_ids is None) or exporting() or tokens.is_meta:
        return None
    b, n = tokens.shape[:2]
    if not said and torch.compiler.is_compiling():
        _assert_one_sequence(position_ids, given)
        return None
    starts = {name: _starts_of(name, x, b, n) for name, x in said.items()}
    text = _of_text(position_ids)
    if text is not None and n > 1:
        restarts = _restarts(text.expand(b, n), given, bool(said))
        starts |= {} if restarts is None else {"position_ids": restarts}
    if not starts:
        return None
    (first, expected), *others = starts.items()
    for name, x in others:
        if not torch.equal(x, expected):
            raise ValueError(f"{name}: got other packed sequences than {first}, expected the same")
    return expected if expected[:, 1:].any() else None


def _starts_of(name: str, x: Tensor, b: int, n: int) -> Tensor:
    """The starts that seq_idx (b, n), or bounds of sequences, say."""
    if name == "seq_idx":
        if x.shape != (b, n):
            raise ValueError(f"seq_idx: got shape {tuple(x.shape)}, expected {(b, n)}")
        return _changes(x[:, 1:] != x[:, :-1])
    bounds = x.ndim == 1 and len(x) > 1 and not x.is_floating_point()
    if b != 1 or not bounds or x[0] != 0 or x[-1] != n or (x.diff() < 0).any():
        raise ValueError(
            f"{name}: got {x.tolist()} with {b} rows of {n} tokens, expected the bounds 0 .. {n} of packed "
            "sequences in one row, integers"
        )
    starts = torch.zeros(1, n, dtype=torch.bool, device=x.device)
    starts[0, x[x < n].long()] = True
    return starts


def _restarts(position_ids: Tensor, given: dict[str, Any], packed: bool) -> Tensor | None:
    """The starts that position_ids (b, n) say, as transformers' softmax layers read them. None: they say nothing."""
    mask: Any = given.get("attention_mask")
    if packed or _hides_nothing(mask):
        steps = position_ids.diff(dim=1)
        continues = not packed and any(given.get(x) is not None for x in CACHES)
        return _changes(steps <= 0 if continues else steps != 1)  # a cache may go on from any position
    if _is_flat(mask):
        # Positions may do anything in padding, and must rise from one real token to the next.
        real = _real(mask, position_ids)
        if (real[:, 1:] & (position_ids[:, 1:] <= _largest_before(position_ids, real))).any():
            raise ValueError(
                "position_ids: got positions that restart in rows with padding, expected packed sequences without "
                "attention_mask, or one sequence per row"
            )
    return None  # the caller made the mask of the softmax layers, or there is padding, which packed rows may not have


def _of_text(position_ids: Tensor | None) -> Tensor | None:
    """The positions (b, n) in which softmax layers look for packed sequences.

    Qwen's models also take (4, b, n), where three rotating axes follow these, and the three axes alone.
    """
    if position_ids is not None and position_ids.ndim == 3:
        return position_ids[0] if len(position_ids) == 4 else None
    return position_ids


def _assert_one_sequence(position_ids: Any, given: dict[str, Any]) -> None:
    """Puts a check into the graph that is being compiled. Code that depends on the values would break the graph."""
    mask: Any = given.get("attention_mask")
    position_ids = _of_text(position_ids)
    if position_ids is None or position_ids.shape[1] < 2 or not (mask is None or _is_flat(mask)):
        return
    real = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else _real(mask, position_ids)
    rises = ~real[:, 1:] | (position_ids[:, 1:] > _largest_before(position_ids, real))
    if mask is None and all(given.get(x) is None for x in CACHES):
        rises = position_ids.diff(dim=1) == 1
    assert_in_graph(
        rises.all(), "position_ids: got packed sequences in a compiled model, expected seq_idx with them"
    )


def _is_flat(mask: Any) -> bool:
    """True for the attention_mask (b, n) that marks padding. Callers may pass masks of whole layers instead."""
    return isinstance(mask, Tensor) and mask.ndim == 2


def _real(mask: Tensor, position_ids: Tensor) -> Tensor:
    return mask[:, -position_ids.shape[1] :].bool()


def _largest_before(position_ids: Tensor, real: Tensor) -> Tensor:
    """(b, n - 1): the largest position of a real token before each token but the first."""
    return torch.where(real, position_ids, -1).cummax(1).values[:, :-1]


def _hides_nothing(mask: Any) -> bool:
    return mask is None or (_is_flat(mask) and bool(mask.all()))


def _changes(differs: Tensor) -> Tensor:
    """(b, n) from (b, n - 1): the first token of a row starts a sequence too."""
    return torch.cat((torch.ones_like(differs[:, :1]).expand(len(differs), 1), differs), 1)


def _positions(position_ids: Tensor | None, starts: Tensor) -> Tensor:
    """position_ids, or positions that count from 0 in each sequence. They precede the three rotating axes of images."""
    if position_ids is not None and _of_text(position_ids) is not None:
        return position_ids
    index = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    text = index - torch.where(starts, index, 0).cummax(1).values
    return text if position_ids is None else torch.cat((text[None], position_ids))


def _check_packed(model: Any, family: str, given: dict[str, Any]) -> None:
    """Raises ValueError if the model cannot keep packed sequences apart."""
    for name in CACHES:
        if given.get(name) is not None:
            raise ValueError(f"{name}: got a cache with packed sequences, expected None: a row has one state")
    if given.get("use_cache"):
        raise ValueError("use_cache=True: expected False or None with packed sequences: a row has one state")
    mask = given.get("attention_mask")
    if _is_flat(mask) and not _hides_nothing(mask):
        raise ValueError(
            "attention_mask: got padding in rows of packed sequences, expected None: the padding may be a sequence of "
            "its own"
        )
    if getattr(model.config, "ple_layer_ids", None):
        raise ValueError(
            "packed sequences: the embeddings per layer (ple_layer_ids) read tokens of the sequence before; expected "
            "one sequence per row"
        )
    if family == "glm5_next" and set(model.config.layer_types) != {"linear_attention"}:
        raise ValueError(
            "packed sequences: GLM's layers of indexed attention mix them; expected one sequence per row"
        )
    if family == "inkling":
        raise ValueError(
            "packed sequences: Inkling does not tell its convolutions about them; expected one sequence per row"
        )
    # Granite's softmax layers read no position_ids.
    layers = set(getattr(model.config, "layers_block_type", ("attention",)))
    if family == "granitemoehybrid" and layers & {"attention", "full_attention"}:
        flash = "flash" in softmax_implementation(model.config)
        if not flash or any(given.get(x) is None for x in _FLASH):
            raise ValueError(
                "packed sequences: GraniteMoeHybrid's softmax layers keep them apart only with flash attention and "
                f"{', '.join(_FLASH)}; expected one sequence per row"
            )
