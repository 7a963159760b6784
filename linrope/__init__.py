"""Linear attention with rotary position embedding on the feature maps (RoFormer eq. 19)."""

from linrope import feature_maps
from linrope.attention import LinearRoPEAttention
from linrope.functional import linear_rope_attention, linear_rope_state
from linrope.rotary import Rotary
from linrope.state import LinearAttentionState
from linrope.versions import show_versions

__all__ = [
    "LinearAttentionState",
    "LinearRoPEAttention",
    "Rotary",
    "feature_maps",
    "linear_rope_attention",
    "linear_rope_state",
    "show_versions",
]
__version__ = "0.2.0"
