"""Where a divergence comes from: by position in the window, and by how sure the reference was."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvrun.evaluation.metrics import standard_error

#: Parts of the scored half of a window.
N_POSITION_BINS = 8
#: Ends of the bins of the probability that the reference gives its most probable token.
CONFIDENCE_EDGES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)

#: One bin: `low` and `high` (`high` belongs to it only in the last one), `n` tokens, `kld_mean` and `kld_mean_se`.
Bin = dict[str, float]


def by_position(kld: np.ndarray, first: int, n_per_window: int) -> list[Bin]:
    """Mean KL divergence over equal parts of the scored positions `first .. first + n_per_window - 1` of a window.

    kld: float [windows * n_per_window], window after window.  Bins without a position are left out.
    """
    windows = kld.reshape(-1, n_per_window)
    edges = np.linspace(0, n_per_window, min(N_POSITION_BINS, n_per_window) + 1).round().astype(int)
    return [_bin(first + low, first + high, windows[:, low:high].ravel()) for low, high in pairwise(edges.tolist())]


def by_confidence(kld: np.ndarray, confidence: np.ndarray) -> list[Bin]:
    """Mean KL divergence over bins of the reference's confidence, float [n]; bins without a token are left out."""
    which = np.digitize(confidence, CONFIDENCE_EDGES[1:-1])
    edges = list(pairwise(CONFIDENCE_EDGES))
    return [_bin(*edges[i], kld[which == i]) for i in range(len(edges)) if (which == i).any()]


def _bin(low: float, high: float, kld: np.ndarray) -> Bin:
    return {
        "low": low, "high": high, "n": len(kld), "kld_mean": float(kld.mean()), "kld_mean_se": standard_error(kld),
    }  # fmt: skip
