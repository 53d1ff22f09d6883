"""Compiled kernels. Each stands beside a plain reference in the room that uses it, and is tested against it."""
