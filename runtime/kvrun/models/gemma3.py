"""Gemma 3, its text part (arXiv 2503.19786)."""

from __future__ import annotations

from typing import ClassVar

from ..config import Keys
from ..gguf_file import GGUFFile
from ..layers import Rope
from ..weights import Weights
from .gemma2 import Gemma2
from .llama import HeadNorm

#: RoPE base of the layers that slide, where the file does not say.
_LOCAL_THETA = 10000.0


class Gemma3(Gemma2):
    """Norms over each head of queries and keys instead of the cap on scores; five layers in six slide.

    Those that slide have a RoPE base of their own, and are not stretched where the model is.
    """

    arch: ClassVar[tuple[str, ...]] = ("gemma3",)
    head_norm: ClassVar[HeadNorm] = "head"
    sliding_period: ClassVar[int] = 6
    sliding_default: ClassVar[int] = 0
    scaled_by_width: ClassVar[int] = 62

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        super().__init__(file, weights)
        theta = Keys(file).positive("rope.freq_base_swa", default=_LOCAL_THETA)
        self._local = Rope(self.config.n_rot, theta, self.config.rope_style)

    def softcaps(self, keys: Keys) -> tuple[float, float]:
        return 0.0, keys.scale("final_logit_softcapping", 0.0)

    def rope_of(self, il: int) -> Rope:
        return self._local if self.config.geometry[il].sliding else super().rope_of(il)
