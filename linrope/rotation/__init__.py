"""Angles and the rotation of pairs of features."""
