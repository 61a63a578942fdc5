"""The append step in Triton: what new tokens are stored as, and what they push out of the window, packed.

Every program makes what it needs from its inputs alone, so that none waits for another: a token that is new and leaves
the window in the same step is transformed twice. The quantizer's arithmetic is the reference's, operation by
operation: division rounds to nearest, nothing is fused, and halves go to even.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pack.triton import n_pieces, n_planes, pack, piece_start, piece_width, plane_shift, plane_width, run_of

F16_MAX = tl.constexpr(65504.0)


@triton.jit
def _input(
    x, ok, position, offset, mu, angles, at, D: tl.constexpr, CONSTANT: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr,
):  # fmt: skip
    """Channels `at` of new tokens less their offsets: float32 [tokens, channels]. x: pointers [tokens]."""
    y = tl.load(x[:, None] + at[None, :], mask=ok[:, None], other=0.0).to(tl.float32)
    if N_ROT > 0:
        turns = at < N_ROT
        if NEOX:
            second = at >= N_ROT // 2
            pair = at % (N_ROT // 2)
            other = tl.where(second, at - N_ROT // 2, at + N_ROT // 2)
        else:
            second = at % 2 == 1
            pair = at // 2
            other = tl.where(second, at - 1, at + 1)
        here = tl.load(mu + at)[None, :]
        there = tl.load(mu + other, mask=turns, other=0.0)[None, :]
        known = ok[:, None] & turns[None, :]
        cos = tl.load(angles + position[:, None] * N_ROT + pair[None, :], mask=known, other=1.0)
        sin = tl.load(angles + position[:, None] * N_ROT + N_ROT // 2 + pair[None, :], mask=known, other=0.0)
        y -= here * cos + tl.where(second[None, :], there, -there) * sin
    if CONSTANT:
        y -= tl.load(offset + at)[None, :]
    return y


@triton.jit
def _stored(
    x, ok, position, offset, mu, angles, matrix, D: tl.constexpr, RUN: tl.constexpr, TOKENS: tl.constexpr,
    TRANSFORM: tl.constexpr, CONSTANT: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What new tokens are kept as: a tuple of pieces, float16 [TOKENS, channels]. x: pointers [TOKENS]."""
    out = ()
    for run in tl.static_range(D // RUN):
        for i in tl.static_range(n_pieces(RUN)):
            at = run * RUN + piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            if TRANSFORM:
                y = tl.zeros([TOKENS, piece_width(RUN, i)], tl.float32)
                for first in tl.range(0, D, 16, num_stages=1):  # not unrolled: T is large, and met once per step
                    source = first + tl.arange(0, 16)
                    part = _input(x, ok, position, offset, mu, angles, source, D, CONSTANT, N_ROT, NEOX)
                    t = tl.load(matrix + at[None, :] * D + source[:, None])
                    y = tl.dot(part, t, y, input_precision=PRECISION)
            else:
                y = _input(x, ok, position, offset, mu, angles, at, D, CONSTANT, N_ROT, NEOX)
            out = out + (y.to(tl.float16),)
    return out


@triton.jit
def _levels(low, high, clip, TOP: tl.constexpr):
    """Minimum and scale of groups with these extremes, float16."""
    cut = (high - low) * ((1.0 - clip) * 0.5)
    low, high = low + cut, high - cut
    minimum = low.to(tl.float16)
    scale = tl.div_rn(high - minimum.to(tl.float32), tl.full(low.shape, TOP, tl.float32))
    return minimum, tl.minimum(tl.maximum(scale, 0.0), F16_MAX).to(tl.float16)


@triton.jit
def _codes(x, minimum, scale, TOP: tl.constexpr):
    """Codes int32 of values float32; minimum and scale float32 that broadcast to them."""
    usable = scale > 0
    code = tl.div_rn(x - minimum, tl.where(usable, scale, 1.0) + tl.zeros_like(x))
    # Kept to a range that does not change the result, adding 1.5 * 2^23 leaves no fraction and rounds halves to even.
    code = tl.minimum(tl.maximum(code, -1.0), TOP + 1.0)
    code = (code + 12582912.0) - 12582912.0
    code = tl.where(usable, code, 0.0)
    return tl.minimum(tl.maximum(code, 0.0), TOP).to(tl.int32)


@triton.jit
def _store_planes(
    codes, units, token, ok, capacity, START: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(n_planes(BITS)):
        row = pack(codes, TOKENS, CHANNELS, plane_width(BITS, i), plane_shift(BITS, i))
        base = units + (capacity // 16).to(tl.int64) * (BITS * START + CHANNELS * plane_shift(BITS, i))
        length = CHANNELS * plane_width(BITS, i) // 16
        at = token[:, None] * length + tl.arange(0, CHANNELS * plane_width(BITS, i) // 16)[None, :]
        tl.store(base + at, row, mask=ok[:, None])


@triton.jit
def _quantize(
    pieces, units, params, token, ok, capacity, clip, D: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Codes, scales and minima of pieces of tokens, into the store. token: int32 [TOKENS], where `ok`."""
    RUN: tl.constexpr = run_of(BITS, CHANNEL, GROUP, D)
    PER: tl.constexpr = n_pieces(RUN)
    TOP: tl.constexpr = (1 << BITS) - 1.0
    if BITS == 16:
        for i in tl.static_range(PER):
            at = piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            tl.store(params + token.to(tl.int64)[:, None] * D + at[None, :], pieces[i], mask=ok[:, None])
    elif CHANNEL:
        ROWS: tl.constexpr = TOKENS // GROUP
        minima = (capacity // GROUP) * D
        for i in tl.static_range(PER):
            x = tl.reshape(pieces[i].to(tl.float32), (ROWS, GROUP, piece_width(RUN, i)))
            minimum, scale = _levels(tl.min(x, 1), tl.max(x, 1), clip, TOP)
            codes = _codes(x, minimum.to(tl.float32)[:, None, :], scale.to(tl.float32)[:, None, :], TOP)
            codes = tl.reshape(codes, (TOKENS, piece_width(RUN, i)))
            _store_planes(codes, units, token, ok, capacity, piece_start(RUN, i), piece_width(RUN, i), BITS, TOKENS)
            first = tl.min(tl.reshape(token, (ROWS, GROUP)), 1)
            there = tl.max(tl.reshape(ok.to(tl.int32), (ROWS, GROUP)), 1) > 0
            at = piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
            row = (first // GROUP)[:, None] * D + at[None, :]
            tl.store(params + row, scale, mask=there[:, None])
            tl.store(params + minima + row, minimum, mask=there[:, None])
    else:
        minima = capacity.to(tl.int64) * (D // GROUP)
        for run in tl.static_range(D // RUN):
            low = tl.full([TOKENS], 1.0e30, tl.float32)
            high = tl.full([TOKENS], -1.0e30, tl.float32)
            for i in tl.static_range(PER):
                x = pieces[run * PER + i].to(tl.float32)
                low = tl.minimum(low, tl.min(x, 1))
                high = tl.maximum(high, tl.max(x, 1))
            minimum, scale = _levels(low, high, clip, TOP)
            at = params + run * capacity.to(tl.int64) + token
            tl.store(at, scale, mask=ok)
            tl.store(at + minima, minimum, mask=ok)
            for i in tl.static_range(PER):
                x = pieces[run * PER + i].to(tl.float32)
                codes = _codes(x, minimum.to(tl.float32)[:, None], scale.to(tl.float32)[:, None], TOP)
                _store_planes(
                    codes,
                    units,
                    token,
                    ok,
                    capacity,
                    run * RUN + piece_start(RUN, i),
                    piece_width(RUN, i),
                    BITS,
                    TOKENS,
                )


@triton.jit
def _append_head(
    x, offset, mu, angles, matrix, units, params, full, bad, clip, before, n_new, tile, stride_token, capacity, sinks,
    window, slots,
    D: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, TRANSFORM: tl.constexpr,
    CONSTANT: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one side; pointers begin at it. The first tiles keep new tokens, the others pack old ones."""
    RUN: tl.constexpr = run_of(KIND[0], KIND[1], KIND[2], D)
    lane = tl.arange(0, TOKENS)
    n_keep = tl.cdiv(n_new, TOKENS)
    after = before + n_new
    start = tl.maximum(before - sinks - window, 0) // BLOCK * BLOCK
    stop = tl.maximum(after - sinks - window, 0) // BLOCK * BLOCK
    if tile < n_keep:
        position = before + tile * TOKENS + lane
        ok = position < after
        y = _stored(
            x + (position - before) * stride_token, ok, position, offset, mu, angles, matrix,
            D, RUN, TOKENS, TRANSFORM, CONSTANT, N_ROT, NEOX, PRECISION,
        )  # fmt: skip
        place = position - sinks
        keep = ok & ((place < 0) | (place >= stop))
        slot = tl.where(place < 0, position, sinks + place % slots)
        for run in tl.static_range(D // RUN):
            for i in tl.static_range(n_pieces(RUN)):
                at = run * RUN + piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
                piece = y[run * n_pieces(RUN) + i]
                tl.store(full + slot.to(tl.int64)[:, None] * D + at[None, :], piece, mask=keep[:, None])
                wrong = ok[:, None] & ~(tl.abs(piece.to(tl.float32)) <= F16_MAX)
                tl.store(bad, 1, mask=tl.max(tl.max(wrong.to(tl.int32), 1), 0) > 0)
    else:
        token = start + (tile - n_keep) * TOKENS + lane
        if start + (tile - n_keep) * TOKENS < stop:
            ok = token < stop
            position = sinks + token
            new = position >= before
            y = _stored(
                x + (position - before) * stride_token, ok & new, position, offset, mu, angles, matrix,
                D, RUN, TOKENS, TRANSFORM, CONSTANT, N_ROT, NEOX, PRECISION,
            )  # fmt: skip
            pieces = ()
            rows = full + (sinks + token % slots).to(tl.int64) * D
            for run in tl.static_range(D // RUN):
                for i in tl.static_range(n_pieces(RUN)):
                    at = run * RUN + piece_start(RUN, i) + tl.arange(0, piece_width(RUN, i))
                    old = tl.load(rows[:, None] + at[None, :], mask=(ok & ~new)[:, None], other=0.0)
                    pieces = pieces + (tl.where(new[:, None], y[run * n_pieces(RUN) + i], old),)
            _quantize(pieces, units, params, token, ok, capacity, clip, D, KIND[0], KIND[1], KIND[2], TOKENS)


@triton.jit
def append_kernel(
    k, v, before, clips, kinds, k_table, v_table, k_units, k_params, k_full, v_units, v_params, v_full,
    k_offset, mu, angles, k_matrix, v_offset, v_matrix, bad, n_new,
    k_sequence, k_head, k_token, v_sequence, v_head, v_token,
    k_units_stride, k_params_stride, v_units_stride, v_params_stride, k_capacity, v_capacity, sinks, window,
    k_slots, v_slots,
    D_K: tl.constexpr, D_V: tl.constexpr, KINDS_K: tl.constexpr, KINDS_V: tl.constexpr, N_KINDS_K: tl.constexpr,
    N_KINDS_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
    TRANSFORM_K: tl.constexpr, TRANSFORM_V: tl.constexpr, CONSTANT_K: tl.constexpr, CONSTANT_V: tl.constexpr,
    N_ROT: tl.constexpr, NEOX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """New keys and values of one layer: see `append.triton.append`.

    Grid: twice the KV heads (keys, then values), tiles of tokens, sequences. kinds: int32 [2, n_kv].  clips: float32,
    likewise.
    """
    both, tile, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_kv = tl.num_programs(0) // 2
    n_before = tl.load(before + sequence)
    kind, clip = tl.load(kinds + both), tl.load(clips + both)
    if both < n_kv:
        head = both.to(tl.int64)
        for i in tl.static_range(N_KINDS_K):
            if kind == i:
                _append_head(
                    k + sequence * k_sequence + head * k_head, k_offset + head * D_K, mu + head * D_K, angles,
                    k_matrix + head * D_K * D_K,
                    k_units + sequence * k_units_stride + tl.load(k_table + 2 * head),
                    k_params + sequence * k_params_stride + tl.load(k_table + 2 * head + 1),
                    k_full + (sequence * n_kv + head) * (sinks + k_slots) * D_K, bad, clip,
                    n_before, n_new, tile, k_token, k_capacity, sinks, window, k_slots,
                    D_K, KINDS_K[i], BLOCK_K, TOKENS, TRANSFORM_K, CONSTANT_K, N_ROT, NEOX, PRECISION,
                )  # fmt: skip
    else:
        head = (both - n_kv).to(tl.int64)
        for i in tl.static_range(N_KINDS_V):
            if kind == i:
                _append_head(
                    v + sequence * v_sequence + head * v_head, v_offset + head * D_V, mu, angles,
                    v_matrix + head * D_V * D_V,
                    v_units + sequence * v_units_stride + tl.load(v_table + 2 * head),
                    v_params + sequence * v_params_stride + tl.load(v_table + 2 * head + 1),
                    v_full + (sequence * n_kv + head) * (sinks + v_slots) * D_V, bad, clip,
                    n_before, n_new, tile, v_token, v_capacity, sinks, window, v_slots,
                    D_V, KINDS_V[i], BLOCK_V, TOKENS, TRANSFORM_V, CONSTANT_V, 0, NEOX, PRECISION,
                )  # fmt: skip
