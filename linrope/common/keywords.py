"""Keywords: those that a call does not have are refused, those of PyTorch's attention with what to write instead.

Nothing here imports PyTorch: the options of the command line use these checks too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_NO_WEIGHTS = "nothing, because attention weights are never formed"
_DROPOUT = "nn.Dropout on what a block adds to x, because attention weights are never formed"
# What to write in place of the arguments of nn.MultiheadAttention and scaled_dot_product_attention, as on the page
# docs/use_it.md.
PYTORCH = {
    "query": "x in a layer, q in linear_rope_attention",
    "key": "a context in a layer, k in linear_rope_attention",
    "value": "layer(x), or layer(x, context); in place of nn.TransformerEncoderLayer use "
    "EncoderBlock in docs/examples/encoder_decoder.py",
    "key_padding_mask": "key_mask=~key_padding_mask",
    "attn_mask": "causal, key_mask, cu_seqlens or a decay, because attention weights are never formed",
    "is_causal": "causal, which is True by default; a layer has it in the constructor",
    "need_weights": _NO_WEIGHTS,
    "average_attn_weights": _NO_WEIGHTS,
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "scale": "another feature_map, or q multiplied by it",
    "enable_gqa": "fewer heads in k and v, without a switch",
    "add_bias_kv": "a learned token in front of x",
    "add_zero_attn": "nothing, because a token that sees no key gets 0",
    "kdim": "context_dim, the size of a context's vectors",
    "vdim": "context_dim, the size of a context's vectors",
    "batch_first": "nothing, because tensors are always (batch, length, ..)",
}


def check_keywords(
    callee: str, keywords: Iterable[str], known: Sequence[str], instead: Mapping[str, str] = PYTORCH
) -> None:
    """Raises TypeError for a keyword that is not among the known ones.

    instead: by keyword, what to write in its place.

    >>> from linrope.common.keywords import check_keywords
    >>> check_keywords("the layer", ["key_padding_mask"], ["key_mask"])
    Traceback (most recent call last):
    TypeError: key_padding_mask: expected key_mask=~key_padding_mask
    """
    for name in keywords:
        if name in known:
            continue
        if name in instead:
            raise TypeError(f"{name}: expected {instead[name]}")
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(known)}"
        raise TypeError(f"got the keyword {name!r}, expected those of {callee}{hint}")


def shows(options: Mapping[str, object], required: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Lists these options, with their defaults, in the signature of a function in place of ``*`` and ``**`` arguments.

    required: parameters that have a default only so that the function can say what is missing.
    """

    def show(function: Function) -> Function:
        signature, kinds = inspect.signature(function), inspect.Parameter
        own = [
            x.replace(default=kinds.empty) if x.name in required else x
            for x in signature.parameters.values()
            if x.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        ]
        listed = [kinds(name, kinds.KEYWORD_ONLY, default=default) for name, default in options.items()]
        function.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined]
        return function

    return show
