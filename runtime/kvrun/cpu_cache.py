"""The packed KV cache of a whole model, in the layout and under the kernels of the CPU engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkernels.attend.cpu import LayerShape, PagedLayer, PagedSide, Turn, Workspace
from kvkernels.attend.cpu_offset import RotatingOffset
from kvkernels.pack.cpu import PAGE
from kvkernels.rope_offset import turned_offset

from .cache import KVCache, LayerSide
from .errors import KvError
from .plan import CachePlan, HeadPlan
from .visibility import n_packed

if TYPE_CHECKING:
    from .layers import Rope


def _specs(plans: Sequence[HeadPlan]) -> tuple[list, list]:
    return [plan.spec for plan in plans], [plan.clip for plan in plans]


class SideMaps:
    """The linear maps of one side of one layer: `t`, its inverse and the offsets of `kvrun.cache.LayerSide`."""

    def __init__(self, plans: Sequence[HeadPlan], head_dim: int, rope: Rope | None = None) -> None:
        # A side that holds one token costs nothing and owns the same matrices.
        side = LayerSide(plans, head_dim, sinks=1, window=0, n_ctx=1, dtype=torch.float32, rope=rope)
        self.t, self.t_inverse, self.offset, self.rotating = side.t, side.t_inverse, side.offset, side.rotating
        self.to_queries, self.from_sum, self.rope = side.to_queries, side.from_sum, rope

    def to_stored(self, x: Tensor, first: int) -> Tensor:
        """`T (x - offset)` for x [n_head, n, d], the tokens from position `first` on."""
        if self.rotating is not None and self.rope is not None:
            angles = self.rope.angles(first + x.shape[1], x.dtype)[first:]
            x = x - turned_offset(self.rotating, angles, self.rope.style)
        if self.offset is not None:
            x = x - self.offset[:, None, :]
        return x if self.t is None else x @ self.t.transpose(-1, -2)

    def rotating_offset(self, n_ctx: int) -> RotatingOffset | None:
        """What the compiled attention needs to know of a rotating offset, for `n_ctx` positions."""
        if self.rotating is None or self.rope is None:
            return None
        rope = self.rope
        return RotatingOffset(self.rotating, rope.angles(n_ctx, torch.float32), rope.fine_angles(PAGE), rope.style)


class CpuKVCache(KVCache):
    """A packed cache for `n_ctx` tokens, read by compiled kernels. What it computes is what `KVCache` computes.

    n_head: query heads per layer.  scales: what scores are multiplied by, per layer.  work: threads and working memory,
    which several caches may share as long as they are not used at the same time.  rope_of: as `KVCache`.
    """

    def __init__(
        self,
        plan: CachePlan,
        n_ctx: int,
        *,
        n_head: Sequence[int],
        scales: Sequence[float],
        work: Workspace,
        rope_of: Callable[[int], Rope] | None = None,
    ) -> None:
        if n_ctx < 1:
            raise KvError(f"the context must hold at least one token, not {n_ctx}; give a larger -c")
        self.plan, self.n_ctx, self.dtype, self.work = plan, n_ctx, torch.float32, work
        self.n_tokens = self.packed_read = self.tokens_read = 0
        self.turn = Turn()
        self.paged: list[PagedLayer] = []
        self.maps: list[tuple[SideMaps, SideMaps]] = []
        for il, (shape, k, v) in enumerate(zip(plan.geometry, plan.k, plan.v, strict=True)):
            keys = SideMaps(k, shape.head_dim_k, None if rope_of is None else rope_of(il))
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
                    offset=keys.rotating_offset(n_ctx),
                )
            )
            self.maps.append((keys, SideMaps(v, shape.head_dim_v)))
        self.layers = [(layer.k, layer.v) for layer in self.paged]  # type: ignore[misc]
        #: Layers by the block of the side whose packed tokens are counted.
        self._counted = Counter(side.block for side in map(_counted_side, self.paged) if side is not None)

    def attend(self, il: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
        """As `KVCache.attend`; `scale` is the layer's, known since the cache was made, and there is no soft cap."""
        n_before, n = self.n_tokens, q.shape[1]
        self.check_room(n)
        keys, values = self.maps[il]
        self.work.begin(n_before, n, self.turn)
        stored_k, stored_v = keys.to_stored(k, n_before), values.to_stored(v, n_before)
        out = self.paged[il](keys.to_queries(q), stored_k, stored_v, None if keys.rotating is None else q)
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
