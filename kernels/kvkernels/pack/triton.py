"""The layout of `pack.device` in registers: bit streams to codes in f16, and codes to bit streams."""

from __future__ import annotations

import triton
import triton.language as tl

from ..spec import PLANES
from .device import pieces_of_group

_pieces = triton.constexpr_function(pieces_of_group)


@triton.constexpr_function
def n_pieces(run):
    """Pieces of a run of channels."""
    return len(_pieces(run))


@triton.constexpr_function
def piece_start(run, i):
    """First channel of a piece."""
    return _pieces(run)[i][0]


@triton.constexpr_function
def piece_width(run, i):
    """Channels of a piece."""
    return _pieces(run)[i][1]


@triton.constexpr_function
def n_planes(bits):
    """Bit planes of a width."""
    return len(PLANES[bits])


@triton.constexpr_function
def plane_width(bits, i):
    """Bits of a plane."""
    return PLANES[bits][i]


@triton.constexpr_function
def plane_shift(bits, i):
    """Lowest bit that a plane holds."""
    return sum(PLANES[bits][:i])


@triton.constexpr_function
def run_of(bits, channel, group, d):
    """Channels that pieces must not leave; see `pack.device.run_length`."""
    return d if bits == 16 or channel else group


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


@triton.jit
def pack(codes, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Units of one plane of one piece: int16 [TOKENS, CHANNELS * WIDTH / 16] from int32 codes [TOKENS, CHANNELS]."""
    PER: tl.constexpr = 16 // WIDTH
    parts = (codes >> SHIFT) & ((1 << WIDTH) - 1)
    parts = tl.reshape(parts, (TOKENS, CHANNELS // PER, PER)) << (tl.arange(0, PER) * WIDTH)[None, None, :]
    return tl.sum(parts, 2).to(tl.int16)
