"""Linear attention with rotary position embedding on the feature maps (RoFormer eq. 19)."""

from linrope import feature_maps
from linrope.layer.attention import LinearRoPEAttention
from linrope.operation.from_sums import state_from_sums
from linrope.operation.functional import linear_rope_attention, linear_rope_state
from linrope.rotation.rotary import Rotary
from linrope.sequence.state import LinearAttentionState
from linrope.versions import show_versions

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
