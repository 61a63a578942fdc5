"""The packed KV cache of a whole model, in the layout and under the kernels of the CPU engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkernels.attend.cpu import LayerShape, PagedLayer, PagedSide, Turn, Workspace

from .cache import KVCache, LayerSide
from .errors import KvError
from .plan import CachePlan, HeadPlan
from .visibility import n_packed


def _specs(plans: Sequence[HeadPlan]) -> tuple[list, list]:
    return [plan.spec for plan in plans], [plan.clip for plan in plans]


class SideMaps:
    """The linear maps of one side of one layer: `t`, its inverse and the offset of `kvrun.cache.LayerSide`."""

    def __init__(self, plans: Sequence[HeadPlan], head_dim: int) -> None:
        # A side that holds one token costs nothing and owns the same matrices.
        side = LayerSide(plans, head_dim, sinks=1, window=0, n_ctx=1, dtype=torch.float32)
        self.t, self.t_inverse, self.offset = side.t, side.t_inverse, side.offset
        self.to_queries, self.from_sum = side.to_queries, side.from_sum

    def to_stored(self, x: Tensor) -> Tensor:
        """`T (x - offset)` for x [n_head, n, d]."""
        if self.offset is not None:
            x = x - self.offset[:, None, :]
        return x if self.t is None else x @ self.t.transpose(-1, -2)


class CpuKVCache(KVCache):
    """A packed cache for `n_ctx` tokens, read by compiled kernels. What it computes is what `KVCache` computes.

    n_head: query heads per layer.  scales: what scores are multiplied by, per layer.  work: threads and working memory,
    which several caches may share as long as they are not used at the same time.
    """

    def __init__(
        self, plan: CachePlan, n_ctx: int, *, n_head: Sequence[int], scales: Sequence[float], work: Workspace
    ) -> None:
        if n_ctx < 1:
            raise KvError(f"the context must hold at least one token, not {n_ctx}; give a larger -c")
        self.plan, self.n_ctx, self.dtype, self.work = plan, n_ctx, torch.float32, work
        self.n_tokens = self.packed_read = self.tokens_read = 0
        self.turn = Turn()
        self.paged: list[PagedLayer] = []
        self.maps: list[tuple[SideMaps, SideMaps]] = []
        for il, (shape, k, v) in enumerate(zip(plan.geometry, plan.k, plan.v, strict=True)):
            self.paged.append(
                PagedLayer(
                    LayerShape(n_head[il], shape.n_head_kv, shape.head_dim_k, shape.head_dim_v),
                    _specs(k),
                    _specs(v),
                    sinks=plan.sinks,
                    window=plan.window,
                    n_ctx=n_ctx,
                    scale=scales[il],
                    work=work,
                    turn=self.turn,
                )
            )
            self.maps.append((SideMaps(k, shape.head_dim_k), SideMaps(v, shape.head_dim_v)))
        self.layers = [(layer.k, layer.v) for layer in self.paged]  # type: ignore[misc]
        #: Layers by the block of the side whose packed tokens are counted.
        self._counted = Counter(side.block for side in map(_counted_side, self.paged) if side is not None)

    def attend(self, il: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As `KVCache.attend`; `scale` is the layer's, known since the cache was made."""
        n_before, n = self.n_tokens, q.shape[1]
        self.check_room(n)
        keys, values = self.maps[il]
        self.work.begin(n_before, n, self.turn)
        out = self.paged[il](keys.to_queries(q), keys.to_stored(k), values.to_stored(v))
        self.check_numbers()
        side = _counted_side(self.paged[il])
        self._count(n, [] if side is None else [(side.block, 1)], 1)
        return values.from_sum(out)

    def check_room(self, n: int) -> None:
        """Raise KvError where `n` more tokens do not fit."""
        if self.n_tokens + n > self.n_ctx:
            raise KvError(f"the context of {self.n_ctx} tokens is full; give a larger -c")

    def check_numbers(self) -> None:
        """Raise KvError where the last step met a key or value that cannot be stored."""
        if self.work.bad:
            raise KvError("a key or value does not fit f16 or is not a number; the model or its recipe is damaged")

    def count_reads(self, n: int) -> None:
        """Count what the queries of a step of `n` tokens read in all layers, before its commit."""
        self._count(n, list(self._counted.items()), len(self.paged))

    def _count(self, n: int, blocks: Sequence[tuple[int, int]], n_layer: int) -> None:
        first = self.n_tokens + 1
        for block, layers in blocks:
            reads = (n_packed(t, self.plan.sinks, self.plan.window, block) for t in range(first, first + n))
            self.packed_read += layers * sum(reads)
        self.tokens_read += n_layer * (n * first + n * (n - 1) // 2)

    def commit(self, n: int) -> None:
        """Make the `n` tokens that every layer has appended since the last commit final."""
        self.turn.change()
        self.n_tokens += n


def _counted_side(layer: PagedLayer) -> PagedSide | None:
    """The side whose packed tokens count: keys, or values where only they are quantized."""
    side = layer.k if layer.k.store.quantized or not layer.v.store.quantized else layer.v
    return side if side.store.quantized else None
