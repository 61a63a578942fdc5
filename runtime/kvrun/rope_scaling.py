"""How a model's RoPE is stretched past the context it was first trained for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: YaRN's two limits, in full turns over the original context; llama.cpp reads no others for the models here.
TURNS_KEPT, TURNS_STRETCHED = 32.0, 1.0


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE by the rules of GGUF files.

    factor: positions are divided by it, 1 for none (position interpolation, arXiv 2306.15595).
    magnitude: cosines and sines are multiplied by it (`rope.scaling.attn_factor`).
    n_ctx_orig: the context before it was stretched, in tokens.
    yarn: blend interpolated and original frequencies, pair by pair (YaRN, arXiv 2309.00071): pairs that turn more than
        32 times over `n_ctx_orig` keep theirs, those that turn less than once are interpolated.
    by_length: the file holds frequency factors for short and for long contexts (LongRoPE, arXiv 2402.13753).
    """

    factor: float = 1.0
    magnitude: float = 1.0
    n_ctx_orig: int = 4096
    yarn: bool = False
    by_length: bool = False

    @property
    def stretch(self) -> float:
        """What `magnitude` comes to when YaRN's correction of the attention's temperature is counted in."""
        return self.magnitude * (1 + 0.1 * math.log(max(self.factor, 1.0)) if self.yarn else 1.0)

    def frequencies(self, n_rot: int, theta: float, factors: Tensor | None = None) -> Tensor:
        """Radians per position of each pair, float64 [n_rot / 2].

        factors: [n_rot / 2], frequencies are divided by them before they are scaled.
        """
        original = theta ** -(torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)
        if factors is not None:
            original = original / factors.double()
        interpolated = original / self.factor
        if not self.yarn:
            return interpolated
        low, high = self._limits(n_rot, theta)
        ramp = ((torch.arange(n_rot // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clip(0, 1)
        return original * (1 - ramp) + interpolated * ramp

    def _limits(self, n_rot: int, theta: float) -> tuple[float, float]:
        """The pairs between which the blend runs."""

        def pair(turns: float) -> float:
            return n_rot * math.log(self.n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(theta))

        return max(0, math.floor(pair(TURNS_KEPT))), min(n_rot - 1, math.ceil(pair(TURNS_STRETCHED)))
