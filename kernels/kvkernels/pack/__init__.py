"""Codes as bit planes, so that every width is read by the same code."""

from .reference import pack, packed_bytes, unpack

__all__ = ["pack", "packed_bytes", "unpack"]
