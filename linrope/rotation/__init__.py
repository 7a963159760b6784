"""Rotary position embedding: frequencies, angles and the rotation of feature pairs."""
