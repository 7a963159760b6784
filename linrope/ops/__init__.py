"""The operators around linear_rope_attention: the convolution and the gates before it, the norm after it."""

from linrope.ops.convolution import convolve, convolve_parts
from linrope.ops.gates import forget_and_write_gates, gates
from linrope.ops.norm import gated_norm

__all__ = ["convolve", "convolve_parts", "forget_and_write_gates", "gated_norm", "gates"]
