"""Checks and files that every room may use."""
