"""The numerics contract of docs/numerics.md: its bounds, the cases that backends must pass, and their comparison.

``linrope check`` and the tests use it.
"""
