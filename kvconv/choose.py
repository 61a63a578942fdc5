"""Which candidate a head gets: the one that survives the round trip through the real quantizer best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvkernels.quantize import dequantize, quantize
from kvkernels.spec import QuantSpec
from kvkernels.transform import apply, invert
from kvrun.cache import head_matrix
from kvrun.errors import KvError
from kvrun.plan import HeadPlan, HeadTransform

from .candidates import Candidate, candidates
from .collect import ChannelStatistics

#: A candidate replaces a simpler one only when its squared error is smaller by at least this share.
MARGIN = 0.02
OBJECTIVE = "roundtrip"


@dataclass(frozen=True)
class Choice:
    """What one side of one head got.

    before, after: squared round-trip error over squared deviation from the channel means, of the head as it comes and
    as chosen; both 0 for a constant head.
    """

    plan: HeadPlan
    before: float
    after: float


def round_trip_error(x: Tensor, spec: QuantSpec, transform: HeadTransform) -> float:
    """Sum of squared errors after transform, quantizing, restoring and the inverse transform.

    x: float32 [n_chunk, n, head_dim]; groups along the tokens do not cross chunks, and tokens that do not fill such a
    group are left out.  Infinite where a transformed value exceeds float16, in which a cache holds what it quantizes.
    """
    d = x.shape[-1]
    x = x[:, : x.shape[1] // spec.block * spec.block]
    t = head_matrix(transform, d)
    offset = None if transform.offset is None else torch.from_numpy(transform.offset).expand(len(x), d)
    y = apply(x, None if t is None else t.to(x.dtype).expand(len(x), d, d), offset)
    stored = y.to(torch.float16)
    if not bool(torch.isfinite(stored).all()):
        return float("inf")
    restored = dequantize(*quantize(stored, spec), spec, x.dtype) if spec.quantized else stored.to(x.dtype)
    error = restored - y
    if t is not None:
        error = error @ invert(t).to(x.dtype).transpose(0, 1)
    return float(error.double().square().sum())


def offers(
    statistics: ChannelStatistics, spec: QuantSpec, side: str, pool: Sequence[Candidate]
) -> Iterator[HeadTransform]:
    """Every transform that is tried on a head, simplest first; keys are offered each one with the key offset too.

    The offset is the mean of each channel after RoPE.  Subtracting one vector from all keys adds the same number to
    every score of a query, which softmax does not see: smoothing of keys as in SageAttention (arXiv 2410.02367), here
    with a mean that is learned beforehand, so that it is exact for any text.
    """
    for candidate in pool:
        transform = candidate.fit(statistics, spec)
        if transform is None:
            continue
        yield transform
        if side == "k":
            yield replace(transform, offset=statistics.mean.astype(np.float32))


def choose_head(
    x: Tensor, spec: QuantSpec, side: str, *, pool: Sequence[Candidate] | None = None, margin: float = MARGIN
) -> Choice:
    """The best storage of one side ("k" or "v") of one head, at the width and group that `spec` says.

    x: float32 [n_chunk, n, head_dim], keys after RoPE or values, without the sink tokens, finite.
    Identity stays unless another candidate's error is smaller by `margin`; so it wins ties, and wins where nothing is
    quantized and where the head is constant.  Raises KvError where no candidate fits float16.
    """
    statistics = ChannelStatistics.of(x)
    deviation = statistics.deviation
    best, error = HeadTransform(), round_trip_error(x, spec, HeadTransform())
    before = error
    if spec.quantized and deviation > 0:
        for transform in offers(statistics, spec, side, candidates() if pool is None else pool):
            tried = round_trip_error(x, spec, transform)
            if tried < (1.0 - margin) * error:
                best, error = transform, tried
    if not np.isfinite(error):
        raise KvError("a value exceeds 65504, the largest that an f16 cache can hold")
    if deviation == 0 or not spec.quantized:
        return Choice(HeadPlan(spec), 0.0, 0.0)
    # Where only the head as it comes overflows float16, its error is the whole deviation.
    return Choice(HeadPlan(spec, best), min(before, deviation) / deviation, error / deviation)
