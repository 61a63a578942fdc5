"""llama.cpp's q4_0 and q8_0 blocks: 32 channels of one token, one f16 scale, no minimum.

The same codes and scales as ggml's reference quantizers give (`quantize_row_q4_0_ref`, `quantize_row_q8_0_ref` in
ggml-quants.c), bit for bit, from f16 input. They exist to measure llama.cpp's formats by our own means. Codes are
stored shifted to unsigned: q4_0 has codes 0..15 for -8..7, q8_0 has 1..255 for -127..127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import QuantSpec

#: What llama.cpp's attention rounds queries to when they meet quantized keys (the `vec_dot_type` of both key types).
QUERY_SPEC = QuantSpec(8, 32, code="q8_0")
#: What a code of 0 stands for.
LOWEST = {"q4_0": -8, "q8_0": -128}


def quantize_ggml(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n_head, n, d] and scales float16 [n_head, n, d / 32] of x, float16 [n_head, n, d], finite.

    A value is restored as `(code + LOWEST) * scale`.  The arithmetic is float32; codes are computed with the scale
    before it is rounded to f16, as ggml does.
    """
    if x.dtype != torch.float16:
        raise TypeError(f"quantize reads f16, not {x.dtype}")
    blocks = x.reshape(*x.shape[:-1], -1, spec.group).to(torch.float32)
    if spec.code == "q4_0":
        # The value that is largest in absolute terms gets the code -8, so the scale carries its sign.
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = extreme / -8.0
        codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15)
    else:
        scale = blocks.abs().amax(-1, keepdim=True) / 127.0
        ratio = blocks * _inverse(scale)
        size = ratio.abs()
        whole = size.floor()
        rounded = whole + (2.0 * (size - whole)).floor()  # halves away from zero, as C's roundf
        codes = torch.copysign(rounded, ratio) - LOWEST["q8_0"]
    return codes.to(torch.uint8).reshape(x.shape), scale[..., 0].to(torch.float16)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def dequantize_ggml(codes: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Values [n_head, n, d] in `dtype` from what `quantize_ggml` returns."""
    blocks = codes.reshape(*codes.shape[:-1], -1, spec.group).to(dtype) + LOWEST[spec.code]
    return (blocks * scale.to(dtype)[..., None]).reshape(codes.shape)


def round_queries_ggml(q: Tensor) -> Tensor:
    """Queries [n_head, n, d] as llama.cpp's flash attention on the CPU sees them beside quantized keys: q8_0 blocks."""
    return dequantize_ggml(*quantize_ggml(q.to(torch.float16), QUERY_SPEC), QUERY_SPEC, q.dtype)
