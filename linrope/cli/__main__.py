"""Runs ``python -m linrope.cli``, for ``accelerate launch -m`` and ``torchrun -m``."""

from linrope.cli import main

main()
