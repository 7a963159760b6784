"""``python -m linrope.cli``, which ``accelerate launch -m`` and ``torchrun -m`` need."""

from linrope.cli import main

main()
