"""IBM Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..config import Keys
from ..gguf_file import GGUFFile
from ..weights import Weights
from .llama import Llama


class Granite(Llama):
    """Llama's graph with four multipliers, of embeddings, scores, residuals and logits (muP, arXiv 2203.03466)."""

    arch: ClassVar[tuple[str, ...]] = ("granite", "granitemoe")

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        keys = Keys(file)
        self.embedding_scale = keys.scale("embedding_scale", 1.0)
        self.residual_scale = keys.scale("residual_scale", 1.0)
        self._logit_scale = keys.positive("logit_scale")
        super().__init__(file, weights)
        self._attention_scale = keys.scale("attention.scale", self.config.head_dim_k**-0.5)

    def attention_scale(self, il: int) -> float:
        return self._attention_scale

    def output(self, x: Tensor) -> Tensor:
        return super().output(x) / self._logit_scale
