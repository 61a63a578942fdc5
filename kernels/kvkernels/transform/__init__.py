"""Per-head linear maps applied to keys and values before they are stored."""

from .reference import apply, hadamard_block, hadamard_matrix, invert, transform_matrix

__all__ = ["apply", "hadamard_block", "hadamard_matrix", "invert", "transform_matrix"]
