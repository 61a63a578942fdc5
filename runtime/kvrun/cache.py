"""The packed KV cache of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkernels.attend import Side, attend
from kvkernels.quantize import round_queries_ggml
from kvkernels.rope_offset import offset_scores, turned_offset
from kvkernels.store import PackedStore
from kvkernels.transform import apply, invert, transform_matrix

from .errors import KvError
from .plan import CachePlan, HeadPlan, HeadTransform
from .visibility import n_packed, packed_end

if TYPE_CHECKING:
    from .layers import Rope
    from .sliding import SlidingSide

#: Attention scores are computed for so many queries at a time that they stay below this (bytes): what the CPU's cache
#: holds. Short slices also leave out most of what a query's future would cost.
SCORE_BUDGET_BYTES = 2 << 20


@dataclass(frozen=True)
class Mark:
    """A point in a conversation that the cache can go back to exactly.

    The packed region is append-only and never rewritten below the mark, so only the full-precision part is copied; of
    layers with a sliding window, which drop packed tokens, that region too (`sliding`).
    """

    n_tokens: int
    recent: tuple[tuple[Tensor, Tensor], ...]
    sliding: tuple[tuple[SlidingSide, PackedStore], ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes that the mark holds beside the cache."""
        recent = sum(t.numel() * t.element_size() for pair in self.recent for t in pair)
        return recent + sum(store.n_bytes for _, store in self.sliding)


def _tensor(values: object, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(values).to(dtype)


def head_matrix(transform: HeadTransform, head_dim: int) -> Tensor | None:
    """`T` of one head, float64 [head_dim, head_dim], or None where it is the identity (an offset may remain)."""
    if transform.order is None and not transform.hadamard and transform.matrix is None:
        return None
    return transform_matrix(
        head_dim,
        order=None if transform.order is None else torch.from_numpy(transform.order.astype("int64")),
        hadamard=transform.hadamard,
        matrix=None if transform.matrix is None else torch.from_numpy(transform.matrix),
    )


class LayerSide:
    """Keys or values of one layer: transforms, packed store, sinks, and the tokens that are not packed yet.

    Everything lives in the transformed space: a token is transformed once, when it arrives, and stored as f16; what
    leaves the window is quantized from there.

    rope: of the layer's keys; only a rotating offset needs it.
    """

    def __init__(
        self,
        plans: Sequence[HeadPlan],
        head_dim: int,
        *,
        sinks: int,
        window: int,
        n_ctx: int,
        dtype: torch.dtype,
        rope: Rope | None = None,
    ) -> None:
        n_head = len(plans)
        self.sinks, self.window, self.dtype = sinks, window, dtype
        self.plans, self.head_dim = plans, head_dim
        block = max(plan.spec.block for plan in plans)
        self.store = self.new_store(self.capacity(n_ctx, block))
        self.sink_part = torch.empty(n_head, min(sinks, n_ctx), head_dim, dtype=torch.float16)
        n_recent = max(min(window + block - 1, n_ctx - sinks), 0)
        self.recent = torch.empty(n_head, n_recent, head_dim, dtype=torch.float16)
        self._pending: Tensor | None = None

        # Keys in llama.cpp's blocks are met by queries as llama.cpp has them, or its figures would not be matched.
        self.rounds_queries = all(plan.spec.emulates for plan in plans)
        matrices = [head_matrix(plan.transform, head_dim) for plan in plans]
        self.t: Tensor | None = None
        self.t_inverse: Tensor | None = None
        if any(m is not None for m in matrices):
            eye = torch.eye(head_dim, dtype=torch.float64)
            t = torch.stack([eye if m is None else m for m in matrices])
            self.t, self.t_inverse = t.to(dtype), torch.stack([invert(m) for m in t]).to(dtype)

        def offsets(rotating: bool) -> Tensor | None:
            chosen = [t.offset if t.rotating == rotating else None for t in (plan.transform for plan in plans)]
            if all(o is None for o in chosen):
                return None
            return torch.stack([torch.zeros(head_dim, dtype=dtype) if o is None else _tensor(o, dtype) for o in chosen])

        self.offset, self.rotating, self.rope = offsets(False), offsets(True), rope
        if self.rotating is not None and rope is None:
            raise ValueError("a cache with rotating offsets needs the model's RoPE")

    def capacity(self, n_ctx: int, block: int) -> int:
        """Packed tokens that are held at most."""
        return n_packed(n_ctx, self.sinks, self.window, block)

    def new_store(self, capacity: int) -> PackedStore:
        """An empty store for these heads."""
        plans = self.plans
        return PackedStore([plan.spec for plan in plans], [plan.clip for plan in plans], capacity, self.head_dim)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated: codes, scales, minima, sinks and window."""
        return self.store.n_bytes + 2 * (self.sink_part.numel() + self.recent.numel())

    def packed_end(self, n: int) -> int:
        """Position after the packed region with `n` tokens present."""
        return packed_end(n, self.sinks, self.window, self.store.block)

    def n_recent(self, n: int) -> int:
        """Tokens held in `recent` with `n` tokens present."""
        return max(n - self.packed_end(n), 0)

    def to_queries(self, q: Tensor) -> Tensor:
        """`T^-T q` for q [n_head, n, d], query heads grouped by KV head: what meets stored keys."""
        if self.t_inverse is not None:
            n_kv, d = self.t_inverse.shape[0], q.shape[-1]
            q = (q.reshape(n_kv, -1, d) @ self.t_inverse).view(q.shape)
        return round_queries_ggml(q) if self.rounds_queries else q

    def offset_scores(self, q: Tensor, n: int, *, capped: bool = False) -> Tensor | None:
        """What the scores of q [n_head, n_q, d] (as the model made it) with positions 0 to n - 1 lack, or None.

        capped: also what all tokens lack alike: softmax does not see it, but a soft cap on scores does.
        """
        scores = None
        if self.rotating is not None and self.rope is not None:
            scores = offset_scores(q, self.rotating, self.rope.angles(n, q.dtype), self.rope.style)
        alike = self._offset_alike() if capped else None
        if alike is None:
            return scores
        same = (q.reshape(len(alike), -1, q.shape[-1]) @ alike[:, :, None]).view(*q.shape[:2], 1)
        return same.expand(-1, -1, n) if scores is None else scores + same

    def _offset_alike(self) -> Tensor | None:
        """What is subtracted from all keys of a head alike, [n_head_kv, d]: offsets that no RoPE turns."""
        if self.rotating is None or self.rope is None or self.rope.n_rot == self.head_dim:
            return self.offset
        rest = self.rotating.clone()
        rest[:, : self.rope.n_rot] = 0
        return rest if self.offset is None else self.offset + rest

    def from_sum(self, o: Tensor) -> Tensor:
        """`T^-1 o` for o [n_head, n, d], an attention sum over stored values."""
        if self.t_inverse is None:
            return o
        n_kv, d = self.t_inverse.shape[0], o.shape[-1]
        return (o.reshape(n_kv, -1, d) @ self.t_inverse.transpose(1, 2)).view(o.shape)

    def append(self, x: Tensor, n_before: int) -> tuple[Tensor, int]:
        """Store new tokens x [n_head, n, d]; what they push out of the window is packed.

        Returns all tokens that some query of this chunk may see in full precision, float16 [n_head, m, d], and the
        position of the first of them after the sinks. Nothing that was there before changes until `commit`.
        """
        n_after = n_before + x.shape[1]
        if self.rotating is not None and self.rope is not None:
            x = x - turned_offset(self.rotating, self.rope.angles(n_after, x.dtype)[n_before:], self.rope.style)
        new = apply(x, self.t, self.offset).to(torch.float16)
        if not bool(torch.isfinite(new).all()):
            raise KvError("a key or value does not fit f16 or is not a number; the model or its recipe is damaged")
        n_sink = min(max(self.sinks - n_before, 0), new.shape[1])
        self.sink_part[:, n_before : n_before + n_sink] = new[:, :n_sink]
        recent = torch.cat([self.recent[:, : self.n_recent(n_before)], new[:, n_sink:]], 1)
        start, stop = self.packed_end(n_before), self.packed_end(n_after)
        self.pack(recent[:, : stop - start], n_before)
        self._pending = recent[:, stop - start :]
        sinks = self.sink_part[:, : min(self.sinks, n_after)]
        return torch.cat([sinks, recent], 1), start

    def pack(self, x: Tensor, n_before: int) -> None:
        """Quantize x, float16 [n_head, n, d], behind what was packed with `n_before` tokens present."""
        if x.shape[1]:
            self.store.write(self.packed_end(n_before) - self.sinks, x)

    def commit(self) -> None:
        """Make the last `append` final."""
        if self._pending is not None:
            self.recent[:, : self._pending.shape[1]] = self._pending
            self._pending = None

    def restore(self, last: int) -> Tensor | None:
        """The packed tokens that the query at position `last` sees, restored; None where it sees none."""
        n = self.packed_end(last + 1) - self.sinks
        return self.store.read(n, self.dtype) if n > 0 else None

    def origin(self, first: int) -> int:
        """A position before which the queries from position `first` on see nothing."""
        return 0

    def seen(
        self, full: Tensor, full_start: int, first: int, last: int, restored: Tensor | None = None, origin: int = 0
    ) -> Side:
        """What the queries at positions `first .. last` see, from what `append` (and `restore`) returned.

        origin: positions are counted from there; 0 unless a layer slides.
        """
        ends = torch.tensor([self.packed_end(t + 1) for t in range(first, last + 1)])
        n_sink = min(self.sinks, full.shape[1])
        lo = max(int(ends[0]), full_start)  # everything before is packed for all of these queries
        hi = max(last + 1, lo)
        part = full[:, n_sink + lo - full_start : n_sink + hi - full_start]
        if n_sink:
            sink_stop = min(n_sink, last + 1)
            part = torch.cat([full[:, :sink_stop], part], 1)
            positions = torch.cat([torch.arange(sink_stop), torch.arange(lo, hi)])
        else:
            positions = torch.arange(lo, hi)
        return Side(self.store, self.sinks, ends, part, positions, restored)


class KVCache:
    """A packed cache for `n_ctx` tokens, allocated in one piece and filled chunk by chunk.

    plan: `CachePlan`.  dtype: of the computation (what is stored does not depend on it).
    rope_of: the RoPE of a layer's keys (`Model.rope_of`); needed where the plan rotates.
    """

    def __init__(
        self,
        plan: CachePlan,
        n_ctx: int,
        dtype: torch.dtype = torch.float32,
        *,
        rope_of: Callable[[int], Rope] | None = None,
    ) -> None:
        if n_ctx < 1:
            raise KvError(f"the context must hold at least one token, not {n_ctx}; give a larger -c")
        self.plan, self.n_ctx, self.dtype = plan, n_ctx, dtype
        self.n_tokens = 0
        #: Packed tokens that queries have read so far, summed over queries and layers.
        self.packed_read = 0
        #: Tokens of any kind that queries have read so far, summed over queries and layers.
        self.tokens_read = 0
        from .sliding import SlidingSide  # which is made of `LayerSide`

        shared: dict[str, Any] = {"sinks": plan.sinks, "window": plan.window, "n_ctx": n_ctx, "dtype": dtype}

        def side(plans: Sequence[HeadPlan], head_dim: int, sliding: int, rope: Rope | None = None) -> LayerSide:
            if sliding:
                return SlidingSide(plans, head_dim, sliding=sliding, rope=rope, **shared)
            return LayerSide(plans, head_dim, rope=rope, **shared)

        self.layers: list[tuple[LayerSide, LayerSide]] = []
        for il, (shape, k, v) in enumerate(zip(plan.geometry, plan.k, plan.v, strict=True)):
            keys = side(k, shape.head_dim_k, shape.sliding, None if rope_of is None else rope_of(il))
            self.layers.append((keys, side(v, shape.head_dim_v, shape.sliding)))

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for keys and values: codes, scales, minima, sinks and window."""
        return sum(k.n_bytes + v.n_bytes for k, v in self.layers)

    @property
    def n_values(self) -> int:
        """Key and value channels of the tokens that a query sees at the full context, in all layers."""
        return sum(
            min(self.n_ctx, g.sliding or self.n_ctx) * g.n_head_kv * (g.head_dim_k + g.head_dim_v)
            for g in self.plan.geometry
        )

    @property
    def bits_per_value(self) -> float:
        """Allocated bits per key or value channel at the full context, everything counted."""
        return self.n_bytes * 8 / self.n_values

    def attend(self, il: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> Tensor:
        """Append the chunk's keys and values to layer `il` and attend over the cache.

        q: [n_head, n, d_k].  k: [n_head_kv, n, d_k].  v: [n_head_kv, n, d_v].  All after RoPE; positions follow
        `n_tokens`.  softcap: of the scores, see `kvkernels.attend`.  Returns [n_head, n, d_v].  The tokens count as
        present only after `commit`.
        """
        sliding = self.plan.geometry[il].sliding
        keys, values = self.layers[il]
        n_before, n = self.n_tokens, q.shape[1]
        if n_before + n > self.n_ctx:
            raise KvError(f"the context of {self.n_ctx} tokens is full; give a larger -c")
        full_k, start_k = keys.append(k, n_before)
        full_v, start_v = values.append(v, n_before)
        given, q = q, keys.to_queries(q)
        row_bytes = q.shape[0] * (min(n_before, sliding or n_before) + n) * q.element_size()
        step = max(1, SCORE_BUDGET_BYTES // row_bytes)
        restored_k, restored_v = keys.restore(n_before + n - 1), values.restore(n_before + n - 1)
        parts = []
        for first in range(n_before, n_before + n, step):
            last = min(first + step, n_before + n) - 1
            origin = min(keys.origin(first), values.origin(first))
            side_k = keys.seen(full_k, start_k, first, last, restored_k, origin)
            side_v = values.seen(full_v, start_v, first, last, restored_v, origin)
            positions = torch.arange(first, last + 1)
            rows = slice(first - n_before, last + 1 - n_before)
            bias = keys.offset_scores(given[:, rows], last + 1, capped=bool(softcap))
            bias = None if bias is None else bias[..., origin:]
            parts.append(attend(q[:, rows], side_k, side_v, positions - origin, scale, bias, softcap=softcap))
            counted = side_k if keys.store.quantized or not values.store.quantized else side_v
            if counted.store.quantized:
                self.packed_read += counted.packed_reads()
            self.tokens_read += int((positions + 1).clamp(max=sliding or n_before + n).sum())
        return values.from_sum(parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    def commit(self, n: int) -> None:
        """Make the `n` tokens that every layer has appended since the last commit final."""
        for k, v in self.layers:
            k.commit()
            v.commit()
        self.n_tokens += n

    def clear(self) -> None:
        """Forget all tokens; counters go on."""
        self.n_tokens = 0

    def mark(self) -> Mark:
        """Remember this point, to come back with `rewind`."""
        n = self.n_tokens
        recent = tuple(
            (k.recent[:, : k.n_recent(n)].clone(), v.recent[:, : v.n_recent(n)].clone()) for k, v in self.layers
        )
        from .sliding import SlidingSide

        sides = [side for layer in self.layers for side in layer if isinstance(side, SlidingSide)]
        return Mark(n, recent, tuple((side, side.packed_copy(n)) for side in sides))

    def rewind(self, mark: Mark) -> None:
        """Go back to an earlier mark of this cache, exactly as it was then.

        Raises ValueError where the mark is later than the present: what it points to may have been overwritten.
        """
        if mark.n_tokens > self.n_tokens:
            raise ValueError("a mark that lies ahead of the cache cannot be gone back to")
        for (k, v), (recent_k, recent_v) in zip(self.layers, mark.recent, strict=True):
            k.recent[:, : recent_k.shape[1]] = recent_k
            v.recent[:, : recent_v.shape[1]] = recent_v
        for side, store in mark.sliding:
            side.put_back(store)
        self.n_tokens = mark.n_tokens
