"""The operators around linear_rope_attention: the convolution before it, the norm and the gate after it."""

from linrope.ops.convolution import convolve, convolve_parts
from linrope.ops.norm import gated_norm

__all__ = ["convolve", "convolve_parts", "gated_norm"]
