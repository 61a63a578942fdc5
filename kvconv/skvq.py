"""SKVQ's way to order channels (arXiv 2405.06219), per head: clusters of calibrated ranges, and one clip for all.

What `kvrun`'s presets `skvq` and `skvq-safe` run. The departures from the paper stand in `kvrun/presets/skvq.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvkernels.quantize import dequantize, quantize
from kvkernels.spec import QuantSpec
from kvrun.errors import KvError
from kvrun.plan import HeadPlan, HeadTransform
from kvrun.recipe import Provenance, Recipe

from . import __version__
from .collect import ChannelStatistics
from .stream import stream

if TYPE_CHECKING:
    from kvrun.models import Model

    from .calibrate import Sample

#: Settings of the paper's long-context runs: bits, values of a group, clip, and tokens in full precision.
BITS, GROUP, CLIP, SINKS, WINDOW = 2, 128, 0.96, 5, 128
#: With `safe`, an order must lower the squared round-trip error by this share.
MARGIN = 0.02
_ROUNDS = 20


@dataclass(frozen=True)
class SkvqHead:
    """What one head got. before, after: squared round-trip error over squared deviation, as it comes and as chosen."""

    plan: HeadPlan
    before: float
    after: float


def cluster_order(statistics: ChannelStatistics, size: int) -> np.ndarray:
    """Permutation uint16 [head_dim] in which every `size` neighbours are channels of similar minimum and maximum.

    k-means on (minimum, maximum) with clusters of equal size: channels take the nearest center that has room, those
    first for which the second best is farthest off. It starts from the channels sorted by range and keeps what has
    the smallest sum of squared distances, so it is deterministic. `size` divides the head size.
    """
    points = np.stack([statistics.low, statistics.high], 1).astype(np.float64)
    n_clusters = len(points) // size
    best = np.argsort(statistics.range, kind="stable")
    labels = np.empty(len(points), np.int64)
    labels[best] = np.arange(len(points)) // size
    best_cost = np.inf
    for _ in range(_ROUNDS):
        centers = np.stack([points[labels == c].mean(0) for c in range(n_clusters)])
        distance = ((points[:, None, :] - centers[None, :, :]) ** 2).sum(-1)
        cost = float(distance[np.arange(len(points)), labels].sum())
        if cost >= best_cost:
            break
        best, best_cost = np.argsort(labels, kind="stable"), cost
        labels = _assign(distance, size)
    return best.astype(np.uint16)


def _assign(distance: np.ndarray, size: int) -> np.ndarray:
    """Cluster of every point, `size` points to each. distance: [n_points, n_clusters]."""
    nearest = np.sort(distance, 1)
    urgency = nearest[:, 1] - nearest[:, 0] if distance.shape[1] > 1 else nearest[:, 0]
    room = np.full(distance.shape[1], size)
    labels = np.empty(len(distance), np.int64)
    for point in np.argsort(-urgency, kind="stable"):
        labels[point] = np.where(room > 0, distance[point], np.inf).argmin()
        room[labels[point]] -= 1
    return labels


def fit_head(x: Tensor, bits: int, group: int, *, safe: bool) -> SkvqHead:
    """Order and clip of one head; with `safe`, the order only where it lowers the round-trip error by `MARGIN`.

    x: float32 [n_chunk, n, head_dim], without the sink tokens.  group: in channels; the whole head where it does not
    divide the head size, and then there is nothing to order.  Raises KvError where a value is not a number or exceeds
    float16.
    """
    head_dim = x.shape[-1]
    spec = QuantSpec(bits, group if head_dim % group == 0 else head_dim)
    spec.check_head_dim(head_dim)
    stored = x.to(torch.float16)
    if not bool(torch.isfinite(stored).all()):
        raise KvError("a value is not a number or exceeds 65504, the largest that an f16 cache can hold")
    statistics = ChannelStatistics.of(x)
    deviation = statistics.deviation
    if deviation == 0:
        return SkvqHead(HeadPlan(spec, clip=CLIP), 0.0, 0.0)
    before = after = _round_trip_error(stored, spec)
    transform = HeadTransform()
    if spec.group < head_dim:
        order = cluster_order(statistics, spec.group)
        error = _round_trip_error(stored[..., torch.from_numpy(order.astype(np.int64))], spec)
        if not safe or error < (1.0 - MARGIN) * before:
            transform, after = HeadTransform(order=order), error
    return SkvqHead(HeadPlan(spec, transform, CLIP), before / deviation, after / deviation)


def _round_trip_error(stored: Tensor, spec: QuantSpec) -> float:
    """Sum of squared errors of quantizing and restoring float16 [n_chunk, n, head_dim] at the clip."""
    parts = quantize(stored, spec, torch.full((len(stored),), CLIP))
    return float((dequantize(*parts, spec, torch.float32) - stored.float()).double().square().sum())


def calibrate_skvq(
    model: Model,
    sample: Sample,
    *,
    safe: bool,
    bits: int = BITS,
    group: int = GROUP,
    on_progress: Callable[[int], None] | None = None,
) -> Recipe:
    """The recipe that presets `skvq` and `skvq-safe` run: every head ordered by its clusters of calibrated ranges.

    One pass over the sample in full precision; the first `SINKS` tokens of each chunk are left out of the ranges.
    on_progress: called with the number of layers done.  Raises KvError naming layer and head.
    """
    sides: dict[str, list[list[SkvqHead]]] = {"k": [], "v": []}
    with torch.inference_mode():
        for il, record in enumerate(stream(model, torch.from_numpy(sample.tokens), torch.from_numpy(sample.positions))):
            for side, values in (("k", record.keys), ("v", record.values)):
                heads = []
                for ih, head in enumerate(values[:, :, SINKS:]):
                    try:
                        heads.append(fit_head(head, bits, group, safe=safe))
                    except (KvError, ValueError) as error:
                        what = "keys" if side == "k" else "values"
                        raise KvError(f"{what} of layer {il}, KV head {ih}: {error}") from error
                sides[side].append(heads)
            if on_progress is not None:
                on_progress(il + 1)
    n_chunks, chunk_tokens = sample.tokens.shape
    k, v = sides["k"], sides["v"]
    made = Provenance(
        tool_version=f"kvconv {__version__}",
        text_name=sample.text.name,
        text_sha256=sample.text.sha256,
        n_chunks=n_chunks,
        chunk_tokens=chunk_tokens,
        n_ctx=sample.n_ctx,
        seed=0,
        objective="skvq-safe" if safe else "skvq",
        k_before=tuple(tuple(head.before for head in layer) for layer in k),
        k_after=tuple(tuple(head.after for head in layer) for layer in k),
        v_before=tuple(tuple(head.before for head in layer) for layer in v),
        v_after=tuple(tuple(head.after for head in layer) for layer in v),
    )
    return Recipe(
        fingerprint=model.file.fingerprint(),
        arch=model.file.arch,
        geometry=model.config.geometry,
        k=tuple(tuple(head.plan for head in layer) for layer in k),
        v=tuple(tuple(head.plan for head in layer) for layer in v),
        sinks=SINKS,
        window=WINDOW,
        provenance=made,
    )
