"""What a tile of tokens adds to a running softmax, in Triton: from packed codes and from full precision.

Query rows are those of one KV head, filled up to 16. `q` and `acc` are tuples with one tensor per piece of channels
(see `pack.device`): pieces of queries float16 [16, channels], of the output float32 [16, channels].

Scales and minima never meet the codes one by one. With a code `c`, scale `s` and minimum `m`, on the token axis

    q . k = s (q . c) + m sum(q)    and    sum p v = sum (p s) c + sum p m,

and on the channel axis `q . k = (q s) . c + q . m` and `sum p v = s sum p c + m sum p`. What is rounded to f16 on the
way is divided by the largest scale of the tile first, so that small values do not vanish.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pack.triton import n_pieces, n_planes, piece_start, piece_width, plane_shift, plane_width, run_of, unpack


@triton.jit
def load_pieces(rows, ok, D: tl.constexpr, RUN: tl.constexpr):
    """Rows as a tuple of pieces, float16 [16, channels]. rows: pointers [16]; where not `ok` they are 0."""
    out = ()
    for run in tl.static_range(D // RUN):
        for i in tl.static_range(n_pieces(RUN)):
            at = run * RUN + piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            x = tl.load(rows[:, None] + at[None, :], mask=ok[:, None], other=0.0)
            out = out + (x.to(tl.float16),)
    return out


@triton.jit
def zero_pieces(D: tl.constexpr, RUN: tl.constexpr):
    """A tuple of pieces of zeros, float32 [16, channels]."""
    out = ()
    for _run in tl.static_range(D // RUN):
        for i in tl.static_range(n_pieces(RUN)):
            out = out + (tl.zeros([16, piece_width(RUN, i)], tl.float32),)
    return out


@triton.jit
def _plane(
    units, first, capacity,
    START: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One plane of one piece, weighted: float16 [N, CHANNELS]. START: first channel in the head."""
    before: tl.constexpr = BITS * START + CHANNELS * plane_shift(BITS, PLANE)
    base = units + (capacity // 16).to(tl.int64) * before
    return unpack(base, first, N, CHANNELS, plane_width(BITS, PLANE), plane_shift(BITS, PLANE))


@triton.jit
def _dot_keys(
    a, s, units, first, capacity,
    START: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """s + a . codes: float32 [16, N]."""
    for i in tl.static_range(n_planes(BITS)):
        s = tl.dot(a, tl.trans(_plane(units, first, capacity, START, CHANNELS, BITS, i, N)), s)
    return s


@triton.jit
def _dot_values(
    p, units, first, capacity,
    START: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """p . codes: float32 [16, CHANNELS]."""
    out = tl.zeros([16, CHANNELS], tl.float32)
    for i in tl.static_range(n_planes(BITS)):
        out = tl.dot(p, _plane(units, first, capacity, START, CHANNELS, BITS, i, N), out)
    return out


@triton.jit
def packed_scores(
    q, units, params, first, stop, capacity,
    D: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Products of queries with packed keys `first .. first + N - 1`: float32 [16, N]; from `stop` on anything finite.

    units, params: where the head begins.
    """
    tokens = first + tl.arange(0, N)
    ok = tokens < stop
    RUN: tl.constexpr = run_of(BITS, CHANNEL, GROUP, D)
    PER: tl.constexpr = n_pieces(RUN)
    s = tl.zeros([16, N], tl.float32)
    if BITS == 16:
        for i in tl.static_range(PER):
            at = piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            rows = params + tokens.to(tl.int64)[:, None] * D + at[None, :]
            k = tl.load(rows, mask=ok[:, None], other=0.0)
            s = tl.dot(q[i], tl.trans(k), s)
    elif CHANNEL:
        row = params + (first // GROUP) * D
        minima = (capacity // GROUP).to(tl.int64) * D
        for i in tl.static_range(PER):
            at = piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            scale = tl.load(row + at).to(tl.float32)
            minimum = tl.load(row + minima + at).to(tl.float32)
            top = tl.maximum(tl.max(scale, 0), 1e-30)
            scaled = (q[i].to(tl.float32) * (scale / top)[None, :]).to(tl.float16)
            part = tl.zeros([16, N], tl.float32)
            part = _dot_keys(scaled, part, units, first, capacity, piece_start(RUN, i), piece_width(RUN, i), BITS, N)
            low = tl.sum(q[i].to(tl.float32) * minimum[None, :], 1)
            s += part * top + low[:, None]
    else:
        minima = capacity.to(tl.int64) * (D // GROUP)
        for run in tl.static_range(D // RUN):
            part = tl.zeros([16, N], tl.float32)
            total = tl.zeros([16], tl.float32)
            for i in tl.static_range(PER):
                x = q[run * PER + i]
                part = _dot_keys(
                    x, part, units, first, capacity, run * RUN + piece_start(RUN, i), piece_width(RUN, i), BITS, N
                )
                total += tl.sum(x.to(tl.float32), 1)
            at = params + run * capacity.to(tl.int64) + tokens
            scale = tl.load(at, mask=ok, other=0.0).to(tl.float32)
            minimum = tl.load(at + minima, mask=ok, other=0.0).to(tl.float32)
            s += part * scale[None, :] + total[:, None] * minimum[None, :]
    return s


@triton.jit
def packed_sums(
    acc, p, alpha, units, params, first, stop, capacity,
    D: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """acc * alpha + p . packed values `first .. first + N - 1`, piece by piece.

    p: float32 [16, N], at most 1 and 0 from `stop` on.  alpha: float32 [16].
    """
    tokens = first + tl.arange(0, N)
    ok = tokens < stop
    RUN: tl.constexpr = run_of(BITS, CHANNEL, GROUP, D)
    PER: tl.constexpr = n_pieces(RUN)
    out = ()
    if BITS == 16:
        p16 = (p * 1024.0).to(tl.float16)
        for i in tl.static_range(PER):
            at = piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            rows = params + tokens.to(tl.int64)[:, None] * D + at[None, :]
            v = tl.load(rows, mask=ok[:, None], other=0.0)
            out = out + (acc[i] * alpha[:, None] + tl.dot(p16, v) * (1.0 / 1024.0),)
    elif CHANNEL:
        p16 = (p * 1024.0).to(tl.float16)
        total = tl.sum(p, 1)
        row = params + (first // GROUP) * D
        minima = (capacity // GROUP).to(tl.int64) * D
        for i in tl.static_range(PER):
            at = piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            scale = tl.load(row + at).to(tl.float32) * (1.0 / 1024.0)
            minimum = tl.load(row + minima + at).to(tl.float32)
            part = _dot_values(p16, units, first, capacity, piece_start(RUN, i), piece_width(RUN, i), BITS, N)
            out = out + (acc[i] * alpha[:, None] + part * scale[None, :] + total[:, None] * minimum[None, :],)
    else:
        minima = capacity.to(tl.int64) * (D // GROUP)
        for run in tl.static_range(D // RUN):
            at = params + run * capacity.to(tl.int64) + tokens
            scale = tl.load(at, mask=ok, other=0.0).to(tl.float32)
            minimum = tl.load(at + minima, mask=ok, other=0.0).to(tl.float32)
            top = tl.maximum(tl.max(scale, 0), 1e-30)
            scaled = (p * (scale * (1024.0 / top))[None, :]).to(tl.float16)
            low = tl.sum(p * minimum[None, :], 1)
            for i in tl.static_range(PER):
                part = _dot_values(
                    scaled, units, first, capacity, run * RUN + piece_start(RUN, i), piece_width(RUN, i), BITS, N
                )
                out = out + (acc[run * PER + i] * alpha[:, None] + part * (top * (1.0 / 1024.0)) + low[:, None],)
    return out


@triton.jit
def full_scores(q, rows, ok, D: tl.constexpr, RUN: tl.constexpr, N: tl.constexpr):
    """Products of queries with keys in full precision: float32 [16, N]. rows: pointers [N]; 0 where not `ok`."""
    s = tl.zeros([16, N], tl.float32)
    PER: tl.constexpr = n_pieces(RUN)
    for run in tl.static_range(D // RUN):
        for i in tl.static_range(PER):
            at = run * RUN + piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            k = tl.load(rows[:, None] + at[None, :], mask=ok[:, None], other=0.0)
            s = tl.dot(q[run * PER + i], tl.trans(k), s)
    return s


@triton.jit
def full_sums(acc, p, alpha, rows, ok, D: tl.constexpr, RUN: tl.constexpr):
    """acc * alpha + p . values in full precision, piece by piece. rows: pointers [N]."""
    p16 = (p * 1024.0).to(tl.float16)
    PER: tl.constexpr = n_pieces(RUN)
    out = ()
    for run in tl.static_range(D // RUN):
        for i in tl.static_range(PER):
            at = run * RUN + piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            v = tl.load(rows[:, None] + at[None, :], mask=ok[:, None], other=0.0)
            out = out + (acc[run * PER + i] * alpha[:, None] + tl.dot(p16, v) * (1.0 / 1024.0),)
    return out
