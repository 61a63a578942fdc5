"""The balanced transform: keys and what an error in them costs get the same shape, then a rotation spreads both."""

from __future__ import annotations

import numpy as np

from kvkernels.spec import QuantSpec
from kvkernels.transform import hadamard_block, transform_matrix
from kvrun.plan import HeadTransform

from ..collect import ChannelStatistics
from ..spd import damped, eigen, geometric_mean, power
from .base import Candidate


def rotate_evenly(vectors: np.ndarray) -> np.ndarray:
    """`H V^T` for eigenvectors V [d, d] in columns, largest last: Hadamard blocks mix what the eigenvalues tell apart.

    Where one block does not cover the head, neighbours in the order of the eigenvalues go to different blocks.
    """
    d = len(vectors)
    block = hadamard_block(d)
    dealt = np.arange(d).reshape(block, d // block).T.ravel()
    h: np.ndarray = transform_matrix(d, hadamard=block if block > 1 else 0).numpy()
    return h @ vectors.T[dealt]


def balanced(second_moment: np.ndarray, metric: np.ndarray) -> np.ndarray:
    """`T = H U^T A^1/2` with `A = G^-1 # M`, U the eigenvectors of `A^1/2 G A^1/2`; stored values have rms 1.

    G: second moment of what is stored, M: of what it is multiplied by.  With an error that is alike in all directions
    after `T`, its cost is `tr(G A) tr(M A^-1)` up to a factor, which this A minimizes: WUSH (arXiv 2512.00956) and its
    kin for the KV cache.
    """
    g = damped(second_moment)
    a = power(geometric_mean(power(g, -1.0), damped(metric)), 0.5)
    _, vectors = eigen(a @ g @ a)
    t = rotate_evenly(vectors) @ a
    rms = np.sqrt(np.trace(t @ second_moment @ t.T) / len(t))
    return as_stored(t / rms if rms > 0 else t)


def as_stored(t: np.ndarray) -> np.ndarray:
    """Rounded to f16, as a recipe holds it: float32."""
    return t.astype(np.float16).astype(np.float32)


class BalancedQuery(Candidate):
    """Balanced between keys and the queries that meet them, or between values and the output projection.

    WUSH (arXiv 2512.00956) with the metric of OSCAR for keys; for values the Gram matrix of the output projection.
    """

    name = "balanced-query"
    rank = 5

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        metric = statistics.output if statistics.query is None else statistics.query
        return None if metric is None else HeadTransform(matrix=balanced(statistics.outer / statistics.n, metric))


class BalancedFisher(Candidate):
    """Balanced between keys or values and the gradients of the log-probability of the model's own labels.

    WUSH (arXiv 2512.00956) with the Fisher information as metric: what an error costs is measured at the output.
    """

    name = "balanced-fisher"
    rank = 6

    def fit(self, statistics: ChannelStatistics, spec: QuantSpec) -> HeadTransform | None:
        if statistics.fisher is None:
            return None
        return HeadTransform(matrix=balanced(statistics.outer / statistics.n, statistics.fisher))
