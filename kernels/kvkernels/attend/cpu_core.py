"""The arithmetic: some query rows meet one tile of 32 tokens, with a running softmax.

For each row the core keeps the sum of weighted values, the sum of weights (one partial sum per vector lane) and the
scale that both refer to, a power of two that only moves when a score exceeds it by 2^8: so the usual tile rescales
nothing. Scores are in units of log 2, and the weights are 2^(score - scale).
Source of the running softmax: Milakov and Gimelshein, arXiv 1805.02867; of the blocks: FlashAttention, 2205.14135.
"""

from __future__ import annotations

from ..jit import F32, I32, I64, PTR, Emitter, Function, Val, compile_function, host_target, vec
from ..pack.cpu import PAGE
from .cpu_tiles import column_blocks

#: `core(q, sums, totals, tops, low, high, n_blocks, base, n, tile_k, tile_v)`; see `core_function`.
CORE_ARGS = (PTR, PTR, PTR, PTR, PTR, PTR, I64, I64, I64, PTR, PTR)
#: A score may exceed the scale by so much (powers of two) before everything is rescaled.
SLACK = 8.0
#: The scale of a row that has seen nothing.
NOTHING = -1e30


def core_function(d_k: int, d_v: int, rows: int) -> Function:
    """`core(q, sums, totals, tops, low, high, n_blocks, base, n, tile_k, tile_v)` for blocks of `rows` query rows.

    q: float32 [n_blocks * rows, d_k], times the softmax scale and log2(e).  sums: float32 [.., d_v].  totals: float32
    [.., lanes].  tops: float32 [.., 1] and 8 more.  low, high: int32 [..]: a row sees the tokens at positions
    `low <= j < high`; both never decrease from row to row.  base: position of the tile's first token.  n: tokens
    of the tile that exist.  tile_k: float32 [d_k, 32].  tile_v: float32 [32, d_v].
    """
    name = f"core_{d_k}_{d_v}_{rows}"
    return compile_function(name, (d_k, d_v, rows), lambda: _write(name, d_k, d_v, rows))


def _write(name: str, d_k: int, d_v: int, rows: int) -> str:
    e = Emitter(name, CORE_ARGS)
    q, sums, totals, tops, low, high, n_blocks, base, n, tile_k, tile_v = e.args
    lanes = host_target().lanes
    scores = e.scratch(rows * PAGE * 4)
    start = base.to(I32)
    with e.loop(0, n_blocks) as block:
        first = block * rows
        bounds = low + first * 4, high + first * 4
        last = 4 * (rows - 1)
        seen = (e.load(I32, bounds[1] + last) > start) & (e.load(I32, bounds[0]) < (base + n).to(I32))
        with e.when(seen):
            _scores(e, q + first * (4 * d_k), tile_k, scores, d_k, rows)
            here = sums + first * (4 * d_v)
            total = totals + first * (4 * lanes)
            _weights(e, scores, bounds, start, here, total, tops + first * 4, d_v, rows)
            _add_values(e, scores, tile_v, here, n, d_v, rows)
    return e.finish()


def _fits(rows: int, vectors: int) -> int:
    """Vectors per row whose accumulators fit the registers, with room for operands; parts come out equal."""
    fit = max(1, (host_target().n_registers - 4) // rows)
    n_parts = -(-vectors // fit)
    return -(-vectors // n_parts)


def _scores(e: Emitter, q: Val, tile: Val, scores: Val, d: int, rows: int) -> None:
    lanes = host_target().lanes
    t = vec(F32, lanes)
    per_row = _fits(rows, PAGE // lanes)
    for column in range(0, PAGE, per_row * lanes):
        columns = range(column, min(column + per_row * lanes, PAGE), lanes)
        acc = {(r, c): e.var(t, 0.0) for r in range(rows) for c in columns}
        with e.loop(0, d, 2) as channel:
            for step in range(2):
                at = tile + (channel + step) * (4 * PAGE)
                keys = {c: e.load(t, at + 4 * c) for c in columns}
                for r in range(rows):
                    query = e.load(F32, q + (channel + (r * d + step)) * 4).splat(lanes)
                    for c in columns:
                        acc[r, c].set(e.fma(query, keys[c], acc[r, c].get()))
        for (r, c), total in acc.items():
            e.store(total.get(), scores + (r * PAGE + c) * 4)


def _weights(
    e: Emitter, scores: Val, bounds: tuple[Val, Val], start: Val, sums: Val, totals: Val, tops: Val, d_v: int, rows: int
) -> None:
    """Scores to weights, in place; raises the rows' scales first where a score would leave float32's range."""
    lanes = host_target().lanes
    t = vec(F32, lanes)
    columns = range(0, PAGE, lanes)
    peaks = []
    for r in range(rows):
        low = e.load(I32, bounds[0] + 4 * r) - start
        span = (e.load(I32, bounds[1] + 4 * r) - start - low).splat(lanes)
        peak: Val | None = None
        for c in columns:
            inside = (e.lanes(I32, lanes, c) - low.splat(lanes)).below(span)
            at = scores + (r * PAGE + c) * 4
            # What lies outside may be anything, even NaN: it is replaced, not multiplied away.
            score = inside.select(e.load(t, at), e.const(t, float("-inf")))
            e.store(score, at)
            peak = score if peak is None else e.maximum(peak, score)
        assert peak is not None
        peaks.append(peak)
    too_high: Val | None = None
    for r in range(rows):
        over = peaks[r] > (e.load(F32, tops + 4 * r) + SLACK).splat(lanes)
        too_high = over if too_high is None else too_high | over
    assert too_high is not None
    any_high = e.reduce(lambda a, b: a | b, too_high)
    with e.when(any_high):
        for r in range(rows):
            old = e.load(F32, tops + 4 * r)
            new = e.maximum(e.reduce(e.maximum, peaks[r]), old)
            factor = e.exp2(old - new)
            e.store(new, tops + 4 * r)
            at = totals + 4 * lanes * r
            e.store(e.load(t, at) * factor.splat(lanes), at)
            for c, width in column_blocks(d_v):
                at = sums + (r * d_v + c) * 4
                e.store(e.load(vec(F32, width), at) * factor.splat(width), at)
    for r in range(rows):
        top = e.load(F32, tops + 4 * r).splat(lanes)
        total = e.load(t, totals + 4 * lanes * r)
        for c in columns:
            at = scores + (r * PAGE + c) * 4
            weight = e.exp2(e.load(t, at) - top)
            e.store(weight, at)
            total = total + weight
        e.store(total, totals + 4 * lanes * r)


def _add_values(e: Emitter, weights: Val, tile: Val, sums: Val, n: Val, d: int, rows: int) -> None:
    blocks = column_blocks(d)
    per_row = _fits(rows, len(blocks))
    for i in range(0, len(blocks), per_row):
        part = blocks[i : i + per_row]
        places = {(r, c): sums + (r * d + c) * 4 for r in range(rows) for c, _ in part}
        acc = {(r, c): e.var(vec(F32, w), e.load(vec(F32, w), places[r, c])) for r in range(rows) for c, w in part}
        with e.loop(0, n) as token:
            at = tile + token * (4 * d)
            values = {c: e.load(vec(F32, w), at + 4 * c) for c, w in part}
            for r in range(rows):
                weight = e.load(F32, weights + (token + r * PAGE) * 4)
                for c, w in part:
                    acc[r, c].set(e.fma(weight.splat(w), values[c], acc[r, c].get()))
        for at_place, total in ((places[key], acc[key]) for key in acc):
            e.store(total.get(), at_place)
