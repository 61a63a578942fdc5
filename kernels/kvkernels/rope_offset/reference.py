"""The rotating key offset: the definition.

A key is `R_s x` with `x` its vector before RoPE and `R_s` the turn at its position `s`. With `mu` the mean of `x`,
`R_s x - R_s mu` is what gets stored, and it has no mean at any position; a constant offset removes only what RoPE
leaves of it on average. Softmax sees the difference, so a score gains

    q . R_s mu = sum over pairs of  cos(s f) (q1 m1 + q2 m2) + sin(s f) (q2 m1 - q1 m2),

which depends on the query and the position alone: two numbers per pair and query, and one product with a table of
angles that all heads and layers share. Nothing is kept per token.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: Which channels are turned together: (0, 1), (2, 3), ... or (i, i + n_rot / 2).
RopeStyle = Literal["interleaved", "neox"]


def pairs(x: Tensor, n_rot: int, style: RopeStyle) -> tuple[Tensor, Tensor]:
    """First and second channel of every pair that is turned: two views [..., n_rot / 2] of x [..., d]."""
    if style == "interleaved":
        return x[..., 0:n_rot:2], x[..., 1:n_rot:2]
    return x[..., : n_rot // 2], x[..., n_rot // 2 : n_rot]


def turned_offset(offset: Tensor, angles: Tensor, style: RopeStyle) -> Tensor:
    """`R_s mu` for every position of a table.

    offset: [n_head, d], `mu`; channels beyond the turned ones stay as they are.
    angles: [n, n_rot], the cosines of a position's `n_rot / 2` angles and then their sines.
    Returns [n_head, n, d].
    """
    n, n_rot = angles.shape
    cos, sin = angles.chunk(2, -1)
    first, second = (part[:, None, :] for part in pairs(offset, n_rot, style))
    out = offset[:, None, :].repeat(1, n, 1)
    turned = pairs(out, n_rot, style)
    turned[0].copy_(first * cos - second * sin)
    turned[1].copy_(first * sin + second * cos)
    return out


def offset_scores(q: Tensor, offset: Tensor, angles: Tensor, style: RopeStyle) -> Tensor:
    """What the scores of stored keys lack: `q . R_s mu`, up to a number that is the same for every position.

    q: [n_head, n_q, d] after RoPE, before any transform; neighbouring query heads share a KV head.
    offset: [n_head_kv, d].  angles: [n, n_rot] as in `turned_offset`.  Returns [n_head, n_q, n].
    """
    n_rot = angles.shape[1]
    group = q.shape[0] // offset.shape[0]
    m1, m2 = (part.repeat_interleave(group, 0)[:, None, :] for part in pairs(offset, n_rot, style))
    q1, q2 = pairs(q, n_rot, style)
    return torch.cat([q1 * m1 + q2 * m2, q2 * m1 - q1 * m2], -1) @ angles.T
