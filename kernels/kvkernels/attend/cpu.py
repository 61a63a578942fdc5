"""Attention over a packed cache on the CPU: what the compiled steps of `cpu_ops` work on, in Python's hands.

A `Workspace` is what all layers of a model share while a step runs; a `PagedLayer` is one layer's cache. The three
steps may be run by ggml's threads (`kvrun.cpu_engine`) or by those of `Workspace.run`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ..jit import Function
from ..paged_store import PagedStore, aligned_zeros
from ..quantize.cpu import SideName
from ..spec import QuantSpec
from .cpu_call import CALL, HEAD, STEP
from .cpu_core import core_function
from .cpu_offset import RotatingOffset
from .cpu_ops import append_op, attend_op, work_layout
from .cpu_split import combine_op, max_parts
from .cpu_tiles import load_function

_OP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
#: Query rows of a unit: enough to make up for restoring a tile, few enough to stay in the second-level cache.
ROWS_PER_UNIT = 128
#: Query rows that share the registers of one pass.
MAX_BLOCK_ROWS = 8


@dataclass(frozen=True)
class LayerShape:
    """Query heads, KV heads and channels of one layer's attention."""

    n_head: int
    n_kv: int
    d_k: int
    d_v: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_kv

    @property
    def block_rows(self) -> int:
        """Query rows that the core takes at a time: whole groups where they are small, equal parts where not."""
        if self.group <= MAX_BLOCK_ROWS:
            return self.group * (MAX_BLOCK_ROWS // self.group) if self.group < 4 else self.group
        return -(-self.group // -(-self.group // MAX_BLOCK_ROWS))

    @property
    def chunk(self) -> int:
        """Queries of a unit."""
        return max(1, ROWS_PER_UNIT // self.group)

    @property
    def max_rows(self) -> int:
        """Query rows of a unit, filled up to whole blocks."""
        return -(-self.chunk * self.group // self.block_rows) * self.block_rows


class Turn:
    """Which of two buffers holds the tokens that were not packed after the last finished step; see `PagedSide`."""

    def __init__(self) -> None:
        self.value = 0

    def change(self) -> None:
        """The present step is finished: what it left in the other buffer counts."""
        self.value ^= 1


class PagedSide:
    """Keys or values of one layer: pages, sinks, and the tokens that are not packed yet, all after the transform.

    recent: float16 [n_head, window + block - 1, d], what is not packed yet. There are two of them, which change
    places when a step is finished: until then a step can be given up and run again.
    tail: memory that is shared between layers, see `tail_bytes`.
    """

    def __init__(
        self,
        side: SideName,
        specs: Sequence[QuantSpec],
        clips: Sequence[float],
        d: int,
        *,
        sinks: int,
        window: int,
        n_ctx: int,
        max_chunk: int,
        tail: np.ndarray,
        turn: Turn,
    ) -> None:
        n_head = len(specs)
        self.block = max(spec.block for spec in specs)
        self.sinks, self.window, self.d, self.turn = sinks, window, d, turn
        n_packed = self.block * (max(n_ctx - sinks - window, 0) // self.block)
        self.store = PagedStore(side, specs, clips, n_packed, d)
        n_recent = self.recent_limit(self.block, sinks, window, n_ctx)
        self.sink_part = _halves(n_head, min(sinks, n_ctx), d)
        self._recents = _halves(n_head, n_recent, d), _halves(n_head, n_recent, d)
        rows = n_recent + max_chunk
        self.heads = np.zeros((n_head, len(HEAD)), np.int64)
        for i, (row, head) in enumerate(zip(self.heads, self.store.heads, strict=True)):
            set_fields(
                row,
                HEAD,
                **dict(zip(("codes", "scale", "minimum"), head.pointers, strict=True)),
                unpack=head.unpack.address,
                pack=head.pack.address,
                clip=float_bits(head.clip),
                sinks=self.sink_part[i].data_ptr(),
                recent_0=self._recents[0][i].data_ptr(),
                recent_1=self._recents[1][i].data_ptr(),
                tail=tail.ctypes.data + i * rows * d * 2,
            )

    @staticmethod
    def recent_limit(block: int, sinks: int, window: int, n_ctx: int) -> int:
        """The most tokens that are ever neither packed nor sinks: no more than the context has, whatever the window."""
        return max(min(window + block - 1, n_ctx - sinks), 0)

    @staticmethod
    def tail_bytes(n_head: int, d: int, n_recent: int, max_chunk: int) -> int:
        """Bytes of `tail` for steps of at most `max_chunk` tokens."""
        return n_head * (n_recent + max_chunk) * d * 2

    @property
    def recent(self) -> torch.Tensor:
        """What was not packed after the last finished step."""
        return self._recents[self.turn.value]

    @property
    def n_bytes(self) -> int:
        """Bytes allocated: codes, scales, minima in whole pages, sinks, and both copies of the window."""
        return self.store.n_bytes + 2 * (self.sink_part.numel() + sum(part.numel() for part in self._recents))

    def packed_end(self, n: int) -> int:
        """Position after the packed region with `n` tokens present."""
        return self.sinks + self.block * (max(n - self.sinks - self.window, 0) // self.block)

    def n_recent(self, n: int) -> int:
        """Tokens held in `recent` with `n` tokens present."""
        return max(n - self.packed_end(n), 0)


class Workspace:
    """Memory and threads that the layers of one model share.

    n_threads: that will run a step.  max_chunk: tokens of a step at most.
    """

    def __init__(self, n_threads: int, max_chunk: int) -> None:
        if n_threads < 1 or max_chunk < 1:
            raise ValueError("a workspace needs at least one thread and one token")
        self.n_threads, self.max_chunk = n_threads, max_chunk
        self.step = np.zeros(len(STEP), np.int64)
        self.counter = aligned_zeros(64)
        self._shared: dict[str, list[np.ndarray]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def shared(self, name: str, n_bytes: int) -> np.ndarray:
        """Memory of at least so many bytes that layers use one after another; what was handed out stays where it is."""
        have = self._shared.setdefault(name, [])
        if not have or have[-1].nbytes < n_bytes:
            have.append(aligned_zeros(n_bytes))
        return have[-1]

    @property
    def n_bytes(self) -> int:
        """Working memory in bytes."""
        return sum(part.nbytes for parts in self._shared.values() for part in parts)

    def begin(self, n_before: int, n: int, turn: Turn) -> None:
        """Say which tokens the next step of every layer appends, to the cache whose turn this is."""
        if not 1 <= n <= self.max_chunk:
            raise ValueError(f"a step takes 1 to {self.max_chunk} tokens, not {n}")
        set_fields(self.step, STEP, n_before=n_before, n=n, turn=turn.value, bad=0)

    @property
    def bad(self) -> bool:
        """Whether a key or value of this step did not fit f16."""
        return bool(self.step[STEP.index("bad")])

    def run(self, op: Function, call: np.ndarray) -> None:
        """Run one step on `n_threads` threads of Python's."""
        function = _OP(op.address)
        if self.n_threads == 1:
            function(None, 0, 1, call.ctypes.data)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.n_threads)
        jobs = [
            self._pool.submit(function, None, thread, self.n_threads, call.ctypes.data)
            for thread in range(self.n_threads)
        ]
        for job in jobs:
            job.result()


class PagedLayer:
    """One layer's cache, and the three steps that append to it and attend over it.

    k, v: (specs, clips), one of each per KV head.
    """

    def __init__(
        self,
        shape: LayerShape,
        k: tuple[Sequence[QuantSpec], Sequence[float]],
        v: tuple[Sequence[QuantSpec], Sequence[float]],
        *,
        sinks: int,
        window: int,
        n_ctx: int,
        scale: float,
        work: Workspace,
        turn: Turn,
        offset: RotatingOffset | None = None,
    ) -> None:
        self.shape, self.work, self.offset = shape, work, offset
        n_rot = 0 if offset is None else offset.n_rot
        sides = []
        for side, (specs, clips), d in (("k", k, shape.d_k), ("v", v, shape.d_v)):
            block = max(spec.block for spec in specs)
            n_recent = PagedSide.recent_limit(block, sinks, window, n_ctx)
            n_bytes = PagedSide.tail_bytes(shape.n_kv, d, n_recent, work.max_chunk)
            tail = work.shared(f"tail_{side}", n_bytes)
            limits = {"sinks": sinks, "window": window, "n_ctx": n_ctx, "max_chunk": work.max_chunk}
            sides.append(PagedSide(side, specs, clips, d, **limits, tail=tail, turn=turn))  # type: ignore[arg-type]
        self.k, self.v = sides
        self.append = append_op(shape.d_k, shape.d_v)
        style = "neox" if offset is None else offset.style
        self.attend = attend_op(shape.d_k, shape.d_v, shape.block_rows, shape.max_rows, n_rot, style)
        self.combine = combine_op(shape.d_v)
        layout = work_layout(shape.d_k, shape.d_v, shape.max_rows, n_rot)
        part_bytes = shape.chunk * shape.group * 4 * (shape.d_v + 2)
        self.call = np.zeros(len(CALL), np.int64)
        set_fields(
            self.call,
            CALL,
            step=work.step.ctypes.data,
            counter=work.counter.ctypes.data,
            heads_k=self.k.heads.ctypes.data,
            heads_v=self.v.heads.ctypes.data,
            block_k=self.k.block,
            block_v=self.v.block,
            sinks=sinks,
            window=window,
            n_kv=shape.n_kv,
            group=shape.group,
            chunk=shape.chunk,
            core=core_function(shape.d_k, shape.d_v, shape.block_rows).address,
            load_k=load_function("k", shape.d_k).address,
            load_v=load_function("v", shape.d_v).address,
            work=work.shared("work", layout.n_bytes * work.n_threads).ctypes.data,
            work_bytes=layout.n_bytes,
            parts=work.shared("parts", max_parts(work.n_threads) * part_bytes).ctypes.data,
            scale=float_bits(scale * math.log2(math.e)),
        )
        if offset is not None:
            self._add_offset(offset, n_ctx)

    def _add_offset(self, offset: RotatingOffset, n_ctx: int) -> None:
        if len(offset.angles) < n_ctx or offset.n_rot > self.shape.d_k:
            raise ValueError("the table of angles must reach over the context and fit the head")
        self._means = offset.means()  # what the rows point to
        for row, mean in zip(self.k.heads, self._means, strict=True):
            set_fields(row, HEAD, mean=0 if mean is None else mean.ctypes.data)
        core = core_function(self.shape.d_k + offset.n_rot, self.shape.d_v, self.shape.block_rows)
        tables = {"angles": offset.angles.data_ptr(), "fine": offset.fine.data_ptr()}
        set_fields(self.call, CALL, core_turned=core.address, **tables)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for this layer's keys and values."""
        return self.k.n_bytes + self.v.n_bytes

    def connect(self, name: str, address: int, head_bytes: int, token_bytes: int) -> None:
        """Say where `q`, `k`, `v`, `raw` or `out` lies (float32) and how far apart its heads and tokens are."""
        values = {name: address, f"{name}_head": head_bytes, f"{name}_token": token_bytes}
        set_fields(self.call, CALL, **values)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, raw: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Append and attend, on the workspace's threads, after `Workspace.begin`.

        q: float32 [n_head, n, d_k].  k: [n_kv, n, d_k].  v: [n_kv, n, d_v].  Returns [n_head, n, d_v].
        raw: queries before the keys' transform, as q; needed where keys have a rotating offset.
        """
        if (raw is None) != (self.offset is None):
            raise ValueError("queries before the transform are given where keys have a rotating offset, and only there")
        out = torch.full((q.shape[0], q.shape[1], v.shape[2]), torch.nan)
        held = {"q": q.float(), "k": k.float(), "v": v.float(), "out": out}
        if raw is not None:
            held["raw"] = raw.float()
        for name, x in held.items():
            x = held[name] = x if x.stride(-1) == 1 else x.contiguous()
            self.connect(name, x.data_ptr(), 4 * x.stride(0), 4 * x.stride(1))
        self._held = held  # what the addresses in `call` point to
        for op in (self.append, self.attend, self.combine):
            self.work.run(op, self.call)
        return out


def set_fields(row: np.ndarray, names: tuple[str, ...], **values: int) -> None:
    """Write named fields of an array of int64."""
    for name, value in values.items():
        row[names.index(name)] = value


def float_bits(x: float) -> int:
    """A float32 as the int64 whose first four bytes it is."""
    return int(np.float32(x).view(np.uint32))


def _halves(n_head: int, n: int, d: int) -> torch.Tensor:
    return torch.zeros(n_head, n, d, dtype=torch.float16)
