"""Placeholder until the native library is merged."""

from linrope.backends.call import Call
from linrope.state import LinearAttentionState


def supports(call: Call, state: LinearAttentionState | None) -> str | None:
    return "not built"
