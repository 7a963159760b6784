"""Tokens in order: the state, packed sequences, chunks, decay."""
