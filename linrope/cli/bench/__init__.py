"""The command ``linrope bench``."""
