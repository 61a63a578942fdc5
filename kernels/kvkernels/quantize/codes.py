"""Any code of `QuantSpec` through one pair of functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import QuantSpec
from .cubic import dequantize_cubic, quantize_cubic
from .ggml import dequantize_ggml, quantize_ggml
from .reference import dequantize, quantize

#: Codes, scales, and minima where the code has them.
Coded = tuple[Tensor, Tensor, Tensor | None]


def encode(x: Tensor, spec: QuantSpec, clip: Tensor | None = None) -> Coded:
    """Codes, scales and minima of x, float16 [n_head, n, d]: see `quantize`, `quantize_cubic` and `quantize_ggml`.

    clip: float32 [n_head] or None; llama.cpp's blocks have none.
    """
    if spec.code == "uniform":
        return quantize(x, spec, clip)
    if spec.code == "cubic":
        return *quantize_cubic(x, spec, clip), None
    return *quantize_ggml(x, spec), None


def decode(coded: Coded, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Values [n_head, n, d] in `dtype` from what `encode` returns."""
    codes, scale, minimum = coded
    if minimum is not None:
        return dequantize(codes, scale, minimum, spec, dtype)
    restore = dequantize_cubic if spec.code == "cubic" else dequantize_ggml
    return restore(codes, scale, spec, dtype)
