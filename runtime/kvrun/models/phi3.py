"""Phi-3 and Phi-4 (arXiv 2404.14219)."""

from __future__ import annotations

from typing import ClassVar

from ..config import RopeStyle
from ..feed_forward import FusedFFN
from ..gguf_file import GGUFFile
from ..layers import Rope, check_shape
from ..weights import Weights
from .llama import Llama

_FACTORS = {False: "rope_factors_short.weight", True: "rope_factors_long.weight"}


class Phi3(Llama):
    """Llama's graph with one matrix for queries, keys and values and one for gate and up.

    Files for long contexts carry two sets of frequency factors; which one is used depends on the context that is asked
    for, as in llama.cpp. The sliding window that some files name is not applied; llama.cpp does not apply it either.
    """

    arch: ClassVar[tuple[str, ...]] = ("phi3",)
    rope_style: ClassVar[RopeStyle] = "neox"
    rope_scalings: ClassVar[tuple[str, ...]] = ("linear", "yarn", "longrope")
    has_rope_freqs: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        self._ropes: dict[bool, Rope] = {}
        super().__init__(file, weights)

    def feed_forward(self, il: int) -> FusedFFN:
        return FusedFFN(self.weights, il, self.config.n_embd, self.config.n_ff[il])

    def check_all_tensors_used(self, used: set[str]) -> None:
        names = [name for name in _FACTORS.values() if name in self.weights]
        for name in names:
            check_shape(self.weights, name, (self.config.n_rot // 2,))
        if len(names) == 2:
            self._ropes = {long: self.make_rope(factors=self.weights.get(name)) for long, name in _FACTORS.items()}
            self._rope = self._ropes[False]
        super().check_all_tensors_used({*used, *names} if self._ropes else used)

    def set_context(self, n_ctx: int) -> None:
        if self._ropes:
            self._rope = self._ropes[n_ctx > self.config.rope_scaling.n_ctx_orig]
