"""Channels in clusters of equal size."""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from ..skvq import cluster_order
from .base import Candidate


class ClusterOrder(Candidate):
    """Channels with alike lowest and highest values share a group, in clusters as large as a group.

    The channel reorder of SKVQ (arXiv 2405.06219), for each head by itself and after RoPE.
    """

    name = "clusters"
    rank = 1

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        if spec.axis == "channel" or not spec.quantized or spec.group >= statistics.head_dim:
            return None
        return HeadTransform(order=cluster_order(statistics, spec.group))
