"""No figure without a cache that was read.

A quantizing setting whose attention never read a quantized token gives the f16 figures under another name. It happens
easily: a window that covers the whole context, or a forward pass that attends to its own keys and values and never to
the cache. Each cache counts what its attention reads, the visibility rule says how much that has to be, and where the
two differ there is an error instead of a number.
"""

from __future__ import annotations

from functools import lru_cache

from kvrun.errors import MeasurementError
from kvrun.plan import CachePlan
from kvrun.visibility import packed_reads


def expected_packed_reads(plan: CachePlan, n_ctx: int) -> int:
    """Packed tokens that reading `n_ctx` tokens once must read, summed over queries and layers as caches count them.

    A layer counts its key side, or its value side where only the values are quantized.
    """
    total = 0
    for shape, heads_k, heads_v in zip(plan.geometry, plan.k, plan.v, strict=True):
        heads = heads_k if any(head.spec.quantized for head in heads_k) else heads_v
        if any(head.spec.quantized for head in heads):
            block = max(head.spec.block for head in heads)
            total += _packed_reads(n_ctx, plan.sinks, plan.window, block, shape.sliding)
    return total


@lru_cache(maxsize=64)
def _packed_reads(n_ctx: int, sinks: int, window: int, block: int, sliding: int) -> int:
    return packed_reads(0, n_ctx, sinks, window, block, sliding)


def check_cache_was_read(plan: CachePlan, n_ctx: int, n_windows: int, packed_read: int, tokens_read: int) -> None:
    """Raise MeasurementError, with the reason, where figures would not measure this plan's cache.

    packed_read, tokens_read: what the cache counted over `n_windows` windows of `n_ctx` tokens.
    """
    name = f"{plan.type_k}/{plan.type_v}"
    if tokens_read == 0:
        raise MeasurementError(
            f"refused: {name} was never read, the forward pass bypassed the cache, so every cache type would give the "
            "same figure; leave out --bypass-cache"
        )
    if not plan.quantizes:
        return
    expected = n_windows * expected_packed_reads(plan, n_ctx)
    if expected == 0:
        raise MeasurementError(
            f"refused: {name} quantizes nothing here, {plan.sinks} sinks and a window of {plan.window} cover the "
            f"context of {n_ctx}; use a longer context (-c) or a smaller --window"
        )
    if packed_read != expected:
        raise MeasurementError(
            f"refused: {name} read {packed_read} packed tokens where the visibility rule makes it {expected}; the "
            "figures would not be this cache's, please report this"
        )
