"""Keys less their mean before RoPE: what a rotating offset leaves of a head's samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from .collect import ChannelStatistics
from .samples import HeadSamples, Turned

#: RoPE of one layer: x [1, n, head_dim] and positions int64 [n] to [1, n, head_dim].
Rope = Callable[[Tensor, Tensor], Tensor]


def with_turned(samples: HeadSamples, rope: Rope, positions: Tensor, magnitude: float = 1.0) -> HeadSamples:
    """The samples of a head's keys, with what a rotating offset would leave of them.

    positions: int64 [n_chunk, n], of the sampled tokens.  magnitude: what RoPE stretches vectors by.  RoPE at the
    position `-s` undoes it at `s`; the mean is that of the samples.
    """
    flat = positions.flatten()
    x = samples.x.reshape(1, len(flat), -1)
    # Keys were stretched once by RoPE and would be again here, where it is scaled (YaRN).
    mean = rope(x, -flat).mean(1, keepdim=True) / magnitude**2
    left = (x - rope(mean.expand_as(x).contiguous(), flat)).view(samples.x.shape)
    known = samples.statistics
    statistics = ChannelStatistics.of(left)
    # The metrics were summed over all tokens that were seen; these are perhaps fewer.
    share = statistics.n / known.n
    statistics = replace(
        statistics,
        query=None if known.query is None else known.query * share,
        fisher=None if known.fisher is None else known.fisher * share,
    )
    return replace(samples, turned=Turned(left, mean[0, 0].numpy().astype(np.float32), statistics))
