"""Asymmetric uniform codes with an f16 scale and an f16 minimum per group."""

from .reference import dequantize, quantize

__all__ = ["dequantize", "quantize"]
