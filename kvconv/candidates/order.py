"""Channels sorted by range."""

from __future__ import annotations

import numpy as np

from kvkernels.spec import QuantSpec
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from .base import Candidate


def order_by_range(statistics: ChannelStatistics) -> np.ndarray:
    """Permutation uint16 [head_dim] that puts the narrowest channel first; equal ranges keep their order."""
    return np.argsort(statistics.range, kind="stable").astype(np.uint16)


class SortedOrder(Candidate):
    """Channels of similar range share a group, so that a wide channel does not coarsen the steps of narrow ones.

    After the channel reorder of SKVQ (arXiv 2405.06219), which clusters all heads of a layer before RoPE by minimum and
    maximum; here each head is sorted by itself, after RoPE, and groups stay equal in size.  It changes nothing where
    the whole head is one group, or where a group is tokens of one channel.
    """

    name = "order"
    rank = 1

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        if spec.axis == "channel" or spec.group >= statistics.head_dim:
            return None
        return HeadTransform(order=order_by_range(statistics))
