"""Reading the layout of `pack.device` in registers: bit streams to codes in f16."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _part(x, AT: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Code number AT of every unit of 16 bits, times 2^SHIFT, as f16."""
    # An f16 of exponent 10 counts its mantissa in ones: with a code's bits there it is 1024 + code, not converted.
    MOVE: tl.constexpr = SHIFT - AT * WIDTH
    if MOVE > 0:
        x = x << MOVE
    if MOVE < 0:
        x = x >> (-MOVE)
    x = (x & (((1 << WIDTH) - 1) << SHIFT)) | 0x6400
    return x.to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def _four(x, FIRST: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Codes FIRST, FIRST + STEP, ... of every unit, four of them, side by side."""
    even = tl.interleave(_part(x, FIRST, WIDTH, SHIFT), _part(x, FIRST + 2 * STEP, WIDTH, SHIFT))
    odd = tl.interleave(_part(x, FIRST + STEP, WIDTH, SHIFT), _part(x, FIRST + 3 * STEP, WIDTH, SHIFT))
    return tl.interleave(even, odd)


@triton.jit
def unpack(units, first, N: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Codes of one plane of one piece, times 2^SHIFT: float16 [N, CHANNELS] of tokens `first ..`.

    units: pointer to the int16 units of the piece's plane.  `first` is a multiple of 16.
    """
    ROW: tl.constexpr = CHANNELS * WIDTH // 16
    x = tl.load(units + first * ROW + tl.arange(0, N * ROW))
    if WIDTH == 4:
        y = _four(x, 0, 1, WIDTH, SHIFT)
    elif WIDTH == 2:
        y = tl.interleave(_four(x, 0, 2, WIDTH, SHIFT), _four(x, 1, 2, WIDTH, SHIFT))
    else:
        even = tl.interleave(_four(x, 0, 4, WIDTH, SHIFT), _four(x, 2, 4, WIDTH, SHIFT))
        odd = tl.interleave(_four(x, 1, 4, WIDTH, SHIFT), _four(x, 3, 4, WIDTH, SHIFT))
        y = tl.interleave(even, odd)
    return tl.reshape(y, (N, CHANNELS))
