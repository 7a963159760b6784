"""Everything that a GPU has to show, as a list of steps: ``make gpu-run``, or ``python -m benchmarks.gpu --help``."""
