"""SmolLM3 (Hugging Face, 2025)."""

from __future__ import annotations

from typing import ClassVar

from ..gguf_file import GGUFFile
from ..layers import Rope
from ..weights import Weights
from .llama import Llama

#: Every so many layers one has no RoPE (NoPE, arXiv 2501.18795).
_STEP = 4


class SmolLM3(Llama):
    """Llama's graph in which every fourth layer knows no positions."""

    arch: ClassVar[tuple[str, ...]] = ("smollm3",)
    has_rope_freqs: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        super().__init__(file, weights)
        config = self.config
        self._still = Rope(config.n_rot, config.rope_theta, config.rope_style, still=True)

    def rope_of(self, il: int) -> Rope:
        return self._still if (il + 1) % _STEP == 0 else self._rope
