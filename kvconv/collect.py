"""Statistics of the channels of one side (keys after RoPE, or values) of one KV head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Sums over tokens, per channel; two of them over different tokens add up with `merge`.

    n: tokens.  total: float64 [head_dim], sum of values.  outer: float64 [head_dim, head_dim], sum of `x x^T`.
    low, high: float32 [head_dim].
    What an error costs in each direction, float64 [head_dim, head_dim], None where it is not known:
    query: sum over tokens and over the query heads of the group of `q q^T` (keys).
    fisher: sum over tokens of `g g^T`, `g` the gradient of the log-probability of a sampled label (see `gradients`).
    output: sum over the query heads of the group of `W_o^T W_o`, the output projection's Gram matrix (values).
    """

    n: int
    total: np.ndarray
    outer: np.ndarray
    low: np.ndarray
    high: np.ndarray
    query: np.ndarray | None = None
    fisher: np.ndarray | None = None
    output: np.ndarray | None = None

    @classmethod
    def of(
        cls, x: Tensor, *, query: np.ndarray | None = None, gradient: Tensor | None = None,
        output: np.ndarray | None = None,
    ) -> ChannelStatistics:  # fmt: skip
        """Statistics of x, float32 [..., head_dim], at least one token; leading axes are tokens.

        gradient: of the shape of x.
        """
        rows = x.reshape(-1, x.shape[-1])
        wide = rows.double()
        return cls(
            n=len(rows),
            total=wide.sum(0).numpy(),
            outer=(wide.T @ wide).numpy(),
            low=rows.amin(0).numpy(),
            high=rows.amax(0).numpy(),
            query=query,
            fisher=None if gradient is None else gram(gradient),
            output=output,
        )

    def merge(self, other: ChannelStatistics) -> ChannelStatistics:
        """Statistics over the tokens of both."""
        return ChannelStatistics(
            n=self.n + other.n,
            total=self.total + other.total,
            outer=self.outer + other.outer,
            low=np.minimum(self.low, other.low),
            high=np.maximum(self.high, other.high),
            query=None if self.query is None or other.query is None else self.query + other.query,
            fisher=None if self.fisher is None or other.fisher is None else self.fisher + other.fisher,
            output=self.output,
        )

    def centred(self) -> ChannelStatistics:
        """Statistics of the same tokens with the mean of each channel subtracted."""
        mean = self.mean
        outer = self.outer - self.n * np.outer(mean, mean)
        return replace(self, total=np.zeros_like(self.total), outer=outer, low=self.low - mean, high=self.high - mean)

    @property
    def head_dim(self) -> int:
        """Channels."""
        return len(self.total)

    @property
    def squares(self) -> np.ndarray:
        """Sum of squares, float64 [head_dim]."""
        return np.diagonal(self.outer)

    @property
    def mean(self) -> np.ndarray:
        """float64 [head_dim]."""
        return self.total / self.n

    @property
    def range(self) -> np.ndarray:
        """Largest minus smallest value, float64 [head_dim]."""
        return self.high.astype(np.float64) - self.low

    @property
    def deviation(self) -> float:
        """Sum over tokens and channels of the squared deviation from the channel's mean; 0 for a constant head."""
        sums = self.squares - self.total**2 / self.n
        # What is left of constant channels after cancellation is rounding, not deviation.
        return float(np.where(self.range > 0, sums, 0.0).clip(min=0.0).sum())


def gram(x: Tensor) -> np.ndarray:
    """Sum of `x x^T` over all leading axes: float64 [d, d]."""
    rows = x.reshape(-1, x.shape[-1]).double()
    product: np.ndarray = (rows.T @ rows).numpy()
    return product
