"""Pages: the packed layout of the CPU kernels, made so that no kernel ever sums across a vector.

A page holds 32 tokens of one head. Keys meet queries channel by channel, so a vector's lanes are tokens:

- keys: a token's `d` codes of one plane (see `kvkernels.spec.PLANES`) are a little-endian bit stream, cut into words of
  32 bits and a rest of 0 to 3 bytes. A page is `uint32 [words, 32]`, then `uint8 [rest, 32]`, plane after plane.

Values are summed token by token, so a vector's lanes are channels:

- values: a channel's 32 codes of one plane of `w` bits are a little-endian bit stream of `w` words. A page is
  `uint32 [w, d]`, plane after plane.

Either way 32 tokens take `4 d bits` bytes, as much as in the reference layout. 16-bit heads hold f16, `[d, 32]` for
keys and `[32, d]` for values. Scales and minima: f16 `[page, d / group, 32]` on the token axis, `[block of tokens, d]`
on the channel axis.
"""

from __future__ import annotations

from ..jit import I8, I32, Emitter, Val, vec
from ..spec import PLANES, QuantSpec

PAGE = 32


def page_bytes(d: int, bits: int) -> int:
    """Bytes of one page of codes of a head with `d` channels."""
    return PAGE * d * bits // 8


def planes(d: int, bits: int) -> list[tuple[int, int, int]]:
    """(width, lowest bit, byte offset in the page) of each plane."""
    out, shift, offset = [], 0, 0
    for width in PLANES[bits]:
        out.append((width, shift, offset))
        shift += width
        offset += PAGE * d * width // 8
    return out


def squeeze(codes: Val, width: int) -> Val:
    """A little-endian bit stream as bytes: codes <n x i8> below 2^width, n a multiple of 8 / width."""
    n = codes.type.count
    while width < 8:
        even, odd = codes.shuffle(range(0, n, 2)), codes.shuffle(range(1, n, 2))
        codes = even | (odd << width)
        width, n = width * 2, n // 2
    return codes


def store_key(e: Emitter, codes: Val, page: Val, lane: Val, spec: QuantSpec, d: int) -> None:
    """Store one token's codes <d x i8> in a page of keys; lane: int64, the token's place in it."""
    spill = e.scratch(d)
    for width, shift, offset in planes(d, spec.bits):
        part = (codes >> shift) & (2**width - 1)
        stream = squeeze(part, width)
        e.store(stream, spill, 64)
        n_bytes = d * width // 8
        for word in range(n_bytes // 4):
            value = e.load(I32, spill + 4 * word)
            e.store(value, page + (lane << 2) + (offset + word * 4 * PAGE))
        rest = offset + n_bytes // 4 * 4 * PAGE
        for i in range(n_bytes % 4):
            value = e.load(I8, spill + (n_bytes // 4 * 4 + i))
            e.store(value, page + lane + (rest + i * PAGE))


def store_value(e: Emitter, codes: Val, page: Val, lane: Val, spec: QuantSpec, d: int) -> None:
    """Store one token's codes <d x i8> in a page of values; lane: int64, the token's place in it."""
    for width, shift, offset in planes(d, spec.bits):
        per_word = 32 // width
        at = page + (lane // per_word) * (4 * d) + offset
        bit = ((lane % per_word) * width).to(I32)
        part = ((codes >> shift) & (2**width - 1)).to(I32)
        words = e.load(vec(I32, d), at)
        mask = (e.const(I32, 2**width - 1) << bit).splat(d)
        e.store((words & ~mask) | (part << bit.splat(d)), at)


def key_codes(e: Emitter, page: Val, channel: int, spec: QuantSpec, d: int, first: int, n: int) -> Val:
    """Codes <n x i32> of tokens `first ..` of a page of keys, one channel."""
    out: Val | None = None
    for width, shift, offset in planes(d, spec.bits):
        byte, bit = divmod(channel * width, 8)
        n_words = d * width // 32
        if byte < n_words * 4:
            bit += byte % 4 * 8
            stored = e.load(vec(I32, n), page + (offset + (byte // 4) * 4 * PAGE + 4 * first), 4)
            top = 32
        else:
            at = offset + n_words * 4 * PAGE + (byte - n_words * 4) * PAGE + first
            stored = e.load(vec(I8, n), page + at, 1).to(I32)
            top = 8
        code = stored >> bit if bit else stored
        if bit + width < top:
            code = code & (2**width - 1)
        code = code << shift if shift else code
        out = code if out is None else out | code
    assert out is not None
    return out


def value_codes(e: Emitter, page: Val, token: int, spec: QuantSpec, d: int, channel: Val, n: int) -> Val:
    """Codes <n x i32> of channels `channel ..` (int64) of a page of values, one token."""
    out: Val | None = None
    for width, shift, offset in planes(d, spec.bits):
        word, place = divmod(token, 32 // width)
        bit = place * width
        stored = e.load(vec(I32, n), page + (channel << 2) + (offset + word * 4 * d))
        code = stored >> bit if bit else stored
        if bit + width < 32:
            code = code & (2**width - 1)
        code = code << shift if shift else code
        out = code if out is None else out | code
    assert out is not None
    return out
