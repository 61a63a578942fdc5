"""Statistics of the channels of one side (keys after RoPE, or values) of one KV head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Sums over tokens, per channel; two of them over different tokens add up with `merge`.

    n: tokens.  total, squares: float64 [head_dim], sum of values and of squares.  low, high: float32 [head_dim].
    """

    n: int
    total: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, x: Tensor) -> ChannelStatistics:
        """Statistics of x, float32 [..., head_dim], at least one token; leading axes are tokens."""
        rows = x.reshape(-1, x.shape[-1])
        wide = rows.double()
        return cls(
            n=len(rows),
            total=wide.sum(0).numpy(),
            squares=wide.square().sum(0).numpy(),
            low=rows.amin(0).numpy(),
            high=rows.amax(0).numpy(),
        )

    def merge(self, other: ChannelStatistics) -> ChannelStatistics:
        """Statistics over the tokens of both."""
        return ChannelStatistics(
            n=self.n + other.n,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            low=np.minimum(self.low, other.low),
            high=np.maximum(self.high, other.high),
        )

    @property
    def head_dim(self) -> int:
        """Channels."""
        return len(self.total)

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
