"""What was seen of one side of one KV head: its statistics, and sampled vectors with their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvkernels.spec import QuantSpec
from kvkernels.transform import apply, invert
from kvrun.cache import head_matrix
from kvrun.plan import HeadTransform

from .collect import ChannelStatistics


@dataclass(frozen=True)
class Turned:
    """Keys as a rotating offset leaves them: x [n_chunk, n, head_dim] less `R_s mean` at each position `s`.

    mean: float32 [head_dim], of the keys before RoPE.  statistics: of x.
    """

    x: Tensor
    mean: np.ndarray
    statistics: ChannelStatistics


@dataclass(frozen=True)
class HeadSamples:
    """One side ("k" or "v") of one KV head.

    x: float32 [n_chunk, n, head_dim], keys after RoPE or values, without sinks.
    gradient: of the log-probability of a sampled label with respect to x, same shape, or None.
    statistics: of these tokens or of more.  turned: for keys, where a rotating offset is to be offered.
    """

    side: str
    x: Tensor
    statistics: ChannelStatistics
    gradient: Tensor | None = None
    turned: Turned | None = None

    @classmethod
    def of(cls, x: Tensor, side: str) -> HeadSamples:
        """Samples alone, as plain error needs them."""
        return cls(side, x, ChannelStatistics.of(x))

    def unweighed(self) -> HeadSamples:
        """The same without what is known of the weight of errors."""
        return replace(self, statistics=replace(self.statistics, query=None, fisher=None, output=None))

    def thinned(self, n_token: int) -> HeadSamples:
        """About `n_token` of the tokens, from all chunks, in runs that keep groups of 64 neighbours together."""
        step = self.x.shape[0] * self.x.shape[1] // max(n_token, 1)
        if step < 2:
            return self
        rows = torch.arange(self.x.shape[1])
        kept = rows[(rows // 64) % step == 0]
        gradient = None if self.gradient is None else self.gradient[:, kept]
        turned = None if self.turned is None else replace(self.turned, x=self.turned.x[:, kept])
        return HeadSamples(self.side, self.x[:, kept], self.statistics, gradient, turned)


class Stored:
    """Samples under one transform, as a cache holds them before it quantizes: float16 [n_chunk, n, head_dim].

    y: what is stored.  inverse: `T^-1`, None for identity.  fits: whether all of it fits float16.
    """

    def __init__(self, samples: HeadSamples, transform: HeadTransform) -> None:
        x, fixed = samples.x, transform.offset
        if transform.rotating:
            assert samples.turned is not None
            x, fixed = samples.turned.x, None
        n_chunk, _, d = x.shape
        t = head_matrix(transform, d)
        offset = None if fixed is None else torch.from_numpy(fixed).expand(n_chunk, d)
        self.exact = apply(x, None if t is None else t.to(x.dtype).expand(n_chunk, d, d), offset)
        self.y = self.exact.to(torch.float16)
        self.inverse = None if t is None else invert(t).to(x.dtype)
        self.fits = bool(torch.isfinite(self.y).all())

    def blocks(self, spec: QuantSpec) -> slice:
        """The tokens of a chunk that fill whole groups along the tokens."""
        return slice(0, self.y.shape[1] // spec.block * spec.block)
