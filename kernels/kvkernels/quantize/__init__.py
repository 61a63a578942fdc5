"""Codes and their scales per group: asymmetric uniform ones, cubic ones, and llama.cpp's blocks."""

from .codes import decode, encode
from .cubic import dequantize_cubic, quantize_cubic
from .ggml import dequantize_ggml, quantize_ggml, round_queries_ggml
from .reference import dequantize, quantize

__all__ = [
    "decode",
    "dequantize",
    "dequantize_cubic",
    "dequantize_ggml",
    "encode",
    "quantize",
    "quantize_cubic",
    "quantize_ggml",
    "round_queries_ggml",
]
