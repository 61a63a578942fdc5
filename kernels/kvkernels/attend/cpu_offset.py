"""The rotating key offset in the compiled attention: what scores gain, as more channels of queries and of the tile.

The gain of a score is a sum over pairs of channels of `cos(s f) a + sin(s f) b`, where `a` and `b` are made once for a
query (see `kvkernels.rope_offset`) and `s` is the position of the key. With `s = base + r`, `base` the first position
of a tile, the addition theorems split it:

    cos(r f) (a cos(base f) + b sin(base f)) + sin(r f) (b cos(base f) - a sin(base f)).

So a tile turns the `n_rot` numbers of a query by one row of the table of angles, appends them to the query, and meets
them with the cosines and sines of `r f`, which are the same for every tile and lie below the keys in its memory. The
core multiplies `d_k + n_rot` channels in place of `d_k` and knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..jit import F32, Emitter, Val, host_target, vec
from ..pack.cpu import PAGE
from ..rope_offset import RopeStyle, pairs


@dataclass(frozen=True)
class RotatingOffset:
    """The offsets of one layer's keys and the angles that they turn by.

    offset: float32 [n_kv, d_k], in terms of keys before RoPE; a head of zeros has none and costs nothing.
    angles: float32 [at least n_ctx, n_rot], as `rope_offset.turned_offset` takes them.
    fine: float32 [n_rot, 32]: the cosines and then the sines of `r f` for r = 0 .. 31, without any magnitude.
    """

    offset: torch.Tensor
    angles: torch.Tensor
    fine: torch.Tensor
    style: RopeStyle

    def __post_init__(self) -> None:
        if self.fine.shape != (self.n_rot, PAGE) or any(
            x.dtype != torch.float32 or not x.is_contiguous() for x in (self.angles, self.fine)
        ):
            raise ValueError(f"angles must be float32 [n, n_rot] and fine float32 [n_rot, {PAGE}], contiguous")

    @property
    def n_rot(self) -> int:
        """Channels that RoPE turns."""
        return self.angles.shape[1]

    def means(self) -> list[np.ndarray | None]:
        """Per head: the first and then the second channel of every pair, float32 [n_rot]; None where there is none."""
        first, second = pairs(self.offset.float(), self.n_rot, self.style)
        rows = torch.cat([first, second], -1).numpy()
        return [np.ascontiguousarray(row) if row.any() else None for row in rows]


def blocks(n: int) -> list[tuple[int, int]]:
    """(first, count) of vectors that cover `n` numbers."""
    width = min(host_target().lanes, 16)
    return [(c, min(width, n - c)) for c in range(0, n, width)]


def write_pair_terms(e: Emitter, q: Val, mean: Val, scale: Val, out: Val, n_rot: int, style: RopeStyle) -> None:
    """`a` and then `b` of every pair, times the softmax scale: q float32 [d_k], mean and out float32 [n_rot]."""
    half = n_rot // 2
    for c, n in blocks(half):
        t = vec(F32, n)
        if style == "interleaved":
            both = e.load(vec(F32, 2 * n), q + 8 * c)
            q1, q2 = both.shuffle(list(range(0, 2 * n, 2))), both.shuffle(list(range(1, 2 * n, 2)))
        else:
            q1, q2 = e.load(t, q + 4 * c), e.load(t, q + 4 * (half + c))
        factor = scale.splat(n)
        m1, m2 = (e.load(t, mean + 4 * at) * factor for at in (c, half + c))
        e.store(e.fma(q1, m1, q2 * m2), out + 4 * c)
        e.store(q2 * m1 - q1 * m2, out + 4 * (half + c))


def write_turned(e: Emitter, terms: Val, angles: Val, out: Val, n_rot: int) -> None:
    """The terms of one query, turned to a tile's first position: angles is that position's row."""
    half = n_rot // 2
    for c, n in blocks(half):
        t = vec(F32, n)
        (a, b), (cos, sin) = ([e.load(t, x + 4 * at) for at in (c, half + c)] for x in (terms, angles))
        e.store(e.fma(a, cos, b * sin), out + 4 * c)
        e.store(b * cos - a * sin, out + 4 * (half + c))
