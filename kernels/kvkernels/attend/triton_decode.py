"""One query per sequence over the packed cache, in Triton: split over the context, then a small combine.

A program owns one KV head and a range of packed tokens and serves all query heads of the group; one more program per
head takes the sinks, the window, and what only one of keys and values has packed. Each leaves an unfinished softmax
(maximum, sum, weighted values); `combine_kernel` joins them and undoes the transform of the values, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pack.triton import n_pieces, piece_start, piece_width, run_of
from .triton_tiles import full_scores, full_sums, load_pieces, packed_scores, packed_sums, zero_pieces

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gains(raw, mu, rows, ok, N_ROT: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr):
    """The two numbers per pair and query of `rope_offset`: float32 [16, HALF] each. raw: pointers [16]."""
    pair = tl.arange(0, HALF)
    used = pair < N_ROT // 2
    if NEOX:
        first, second = pair, pair + N_ROT // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    both = ok[:, None] & used[None, :]
    q1 = tl.load(raw[:, None] + first[None, :], mask=both, other=0.0).to(tl.float32)
    q2 = tl.load(raw[:, None] + second[None, :], mask=both, other=0.0).to(tl.float32)
    m1 = tl.load(mu + first, mask=used, other=0.0)[None, :]
    m2 = tl.load(mu + second, mask=used, other=0.0)[None, :]
    return q1 * m1 + q2 * m2, q2 * m1 - q1 * m2


@triton.jit
def _bias(gains, base, angles, fine, N_ROT: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr):
    """What the scores of positions `base .. base + N - 1` gain: float32 [16, N]; see `attend.cpu_offset`."""
    pair = tl.arange(0, HALF)
    used = pair < N_ROT // 2
    row = angles + base * N_ROT + pair
    cos = tl.load(row, mask=used, other=0.0)[None, :]
    sin = tl.load(row + N_ROT // 2, mask=used, other=0.0)[None, :]
    a, b = gains
    at = fine + tl.arange(0, N)[:, None] * N_ROT + pair[None, :]
    fine_cos = tl.load(at, mask=used[None, :], other=0.0)
    fine_sin = tl.load(at + N_ROT // 2, mask=used[None, :], other=0.0)
    out = tl.dot(a * cos + b * sin, tl.trans(fine_cos), input_precision=PRECISION)
    return tl.dot(b * cos - a * sin, tl.trans(fine_sin), out, input_precision=PRECISION)


@triton.jit
def _weigh(s, ok, m, total, scale, CAP: tl.constexpr):
    """One step of the running softmax: weights [16, N], what the past shrinks by, new maximum and sum (base 2)."""
    s = s * scale
    if CAP > 0:
        # tanh by way of exp2: no library function, and 1 where exp2 overflows.
        s = CAP * (1.0 - 2.0 / (tl.exp2(s * (2.0 / CAP * LOG2_E)) + 1.0))
    s = tl.where(ok[None, :], s * LOG2_E, -1.0e30)
    top = tl.maximum(m, tl.max(s, 1))
    p = tl.where(ok[None, :], tl.exp2(s - top[:, None]), 0.0)
    alpha = tl.exp2(m - top)
    return p, alpha, top, total * alpha + tl.sum(p, 1)


@triton.jit
def _decode_head(
    q, raw, k_units, k_params, k_full, v_units, v_params, v_full, mu, angles, fine, out, stats,
    n, split, n_splits, group, stride_q, k_capacity, v_capacity, sinks, window, k_slots, v_slots, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, N: tl.constexpr, SLIDING: tl.constexpr, CAP: tl.constexpr, N_ROT: tl.constexpr,
    HALF: tl.constexpr, NEOX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of `decode_kernel`; pointers begin at this sequence and head. K, V: (bits, channel axis, group)."""
    RUN_K: tl.constexpr = run_of(K[0], K[1], K[2], D_K)
    RUN_V: tl.constexpr = run_of(V[0], V[1], V[2], D_V)
    rows = tl.arange(0, 16)
    used = rows < group
    x = load_pieces(q + rows * stride_q, used, D_K, RUN_K)
    gains = (0, 0)
    if N_ROT > 0:
        gains = _gains(raw + rows * stride_q, mu, rows, used, N_ROT, HALF, NEOX)
    m = tl.full([16], -1.0e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = zero_pieces(D_V, RUN_V)
    lane = tl.arange(0, N)

    beyond = tl.maximum(n - sinks - window, 0)
    k_packed = beyond // BLOCK_K * BLOCK_K
    v_packed = beyond // BLOCK_V * BLOCK_V
    both = tl.minimum(k_packed, v_packed)
    either = tl.maximum(k_packed, v_packed)
    seen = 0  # the first position that the query sees
    if SLIDING > 0:
        seen = tl.maximum(n - SLIDING, 0)
    skip = tl.maximum(seen - sinks, 0) // N * N

    if split < n_splits:
        per = tl.cdiv(tl.cdiv(tl.maximum(both - skip, 0), N), n_splits) * N
        begin = skip + split * per
        end = tl.minimum(begin + per, both)
        for first in range(begin, end, N):
            s = packed_scores(x, k_units, k_params, first, end, k_capacity, D_K, K[0], K[1], K[2], N)
            if N_ROT > 0:
                s += _bias(gains, sinks + first, angles, fine, N_ROT, HALF, N, PRECISION)
            ok = first + lane < end
            if SLIDING > 0:
                ok = ok & (sinks + first + lane >= seen)
            p, alpha, m, total = _weigh(s, ok, m, total, scale, CAP)
            acc = packed_sums(acc, p, alpha, v_units, v_params, first, end, v_capacity, D_V, V[0], V[1], V[2], N)
    else:
        if BLOCK_K != BLOCK_V:  # tokens of which one side is packed and the other is not yet
            for first in tl.range(tl.maximum(both // N * N, skip), either, N, num_stages=1):
                token = first + lane
                ok = (token >= both) & (token < either) & (sinks + token >= seen)
                if BLOCK_K > BLOCK_V:
                    at = k_full + (sinks + token % k_slots).to(tl.int64) * D_K
                    s = full_scores(x, at, ok, D_K, RUN_K, N)
                else:
                    s = packed_scores(x, k_units, k_params, first, either, k_capacity, D_K, K[0], K[1], K[2], N)
                if N_ROT > 0:
                    s += _bias(gains, sinks + first, angles, fine, N_ROT, HALF, N, PRECISION)
                p, alpha, m, total = _weigh(s, ok, m, total, scale, CAP)
                if BLOCK_K > BLOCK_V:
                    acc = packed_sums(
                        acc, p, alpha, v_units, v_params, first, either, v_capacity, D_V, V[0], V[1], V[2], N
                    )
                else:
                    at = v_full + (sinks + token % v_slots).to(tl.int64) * D_V
                    acc = full_sums(acc, p, alpha, at, ok, D_V, RUN_V)
        # Sinks lie in the first slots, what follows them in a ring.
        n_sink = tl.minimum(n, sinks)
        sink_tiles = tl.cdiv(n_sink, N)
        start = tl.maximum(either, tl.maximum(seen - sinks, 0))
        ring_tiles = tl.cdiv(tl.maximum(n - sinks - start, 0), N)
        for tile in tl.range(0, sink_tiles + ring_tiles, num_stages=1):
            base = tl.where(tile < sink_tiles, tile * N, sinks + start + (tile - sink_tiles) * N)
            position = base + lane
            stop = tl.where(tile < sink_tiles, n_sink, n)
            ok = (position < stop) & (position >= seen)
            place = position - sinks
            k_slot = tl.where(place < 0, position, sinks + place % k_slots)
            v_slot = tl.where(place < 0, position, sinks + place % v_slots)
            s = full_scores(x, k_full + k_slot.to(tl.int64) * D_K, ok, D_K, RUN_K, N)
            if N_ROT > 0:
                s += _bias(gains, base, angles, fine, N_ROT, HALF, N, PRECISION)
            p, alpha, m, total = _weigh(s, ok, m, total, scale, CAP)
            acc = full_sums(acc, p, alpha, v_full + v_slot.to(tl.int64) * D_V, ok, D_V, RUN_V)

    tl.store(stats + rows * 2, m, mask=used)
    tl.store(stats + rows * 2 + 1, total, mask=used)
    for run in tl.static_range(D_V // RUN_V):
        for i in tl.static_range(n_pieces(RUN_V)):
            at = run * RUN_V + piece_start(RUN_V, i) + tl.arange(0, piece_width(RUN_V, i))
            tl.store(out + rows[:, None] * D_V + at[None, :], acc[run * n_pieces(RUN_V) + i], mask=used[:, None])


@triton.jit
def decode_kernel(
    q, raw, lengths, kinds, k_table, v_table, k_units, k_params, k_full, v_units, v_params, v_full, mu, angles, fine,
    out, stats, group, stride_sequence, stride_q, k_units_stride, k_params_stride, v_units_stride, v_params_stride,
    k_capacity, v_capacity, sinks, window, k_slots, v_slots, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, KINDS: tl.constexpr, N_KINDS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, N: tl.constexpr, SLIDING: tl.constexpr, CAP: tl.constexpr, N_ROT: tl.constexpr,
    HALF: tl.constexpr, NEOX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Unfinished softmax sums of one KV head, one part of the context and one sequence: see `attend.triton.decode`.

    Grid: KV heads, parts and one more, sequences. kinds: int32 [n_kv], which of KINDS a head is.
    """
    head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_kv, n_parts = tl.num_programs(0), tl.num_programs(1)
    n = tl.load(lengths + sequence)
    kind = tl.load(kinds + head)
    q_at = sequence * stride_sequence + head.to(tl.int64) * group * stride_q
    part = (sequence * n_parts + split) * n_kv + head
    k_head = (sequence * n_kv + head) * (sinks + k_slots) * D_K
    v_head = (sequence * n_kv + head) * (sinks + v_slots) * D_V
    k_codes = k_units + sequence * k_units_stride + tl.load(k_table + 2 * head)
    k_scales = k_params + sequence * k_params_stride + tl.load(k_table + 2 * head + 1)
    v_codes = v_units + sequence * v_units_stride + tl.load(v_table + 2 * head)
    v_scales = v_params + sequence * v_params_stride + tl.load(v_table + 2 * head + 1)
    # Where a head begins is a multiple of 16 numbers, which a table cannot say.
    k_codes, k_scales = tl.multiple_of(k_codes, 16), tl.multiple_of(k_scales, 16)
    v_codes, v_scales = tl.multiple_of(v_codes, 16), tl.multiple_of(v_scales, 16)
    for i in tl.static_range(N_KINDS):
        if kind == i:
            _decode_head(
                q + q_at, raw + q_at, k_codes, k_scales, k_full + k_head, v_codes, v_scales, v_full + v_head,
                mu + head * D_K, angles, fine, out + part * group * D_V, stats + part * group * 2,
                n, split, n_parts - 1, group, stride_q, k_capacity, v_capacity, sinks, window, k_slots, v_slots, scale,
                D_K, D_V, KINDS[i][0], KINDS[i][1], BLOCK_K, BLOCK_V, N, SLIDING, CAP, N_ROT, HALF, NEOX, PRECISION,
            )  # fmt: skip


@triton.jit
def combine_kernel(
    parts, stats, inverse, out, n_parts, n_kv, group, stride_sequence, stride_out,
    D: tl.constexpr, WIDTH: tl.constexpr, UNDO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query head and undo the values' transform.

    parts: float32 [sequence, part, n_head, D], unfinished sums.  stats: float32 [.., 2], their maximum and sum.
    inverse: float32 [n_kv, D, D], `T^-1`; not read without UNDO.  WIDTH: D filled up to a power of two.
    """
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n_head = n_kv * group
    channel = tl.arange(0, WIDTH)
    inside = channel < D
    m, total = -1.0e30, 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for first in range(0, n_parts, TILE):
        part = first + tl.arange(0, TILE)
        at = (sequence * n_parts + part) * n_head + head
        there = part < n_parts
        tops = tl.load(stats + at * 2, mask=there, other=-1.0e30)
        sums = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
        x = tl.load(parts + at[:, None] * D + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        top = tl.maximum(m, tl.max(tops, 0))
        alpha, weights = tl.exp2(m - top), tl.exp2(tops - top)
        acc = acc * alpha + tl.sum(x * weights[:, None], 0)
        total = total * alpha + tl.sum(sums * weights, 0)
        m = top
    acc = acc / total
    row = out + sequence * stride_sequence + head.to(tl.int64) * stride_out
    if UNDO:
        matrix = inverse + (head // group).to(tl.int64) * D * D
        for first in range(0, D, 16):
            at = first + tl.arange(0, 16)
            t = tl.load(matrix + at[:, None] * D + channel[None, :], mask=inside[None, :], other=0.0)
            y = tl.sum(t * acc[None, :], 1)
            tl.store(row + at, y.to(out.dtype.element_ty))
    else:
        tl.store(row + channel, acc.to(out.dtype.element_ty), mask=inside)
