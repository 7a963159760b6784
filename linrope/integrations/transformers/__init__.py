"""transformers' own models on linrope's kernels: ``enable()``, one line for their users.

>>> from linrope.integrations import transformers as linrope_transformers
>>> with linrope_transformers.enable("mamba2"):
...     pass  # Mamba-2 models that run here scan, step, convolve and normalize with linrope
"""

from linrope.integrations.transformers.families import FAMILIES, Enabled, disable, enable, replaced

__all__ = ["FAMILIES", "Enabled", "disable", "enable", "replaced"]
