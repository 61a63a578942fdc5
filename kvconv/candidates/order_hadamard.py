"""Channels sorted by range, then rotated within groups."""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvkernels.transform import hadamard_block
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from .base import Candidate
from .order import order_by_range


class OrderHadamard(Candidate):
    """Sort channels by range, then rotate each group by itself: outliers are spread, but only among their like.

    Order and rotation together as in RotateKV (arXiv 2501.16383), order as in SKVQ (arXiv 2405.06219).  It is left out
    where the whole head is one group, where it would be the plain rotation.
    """

    name = "order+hadamard"
    rank = 3

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        if spec.axis == "channel" or spec.group >= statistics.head_dim:
            return None
        block = hadamard_block(spec.group)
        return HeadTransform(order=order_by_range(statistics), hadamard=block) if block > 1 else None
