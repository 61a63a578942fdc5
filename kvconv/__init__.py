"""kvconv: finds how each head of a GGUF model's KV cache is best quantized, and stores it in the file."""

from kvrun import __version__

__all__ = ["__version__"]
