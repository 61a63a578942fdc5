"""Layers with a sliding window: packed by the same rule as all others, and what no query sees any more is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkernels.attend import Side
from kvkernels.store import PackedStore

from .cache import LayerSide
from .plan import HeadPlan
from .visibility import dropped_end, first_seen, n_packed

if TYPE_CHECKING:
    from .layers import Rope


class SlidingSide(LayerSide):
    """Keys or values of a layer whose queries see the latest `sliding` tokens, themselves among them.

    The store holds the packed tokens from `kept_from(n)` on, so what it holds follows from `n` alone and not from how
    the tokens came in. A chunk works on a store of its own, as large as the chunk needs, and `commit` takes over what
    is left of it: until then nothing changes.
    """

    def __init__(
        self,
        plans: Sequence[HeadPlan],
        head_dim: int,
        *,
        sliding: int,
        sinks: int,
        window: int,
        n_ctx: int,
        dtype: torch.dtype,
        rope: Rope | None = None,
    ) -> None:
        self.sliding = sliding
        # What lies before the sliding window is never seen, so it need not be in full precision either.
        window = min(window, sliding)
        super().__init__(plans, head_dim, sinks=sinks, window=window, n_ctx=n_ctx, dtype=dtype, rope=rope)
        self._work = self.store
        self._n_before = self._n_after = 0

    def capacity(self, n_ctx: int, block: int) -> int:
        """The sliding window less what is in full precision, rounded up to blocks."""
        most = block * -(-max(self.sliding - 1 - self.window, 0) // block)
        return min(n_packed(n_ctx, self.sinks, self.window, block), most)

    def kept_from(self, n: int) -> int:
        """Position of the first packed token that is held with `n` tokens present."""
        return dropped_end(n, self.sinks, self.window, self.store.block, self.sliding)

    def append(self, x: Tensor, n_before: int) -> tuple[Tensor, int]:
        self._n_before, self._n_after = n_before, n_before + x.shape[1]
        return super().append(x, n_before)

    def pack(self, x: Tensor, n_before: int) -> None:
        begin, end = self.kept_from(n_before), self.packed_end(n_before)
        self._work = self.new_store(end - begin + x.shape[1])
        self._work.copy(self.store, 0, end - begin, 0)
        if x.shape[1]:
            self._work.write(end - begin, x)

    def commit(self) -> None:
        if self._pending is not None:
            first, begin, end = (*map(self.kept_from, (self._n_before, self._n_after)), self.packed_end(self._n_after))
            self.store.copy(self._work, begin - first, end - first, 0)
            self._work = self.store
        super().commit()

    def restore(self, last: int) -> Tensor | None:
        n = self.packed_end(last + 1) - self.kept_from(self._n_before)
        return self._work.read(n, self.dtype) if n > 0 else None

    def origin(self, first: int) -> int:
        return 0 if first_seen(first + 1, self.sliding) < self.sinks else self.kept_from(first)

    def seen(
        self, full: Tensor, full_start: int, first: int, last: int, restored: Tensor | None = None, origin: int = 0
    ) -> Side:
        side = super().seen(full, full_start, first, last, restored)
        begin = self.kept_from(first)
        kept = side.full_positions >= first_seen(first + 1, self.sliding)
        return replace(
            side,
            start=begin - origin,
            packed_end=side.packed_end - origin,
            full=side.full[:, kept],
            full_positions=side.full_positions[kept] - origin,
            restored=None if restored is None else restored[:, begin - self.kept_from(self._n_before) :],
            first=torch.tensor([first_seen(t + 1, self.sliding) for t in range(first, last + 1)]) - origin,
        )

    def packed_copy(self, n: int) -> PackedStore:
        """What the store holds with `n` tokens present."""
        size = self.packed_end(n) - self.kept_from(n)
        copy = self.new_store(size)
        copy.copy(self.store, 0, size, 0)
        return copy

    def put_back(self, store: PackedStore) -> None:
        """Hold again what `packed_copy` gave."""
        self.store.copy(store, 0, store.capacity, 0)
