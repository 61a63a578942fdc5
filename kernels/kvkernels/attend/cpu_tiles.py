"""Tiles: 32 tokens of one head, restored to float32 once and then used for all query rows.

Keys become `[d, 32]` (a vector is one channel of several tokens), values `[32, d]` (several channels of one token), so
that neither the products with the queries nor the sums over tokens need a sum across a vector.
"""

from __future__ import annotations

import math

from ..jit import F16, F32, I64, PTR, Emitter, Function, Val, compile_function, host_target, vec
from ..pack.cpu import PAGE, key_codes, page_bytes, value_codes
from ..quantize.cpu import SideName
from ..quantize.cubic import polynomial
from ..spec import QuantSpec

#: `tile(codes, scale, minimum, page, out)`: one page (int64) of a head's store.
UNPACK_ARGS = (PTR, PTR, PTR, I64, PTR)
#: `tile(rows, first, n, out)`: 32 rows from `first` on, of rows float16 [n, d]; rows outside repeat the nearest one.
LOAD_ARGS = (PTR, I64, I64, PTR)


def column_blocks(d: int) -> list[tuple[int, int]]:
    """(first channel, channels) of the vectors that cover `d` channels, a multiple of 8."""
    width = min(host_target().lanes, 16)
    blocks = [(c, width) for c in range(0, d - d % width, width)]
    return blocks + ([(d - d % width, d % width)] if d % width else [])


def unpack_function(side: SideName, spec: QuantSpec, d: int) -> Function:
    """Restores one page of a head's store to a tile; see `UNPACK_ARGS`."""
    name = f"unpack_{side}{spec.bits}"

    def write() -> str:
        e = Emitter(name, UNPACK_ARGS)
        if not spec.quantized:
            _convert(e, side, d)
        elif side == "k":
            _keys(e, spec, d)
        else:
            _values(e, spec, d)
        return e.finish()

    return compile_function(name, (side, spec, d), write)


def load_function(side: SideName, d: int) -> Function:
    """Converts 32 rows of full-precision tokens to a tile; see `LOAD_ARGS`."""
    name = f"load_{side}"

    def write() -> str:
        e = Emitter(name, LOAD_ARGS)
        (_load_keys if side == "k" else _load_values)(e, d)
        return e.finish()

    return compile_function(name, (side, d), write)


def _convert(e: Emitter, side: SideName, d: int) -> None:
    codes, _, _, page, out = e.args
    at = codes + page * page_bytes(d, 16)
    width = host_target().lanes
    with e.loop(0, PAGE * d, width) as i:
        e.store(e.load(vec(F16, width), at + i * 2).to(F32), out + i * 4)


def _keys(e: Emitter, spec: QuantSpec, d: int) -> None:
    codes, scales, minima, page, out = e.args
    at = codes + page * page_bytes(d, spec.bits)
    # Within one vector all tokens share a scale (channel axis), or each has its own (token axis).
    shared = spec.axis == "channel"
    n = min(host_target().lanes, math.gcd(spec.group, PAGE) if shared else PAGE)
    for first in range(0, PAGE, n):
        if shared:
            row = ((page * PAGE + first) // spec.group) * (2 * d)
            steps, lows = _floats(e, scales + row, d), _floats(e, minima + row, d)
        for c in range(d):
            if shared:
                step, low = (e.load(F32, table + 4 * c).splat(n) for table in (steps, lows))
            elif c % spec.group == 0:
                place = (page * (d // spec.group) + c // spec.group) * (2 * PAGE) + 2 * first
                step, low = _step(e, spec, *(e.load(vec(F16, n), t + place) for t in _tables(spec, scales, minima)))
            code = key_codes(e, at, c, spec, d, first, n).to(F32)
            e.store(_restored(e, spec, code, step, low), out + (c * PAGE + first) * 4)


def _tables(spec: QuantSpec, scales: Val, minima: Val) -> list[Val]:
    return [scales, minima] if spec.has_minimum else [scales]


def _step(e: Emitter, spec: QuantSpec, scale: Val, minimum: Val | None = None) -> tuple[Val, Val]:
    """What `_restored` needs of a group, float32: step and minimum, or the two coefficients of the cubic code."""
    step = scale.to(F32)
    if minimum is not None:
        return step, minimum.to(F32)
    a, b = polynomial(spec.bits)
    return step * a, step * b


def _restored(e: Emitter, spec: QuantSpec, code: Val, step: Val, low: Val) -> Val:
    """Values <n x float> of codes <n x float>; step, low: of `_step`."""
    if spec.has_minimum:
        return e.fma(code, step, low)
    y = code + code - float(2**spec.bits - 1)
    return y * e.fma(y * y, low, step)


def _floats(e: Emitter, halves: Val, n: int) -> Val:
    """A float32 copy on the stack of `n` float16 values."""
    out = e.scratch(4 * n)
    e.store(e.load(vec(F16, n), halves).to(F32), out)
    return out


def _values(e: Emitter, spec: QuantSpec, d: int) -> None:
    codes, scales, minima, page, out = e.args
    at = codes + page * page_bytes(d, spec.bits)
    lanes = host_target().lanes
    if spec.axis == "token":
        n_groups = d // spec.group
        n = math.gcd(spec.group, lanes)
        row = page * (n_groups * PAGE * 2)
        tables = [_floats(e, table + row, n_groups * PAGE) for table in _tables(spec, scales, minima)]
        with e.loop(0, d, n) as c:
            group = (c // spec.group) * (4 * PAGE)
            for t in range(PAGE):
                step, low = _step(e, spec, *(e.load(F32, table + group + 4 * t).splat(n) for table in tables))
                code = value_codes(e, at, t, spec, d, c, n).to(F32)
                e.store(_restored(e, spec, code, step, low), out + (c + t * d) * 4)
        return
    for first, n in column_blocks(d):
        c = e.const(I64, first)
        for t in range(PAGE):
            if t % math.gcd(spec.group, PAGE) == 0:
                place = ((page * PAGE + t) // spec.group) * (2 * d) + 2 * first
                step, low = (e.load(vec(F16, n), table + place).to(F32) for table in (scales, minima))
            code = value_codes(e, at, t, spec, d, c, n).to(F32)
            e.store(e.fma(code, step, low), out + (t * d + first) * 4)


def _load_keys(e: Emitter, d: int) -> None:
    """Rows of tokens to columns of tokens: blocks of the matrix are transposed in registers."""
    rows, first, n, out = e.args
    size = math.gcd(d, host_target().lanes)
    for start in range(0, PAGE, size):
        places = [_clamped(e, first + (start + i), n) * (2 * d) for i in range(size)]
        with e.loop(0, d, size) as c:
            block = [e.load(vec(F16, size), rows + place + c * 2).to(F32) for place in places]
            for j, column in enumerate(_transposed(block)):
                e.store(column, out + (c + j) * (4 * PAGE) + 4 * start)


def _clamped(e: Emitter, row: Val, n: Val) -> Val:
    return e.smax(e.smin(row, n - 1), 0)


def _transposed(block: list[Val]) -> list[Val]:
    """Transpose `n` vectors of `n` lanes, n a power of two: swap quarters of ever smaller squares."""
    n = len(block)
    step = n // 2
    while step:
        for i in range(n):
            if i & step:
                continue
            a, b = block[i], block[i + step]
            block[i] = a.shuffle([j if not j & step else n + j - step for j in range(n)], b)
            block[i + step] = a.shuffle([j + step if not j & step else n + j for j in range(n)], b)
        step //= 2
    return block


def _load_values(e: Emitter, d: int) -> None:
    rows, first, n, out = e.args
    with e.loop(0, PAGE) as t:
        at = rows + _clamped(e, first + t, n) * (2 * d)
        for c, width in column_blocks(d):
            e.store(e.load(vec(F16, width), at + 2 * c).to(F32), out + (t * d + c) * 4)
