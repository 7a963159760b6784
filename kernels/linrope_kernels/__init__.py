"""Triton kernels of RoFormer's eq. 19, linear attention with rotary embedding, and their launchers."""

from triton.runtime.jit import JITFunction

from linrope_kernels.forward import scan_fwd_kernel

# True if Triton runs the kernels in its interpreter, on the CPU.
INTERPRETED = not isinstance(scan_fwd_kernel, JITFunction)
