"""Channel order, Hadamard rotation and learned matrices, all as one d x d matrix per head: the definition.

What is stored is `y = T (x - offset)`. A query that meets stored keys becomes `T^-T q`, so that `q . x` keeps its value
(up to `q . offset`, which is the same for every key and which softmax does not see). The attention sum over stored
values becomes `T^-1 o`, once per query.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_block(head_dim: int, limit: int | None = None) -> int:
    """The largest power of two that divides `head_dim` and is at most `limit` (channels)."""
    block = head_dim & -head_dim
    while limit is not None and block > limit:
        block //= 2
    return block


def hadamard_matrix(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normalized Sylvester-Hadamard matrix [n, n]: symmetric, orthogonal and its own inverse.

    Raises ValueError where `n` is no power of two.  Source: QuaRot, arXiv 2404.00456.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two, not {n}")
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h / n**0.5).to(dtype)


def transform_matrix(
    head_dim: int, *, order: Tensor | None = None, hadamard: int = 0, matrix: Tensor | None = None
) -> Tensor:
    """The matrix `T` of one head: float64 [head_dim, head_dim].

    order: int64 [head_dim], stored channel `i` is channel `order[i]`.  hadamard: block size, applied after the order;
    the matrix is block-diagonal where the block is smaller than the head.  matrix: a learned `T` [head_dim, head_dim],
    which excludes the other two.  Raises ValueError on sizes that do not fit or an order that is no permutation.
    """
    if matrix is not None:
        if order is not None or hadamard:
            raise ValueError("a learned matrix stands alone: it takes no order and no Hadamard block")
        if tuple(matrix.shape) != (head_dim, head_dim):
            raise ValueError(f"matrix must be [{head_dim}, {head_dim}], not {list(matrix.shape)}")
        return matrix.to(torch.float64)
    t = torch.eye(head_dim, dtype=torch.float64)
    if order is not None:
        if not torch.equal(order.sort().values, torch.arange(head_dim, dtype=order.dtype)):
            raise ValueError(f"order is not a permutation of 0..{head_dim - 1}")
        t = t[order.long()]
    if hadamard:
        if head_dim % hadamard:
            raise ValueError(f"Hadamard block {hadamard} does not divide the head size {head_dim}")
        h = hadamard_matrix(hadamard)
        t = torch.block_diag(*[h] * (head_dim // hadamard)) @ t
    return t


def invert(t: Tensor) -> Tensor:
    """Inverse of `T` [..., d, d]; exact (the transpose) where `T` is a permutation."""
    if bool(((t == 0) | (t == 1)).all()):
        return t.transpose(-1, -2).contiguous()
    return torch.linalg.inv(t)


def apply(x: Tensor, t: Tensor | None, offset: Tensor | None = None) -> Tensor:
    """`T (x - offset)` for every row.

    x: [n_head, n, d].  t: [n_head, d, d] or None for identity.  offset: [n_head, d] or None.  Returns [n_head, n, d].
    """
    if offset is not None:
        x = x - offset[:, None, :]
    return x if t is None else x @ t.transpose(-1, -2)
