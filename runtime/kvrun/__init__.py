"""kvrun: runs a GGUF model with a packed KV cache, and measures what the packing costs."""

__version__ = "0.1.0"

__all__ = ["__version__"]
