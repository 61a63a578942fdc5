"""The rotating key offset: a mean taken before RoPE, subtracted from keys after it."""

from .reference import RopeStyle, offset_scores, pairs, turned_offset

__all__ = ["RopeStyle", "offset_scores", "pairs", "turned_offset"]
