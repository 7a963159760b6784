"""Rotations by every scaling rule, for the tests of Rotary."""

from typing import Any

from linrope import Rotary

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "dynamic": {"factor": 4.0, "max_position_embeddings": 100, "seq_len": 900},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 100},
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 100, "seq_len": 900,
        "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 4.0],
    },
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": 100,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def scaled(rope_type: str, **keys: Any) -> Rotary:
    return Rotary(16, scaling={"rope_type": rope_type, **SCALINGS[rope_type], **keys})
