"""Asymmetric uniform quantization: the definition that every faster version must match bit for bit.

The input is f16, because that is what the full-precision part of the cache holds; so minima and maxima are exact, and
the codes are a pure function of stored values, whatever precision the model runs in.  All arithmetic is float32 with
IEEE division and round-half-to-even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import QuantSpec

F16_MAX = 65504.0


def _grouped(x: Tensor, spec: QuantSpec) -> Tensor:
    """View [n_head, n, d] so that the last axis is one group: [n_head, n, d / g, g] or [n_head, n / g, d, g]."""
    n_head, n, d = x.shape
    if spec.axis == "token":
        return x.reshape(n_head, n, d // spec.group, spec.group)
    return x.reshape(n_head, n // spec.group, spec.group, d).transpose(-1, -2)


def _ungrouped(x: Tensor, spec: QuantSpec, shape: torch.Size) -> Tensor:
    if spec.axis == "channel":
        x = x.transpose(-1, -2)
    return x.reshape(shape)


def quantize(x: Tensor, spec: QuantSpec, clip: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima of one side of some heads.

    x: float16 [n_head, n, d], finite; with axis "channel" `n` is a multiple of the group.
    clip: float32 [n_head], in (0, 1]: narrows each group's range around its middle; None is 1.
    Returns codes uint8 [n_head, n, d] in 0 .. 2^bits - 1, scale and minimum float16 [n_head, n, d / group] (axis
    "token") or [n_head, n / group, d] (axis "channel").  A value is restored as `code * scale + minimum`.
    """
    if x.dtype != torch.float16:
        raise TypeError(f"quantize reads f16, not {x.dtype}")
    groups = _grouped(x, spec).to(torch.float32)
    low, high = groups.amin(-1), groups.amax(-1)
    if clip is not None:
        cut = (high - low) * ((1.0 - clip.to(torch.float32)) * 0.5)[:, None, None]
        low, high = low + cut, high - cut
    top = float(2**spec.bits - 1)
    minimum = low.to(torch.float16)
    scale = ((high - minimum.to(torch.float32)) / top).clamp(0.0, F16_MAX).to(torch.float16)
    step = scale.to(torch.float32)[..., None]
    codes = torch.round((groups - minimum.to(torch.float32)[..., None]) / torch.where(step > 0, step, 1.0))
    # A step of 0 means that the group is constant (to within f16): the minimum alone restores it.
    codes = torch.where(step > 0, codes, 0.0).clamp(0.0, top).to(torch.uint8)
    return _ungrouped(codes, spec, x.shape), scale, minimum


def dequantize(codes: Tensor, scale: Tensor, minimum: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Values [n_head, n, d] in `dtype` from what `quantize` returns."""
    groups = _grouped(codes, spec).to(dtype)
    values = groups * scale.to(dtype)[..., None] + minimum.to(dtype)[..., None]
    return _ungrouped(values, spec, codes.shape)
