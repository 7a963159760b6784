"""The options of LayerConfig as keywords of constructors, and what the commands say about them.

Like config.py, nothing here imports PyTorch at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from linrope.layer.config import OPTIONS, LayerConfig

Function = TypeVar("Function", bound=Callable[..., Any])


def layer_config(
    embed_dim: int | LayerConfig, num_heads: int | None, options: Mapping[str, Any]
) -> LayerConfig:
    """The config that a LinearRoPEAttention is given, or that it makes of its other arguments."""
    if isinstance(embed_dim, LayerConfig):
        if num_heads is not None or options:
            raise TypeError(
                "got num_heads or options with a LayerConfig, expected dataclasses.replace to change it"
            )
        return embed_dim
    check_keywords("LinearRoPEAttention", options)
    if num_heads is None:
        raise TypeError("num_heads: got None, expected an integer")
    return LayerConfig(embed_dim, num_heads, **options)


def check_keywords(layer: str, keywords: Mapping[str, object], known: Sequence[str] = tuple(OPTIONS)) -> None:
    """Raises TypeError for a keyword that is no option of the layer."""
    for name in keywords:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"got the keyword {name!r}, expected those of {layer}{hint}")


def shows_options(*names: str) -> Callable[[Function], Function]:
    """Lists these options in the signature of a constructor, in place of its ``**options``."""

    def show(constructor: Function) -> Function:
        signature = inspect.signature(constructor)
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default)
            for name in names
        ]
        own = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
        constructor.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return constructor

    return show


def meaning(name: str) -> str:
    """The first sentence of an option's description above.

    >>> from linrope.layer.keywords import meaning
    >>> meaning("qk_norm")
    "RMS norm of each head's query and key before the map, with learned weights."
    """
    text = inspect.cleandoc(LayerConfig.__doc__ or "")
    entry = re.search(rf"^    {name}: (.*?)(?=^    \w+: |^\S|\Z)", text, re.M | re.S)
    sentence = "" if entry is None else " ".join(entry[1].split())
    return re.split(r"(?<=[^.]\.) ", sentence)[0]
