"""Gemma 2 (arXiv 2408.00118)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..config import Keys, RopeStyle
from ..feed_forward import Activation, gelu_tanh
from ..gguf_file import GGUFFile
from ..weights import Weights
from .llama import Llama


class Gemma2(Llama):
    """Norms before and after both halves of a block, GeGLU, scaled embeddings, soft caps, every other layer slides.

    The norms' weights are stored with the 1 that Gemma adds to them.
    """

    arch: ClassVar[tuple[str, ...]] = ("gemma2",)
    rope_style: ClassVar[RopeStyle] = "neox"
    rope_scalings: ClassVar[tuple[str, ...]] = ("linear",)
    has_rope_freqs: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False
    post_norms: ClassVar[bool] = True
    sliding_period: ClassVar[int] = 2
    sliding_default: ClassVar[int] = 4096
    #: The largest model scales scores by the width of the model per head, the others by that of a head.
    scaled_by_width: ClassVar[int] = 46

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        self.attention_softcap, self._final_softcap = self.softcaps(Keys(file))
        super().__init__(file, weights)
        config = self.config
        self.embedding_scale = config.n_embd**0.5
        by_width = config.n_layer == self.scaled_by_width
        self._attention_scale = (config.n_embd // config.n_head[0] if by_width else config.head_dim_k) ** -0.5

    def softcaps(self, keys: Keys) -> tuple[float, float]:
        """Of attention scores and of logits; 0 is none."""
        return keys.scale("attn_logit_softcapping", 50.0), keys.scale("final_logit_softcapping", 30.0)

    def activation(self) -> Activation:
        return gelu_tanh

    def attention_scale(self, il: int) -> float:
        return self._attention_scale

    def output(self, x: Tensor) -> Tensor:
        logits, cap = super().output(x), self._final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits
