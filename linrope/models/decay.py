"""The default decay of all models."""

from typing import Any


def resolve_decay(decay: Any, *, rotated: bool, forget_gate: object, causal: bool = True) -> Any:
    """Replaces "auto": by "spread" in a causal layer with a rotation and no forget gate, else by None.

    >>> from linrope.models.decay import resolve_decay
    >>> resolve_decay("auto", rotated=True, forget_gate=False)
    'spread'
    >>> resolve_decay("retnet", rotated=True, forget_gate=True)
    'retnet'
    """
    if decay != "auto":
        return decay
    return "spread" if causal and rotated and forget_gate is False else None
