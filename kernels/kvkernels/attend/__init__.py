"""Attention over a cache of which one part is packed and the rest is in full precision."""

from .reference import Side, attend, soft_capped

__all__ = ["Side", "attend", "soft_capped"]
