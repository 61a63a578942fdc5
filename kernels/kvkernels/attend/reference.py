"""Attention over a packed cache: the definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..store import PackedStore


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer as some queries see them, in the transformed space in which they are stored.

    store: the packed tokens; its token 0 is at position `start`.
    packed_end: int64 [n_q], for each query the position after the last token that it sees packed (>= start).
    full: float16 [n_head_kv, n_full, d], tokens in full precision.  full_positions: int64 [n_full].
    restored: [n_head_kv, n, d], what `store.read` gives for at least the packed tokens that are seen; None reads them.
        A caller that attends slice by slice restores them once.
    first: int64 [n_q], for each query the position of the first token that it sees; None is 0 for all.
    A query at position `t` sees the token at position `first <= j <= t` packed if `start <= j < packed_end`, else in
    full.
    """

    store: PackedStore
    start: int
    packed_end: Tensor
    full: Tensor
    full_positions: Tensor
    restored: Tensor | None = None
    first: Tensor | None = None

    def read(self, n_packed: int, dtype: torch.dtype) -> Tensor:
        """Restored values of the first `n_packed` packed tokens, [n_head_kv, n_packed, d]."""
        return self.store.read(n_packed, dtype) if self.restored is None else self.restored[:, :n_packed]

    def packed_mask(self) -> Tensor:
        """bool [n_q, n_packed]: which packed tokens each query sees; n_packed is what the farthest query sees."""
        n = int(self.packed_end.max()) - self.start
        j = torch.arange(self.start, self.start + n)[None, :]
        return self._from_first(j, j < self.packed_end[:, None])

    def full_mask(self, positions: Tensor) -> Tensor:
        """bool [n_q, n_full]: which full-precision tokens the queries at `positions` [n_q] see."""
        j = self.full_positions[None, :]
        in_packed = (j >= self.start) & (j < self.packed_end[:, None])
        return self._from_first(j, (j <= positions[:, None]) & ~in_packed)

    def _from_first(self, j: Tensor, seen: Tensor) -> Tensor:
        return seen if self.first is None else seen & (j >= self.first[:, None])

    def packed_reads(self) -> int:
        """How many packed tokens the queries see in all."""
        begin = torch.tensor(self.start) if self.first is None else self.first.clamp(min=self.start)
        return int((self.packed_end - begin).clamp(min=0).sum())


def attend(
    q: Tensor,
    k: Side,
    v: Side,
    positions: Tensor,
    scale: float,
    bias: Tensor | None = None,
    *,
    softcap: float = 0.0,
) -> Tensor:
    """Softmax attention of `n_q` queries, each over what it sees.

    q: [n_head, n_q, d_k], transformed for the stored keys; n_head is a multiple of n_head_kv, and neighbouring query
    heads share a KV head.  positions: int64 [n_q].  scale: multiplies the scores.
    bias: [n_head, n_q, n], added to the scores of the tokens at positions 0 to n - 1, the last query's; None is none.
    softcap: scores `s` become `softcap * tanh(s / softcap)` (arXiv 2408.00118); 0 leaves them.
    Returns [n_head, n_q, d_v] in the stored space of the values; the caller applies `T^-1`.
    """
    n_head, n_q, _ = q.shape
    n_kv = k.store.n_head
    rows = n_head // n_kv * n_q
    n_tokens = int(positions.max()) + 1
    grouped = q.reshape(n_kv, rows, -1)

    scores = torch.full((n_kv, n_head // n_kv, n_q, n_tokens), -torch.inf, dtype=q.dtype)
    packed = k.packed_mask()
    n_packed = packed.shape[1]
    if n_packed:
        part = (grouped @ k.read(n_packed, q.dtype).transpose(1, 2)).view(n_kv, -1, n_q, n_packed)
        scores[..., k.start : k.start + n_packed] = torch.where(packed, part, -torch.inf)
    full = k.full_mask(positions)
    if full.shape[1]:
        part = (grouped @ k.full.to(q.dtype).transpose(1, 2)).view(n_kv, -1, n_q, full.shape[1])
        # Each visible token is either packed or full, so the larger of the two is the one that is not masked.
        at = k.full_positions
        scores[..., at] = torch.maximum(scores[..., at], torch.where(full, part, -torch.inf))

    if bias is not None:
        scores += bias.view(scores.shape)
    weights = torch.softmax(soft_capped(scores * scale, softcap), dim=-1)
    out = torch.zeros(n_kv, rows, v.store.head_dim, dtype=q.dtype)
    packed = v.packed_mask()
    n_packed = packed.shape[1]
    if n_packed:
        part = weights[..., v.start : v.start + n_packed] * packed
        out += part.reshape(n_kv, rows, n_packed) @ v.read(n_packed, q.dtype)
    full = v.full_mask(positions)
    if full.shape[1]:
        part = weights[..., v.full_positions] * full
        out += part.reshape(n_kv, rows, full.shape[1]) @ v.full.to(q.dtype)
    return out.view(n_head, n_q, -1)


def soft_capped(scores: Tensor, softcap: float) -> Tensor:
    """`softcap * tanh(scores / softcap)`, where -inf, which masks a token, stays; 0 leaves all as they are."""
    if not softcap:
        return scores
    return torch.where(scores == -torch.inf, scores, softcap * torch.tanh(scores / softcap))
