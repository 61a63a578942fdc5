"""Codes and their scales per group: asymmetric uniform ones, and llama.cpp's blocks."""

from .ggml import dequantize_ggml, quantize_ggml, round_queries_ggml
from .reference import dequantize, quantize

__all__ = ["dequantize", "dequantize_ggml", "quantize", "quantize_ggml", "round_queries_ggml"]
