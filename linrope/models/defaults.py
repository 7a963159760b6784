"""The block of this library's models: the options that "auto" stands for, and the initial weights.

docs/evidence.md says what each part of the block is worth.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

SHORT_CONV = {"taps": 4, "activation": "silu", "bias": True, "start": "uniform"}
ROTARY = {"partial_rotary_factor": 1 / 4}  # the first quarter of the features is rotated, the others are not
VALUE_FACTOR = 2  # values are this many times as wide as keys
HIDDEN_FACTOR = 7 / 4  # the feed-forward network's hidden size, relative to embed_dim
INITIALIZATIONS = ("fan-in", "gpt-2")


def resolve_block(
    *,
    decay: Any = "auto",
    forget_gate: Any = "auto",
    write_gate: Any = "auto",
    short_conv: Any = "auto",
    rotated: bool,
    causal: bool = True,
) -> dict[str, Any]:
    """Gives "auto" among the options of a linear attention layer its meaning.

        forget_gate: True in a causal layer whose decay is "auto" too, else False
        write_gate:  "tied" with a forget gate, else None
        decay:       "spread" in a causal layer with a rotation and without a forget gate, else None
        short_conv:  SHORT_CONV in a causal layer, else None

    >>> from linrope.models.defaults import resolve_block
    >>> resolve_block(rotated=True, short_conv=None)
    {'decay': None, 'forget_gate': True, 'write_gate': 'tied', 'short_conv': None}
    >>> resolve_block(rotated=True, forget_gate=False, short_conv=None)
    {'decay': 'spread', 'forget_gate': False, 'write_gate': None, 'short_conv': None}
    """
    if forget_gate == "auto":
        forget_gate = causal and decay == "auto"
    if decay == "auto":
        decay = "spread" if causal and rotated and forget_gate is False else None
    if write_gate == "auto":
        write_gate = None if forget_gate is False else "tied"
    return {
        "decay": decay,
        "forget_gate": forget_gate,
        "write_gate": write_gate,
        "short_conv": resolve_short_conv(short_conv, causal),
    }


def resolve_rotary(choice: Any, attention: str = "linear") -> Any:
    """Replaces "auto": with ROTARY in linear attention, with "interleaved", of all features, in softmax attention."""
    if choice != "auto":
        return choice
    return ROTARY if attention == "linear" else "interleaved"


def resolve_short_conv(choice: Any, causal: bool) -> Any:
    """Replaces "auto" with SHORT_CONV in a causal layer, else with None."""
    if not isinstance(choice, str):
        return choice
    if choice != "auto":
        raise ValueError(
            f"short_conv={choice!r}: expected 'auto', a number of taps, a dict of options, or None"
        )
    return SHORT_CONV if causal else None


def hidden_size(embed_dim: int) -> int:
    """The default size of the feed-forward network: 7/4 embed_dim, rounded up to a multiple of 32."""
    return 32 * math.ceil(HIDDEN_FACTOR * embed_dim / 32)


@torch.no_grad()
def initialize(parameters: Iterable[tuple[str, nn.Parameter]], scheme: str, branches: int) -> None:
    """Draws the initial values of the matrices: embeddings, projections and gates.

    It leaves the weights of feature maps and of angle steps, q_bias and k_bias as they are.

        "fan-in": normal with standard deviation 1/sqrt(columns); in a matrix that ends a residual branch, uniform in
                  -1/sqrt(columns) .. 1/sqrt(columns)
        "gpt-2":  normal with standard deviation 0.02; in a matrix that ends a branch, 0.02/sqrt(branches)

    branches: the number of residual branches, whose sum is the model's last vector.
    """
    for name, weight in parameters:
        kept = ".angle_steps." in name or ".feature_map." in name or name.endswith(("q_bias", "k_bias"))
        if weight.ndim != 2 or kept:
            continue
        ends_branch = name.endswith(("o_proj.weight", "w2.weight"))
        bound = weight.shape[1] ** -0.5
        if scheme == "gpt-2":
            nn.init.normal_(weight, std=0.02 / branches**0.5 if ends_branch else 0.02)
        elif ends_branch:
            nn.init.uniform_(weight, -bound, bound)
        else:
            nn.init.normal_(weight, std=bound)
