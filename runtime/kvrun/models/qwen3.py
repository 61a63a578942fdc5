"""Qwen 3, dense and with experts (arXiv 2505.09388)."""

from __future__ import annotations

from typing import ClassVar

from ..config import RopeStyle
from .llama import HeadNorm, Llama


class Qwen3(Llama):
    """Llama's graph with a norm over each head of queries and keys before RoPE, and pairs half a head apart."""

    arch: ClassVar[tuple[str, ...]] = ("qwen3",)
    rope_style: ClassVar[RopeStyle] = "neox"
    has_rope_freqs: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False
    head_norm: ClassVar[HeadNorm] = "head"


class Qwen3Moe(Qwen3):
    """Qwen 3 with a mixture of experts in every layer."""

    arch: ClassVar[tuple[str, ...]] = ("qwen3moe",)
    has_experts: ClassVar[bool] = True

    def expert_width(self, il: int, n_used: int) -> int:
        return self.config.n_ff[il] // n_used
