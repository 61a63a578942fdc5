"""Rotation into the directions of the queries."""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from ..spd import eigen
from .balanced import as_stored, rotate_evenly
from .base import Candidate


class QueryRotation(Candidate):
    """The eigenvectors of E[q q^T], then a Hadamard rotation (OSCAR); values: of the output projection's Gram matrix.

    An orthogonal matrix: the error stays as large as it is, and no direction of the queries gets more than its share.
    """

    name = "query-rotation"
    rank = 4

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        metric = statistics.output if statistics.query is None else statistics.query
        if metric is None:
            return None
        _, vectors = eigen(metric)
        return HeadTransform(matrix=as_stored(rotate_evenly(vectors)))
