"""Whether two caches can be told apart: a paired bootstrap over blocks of neighbouring tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Neighbours share their context, so they are drawn together: positions of a block.
BLOCK = 64
RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with the ends of its interval at `LEVEL`, in the unit of what was compared."""

    mean: float
    low: float
    high: float

    @property
    def distinguishable(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def paired_difference(a: np.ndarray, b: np.ndarray, *, block: int = BLOCK, seed: int = 0) -> Difference | None:
    """Mean of `a - b` over the same tokens, and its percentile interval.

    a, b: float [n], such as KL divergences per token, in the order of the text.  None below two blocks: there is
    nothing to resample.  Blocks of fixed length are drawn with replacement, as in the block bootstrap of Kuensch
    (1989); the last one may be shorter and counts by its tokens.  Raises ValueError where the lengths differ.
    """
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"the same tokens are needed twice, not {a.shape} and {b.shape}")
    starts = np.arange(0, len(a), block)
    if len(starts) < 2:
        return None
    difference = a - b
    sums = np.add.reduceat(difference, starts)
    counts = np.diff(np.append(starts, len(a)))
    drawn = np.random.default_rng(seed).integers(len(starts), size=(RESAMPLES, len(starts)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Difference(float(difference.mean()), float(low), float(high))
