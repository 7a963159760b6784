"""The command ``linrope bench``: attention, models of transformers, and groups of processes."""
