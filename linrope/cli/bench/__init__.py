"""The command `linrope bench`."""
