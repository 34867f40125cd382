"""Compressed model -> directories, in this and other formats."""
