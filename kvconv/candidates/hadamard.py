"""Hadamard rotation of the whole head."""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvkernels.transform import hadamard_block
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from .base import Candidate


class Hadamard(Candidate):
    """Rotate the head with the largest Hadamard matrix that divides it, which spreads outliers over its channels.

    QuaRot (arXiv 2404.00456).  Block-diagonal where the head size is no power of two.
    """

    name = "hadamard"
    rank = 2

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        block = hadamard_block(statistics.head_dim)
        return HeadTransform(hadamard=block) if block > 1 else None
