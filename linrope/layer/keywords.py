"""The options of LayerConfig as keywords of constructors, and what the commands say about them.

Like config.py, nothing here imports PyTorch at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from linrope.common.keywords import check_keywords
from linrope.layer.config import OPTIONS, LayerConfig


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
    check_keywords("LinearRoPEAttention", options, [*OPTIONS])
    if num_heads is None:
        raise TypeError("num_heads: got None, expected an integer")
    return LayerConfig(embed_dim, num_heads, **options)


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
