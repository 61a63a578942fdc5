"""What a candidate is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvkernels.spec import QuantSpec
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics


class Candidate(ABC):
    """A way to store a head that is fitted to its statistics.

    name: for tables and for choosing by hand.  rank: 0 is free, more is more to do for each token.
    """

    name: ClassVar[str]
    rank: ClassVar[int]

    @abstractmethod
    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        """The transform for one side of one head that is stored as `spec`, or None where it would change nothing."""
