"""Monocular depth: metres for every pixel."""
