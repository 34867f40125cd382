"""Modules of a model while it is compressed and after, and swapping them in."""
