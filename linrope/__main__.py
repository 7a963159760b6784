"""``python -m linrope``, where the command ``linrope`` is not on the path."""

from linrope.cli import main

main()
