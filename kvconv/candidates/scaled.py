"""Channels scaled one by one, folded into the query."""

from __future__ import annotations

import numpy as np

from kvkernels.spec import QuantSpec
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from .balanced import as_stored
from .base import Candidate

#: No channel is scaled by more than this against the others.
LIMIT = 100.0


class ChannelScale(Candidate):
    """Each channel times `(M_ii / G_ii)^1/4`, which the query takes back: the balanced transform without rotation.

    Smoothing as in SmoothQuant (arXiv 2211.10438), between keys and queries or gradients instead of activations and
    weights.
    """

    name = "scaled"
    rank = 4

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        metrics = (statistics.fisher, statistics.query, statistics.output)
        metric = next((m for m in metrics if m is not None), None)
        if metric is None:
            return None
        energy, weight = statistics.squares / statistics.n, np.diagonal(metric)
        if not (energy > 0).all() or not (weight > 0).all():
            return None
        scale = (weight / energy) ** 0.25
        scale = np.clip(scale / np.exp(np.log(scale).mean()), 1 / LIMIT, LIMIT)
        scale /= np.sqrt((scale**2 * energy).mean())
        return HeadTransform(matrix=as_stored(np.diag(scale)))
