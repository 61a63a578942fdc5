"""Channels as they come."""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from .base import Candidate


class Identity(Candidate):
    """Stored as the model made it: what every other candidate must beat."""

    name = "identity"
    rank = 0

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        return HeadTransform()
