"""The attention layer and what it is built from."""
