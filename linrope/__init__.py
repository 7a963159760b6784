"""Linear attention with rotary position embedding on the feature maps (RoFormer eq. 19)."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = [
    "LinearAttentionState",
    "LinearRoPEAttention",
    "Rotary",
    "feature_maps",
    "linear_rope_attention",
    "linear_rope_state",
    "show_versions",
    "state_from_sums",
]
__version__ = "0.2.0"


def _starts_the_command() -> bool:
    """True if this process is the command ``linrope``, whose --help need not wait until PyTorch is imported.

    Every other import of linrope is complete, because it registers operators and classes that torch.export.load and
    torch.load look for.
    """
    program, started = "".join(sys.argv[:1]), sys.orig_argv
    module = started[started.index("-m") + 1] if program == "-m" and "-m" in started[:-1] else ""
    return module in ("linrope", "linrope.cli") or Path(program).stem == "linrope"


if TYPE_CHECKING or not _starts_the_command():
    from linrope import feature_maps
    from linrope.layer.attention import LinearRoPEAttention
    from linrope.operation.from_sums import state_from_sums
    from linrope.operation.functional import linear_rope_attention, linear_rope_state
    from linrope.recurrence.state import LinearAttentionState
    from linrope.rotation.rotary import Rotary
    from linrope.versions import show_versions
else:
    _HOMES = {
        "LinearAttentionState": "recurrence.state",
        "LinearRoPEAttention": "layer.attention",
        "Rotary": "rotation.rotary",
        "linear_rope_attention": "operation.functional",
        "linear_rope_state": "operation.functional",
        "show_versions": "versions",
        "state_from_sums": "operation.from_sums",
    }

    def __getattr__(name: str) -> Any:
        """Imports a public name when a command uses it first."""
        if name == "feature_maps":
            return import_module("linrope.feature_maps")
        if name not in _HOMES:
            raise AttributeError(f"module 'linrope' has no attribute {name!r}")
        return getattr(import_module(f"linrope.{_HOMES[name]}"), name)
