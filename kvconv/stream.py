"""Keys and values of a whole text, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvrun.models import Model

#: Chunks go through a layer together as long as they hold no more tokens than this.
BATCH_TOKENS = 2048


class LayerRecord:
    """Attention of one layer over independent chunks, which keeps the keys and values that it saw.

    keys, values: float32 [n_head_kv, n_chunk, chunk_tokens, head_dim], keys after RoPE.
    """

    def __init__(self, model: Model, il: int, n_chunk: int, chunk_tokens: int) -> None:
        self.model, self.chunk_tokens = model, chunk_tokens
        shape = model.config.geometry[il]
        self.keys = torch.empty(shape.n_head_kv, n_chunk, chunk_tokens, shape.head_dim_k)
        self.values = torch.empty(shape.n_head_kv, n_chunk, chunk_tokens, shape.head_dim_v)

    def attend_at(self, first: int, stop: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """`attend` for `Model.block` when chunks `first .. stop - 1` come in, one after the other in one sequence."""
        length = self.chunk_tokens

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[:, first:stop] = k.unflatten(1, (stop - first, length))
            self.values[:, first:stop] = v.unflatten(1, (stop - first, length))
            chunks = zip(q.split(length, 1), k.split(length, 1), v.split(length, 1), strict=True)
            return torch.cat([self.model.plain_attention(il, *chunk) for chunk in chunks], 1)

        return attend


def stream(model: Model, tokens: Tensor, positions: Tensor) -> Iterator[LayerRecord]:
    """Every layer's keys and values in turn; each chunk is a sequence of its own with full-precision attention.

    tokens, positions: int64 [n_chunk, chunk_tokens].  Between layers only the hidden states of all chunks are kept.
    """
    n_chunk, length = tokens.shape
    step = max(1, BATCH_TOKENS // length)
    x = torch.cat([model.embed(row) for row in tokens])
    for il in range(model.config.n_layer):
        record = LayerRecord(model, il, n_chunk, length)
        for first in range(0, n_chunk, step):
            stop = min(first + step, n_chunk)
            rows = slice(first * length, stop * length)
            x[rows] = model.block(il, x[rows], positions[first:stop].flatten(), record.attend_at(first, stop))
        model.weights.release()
        yield record
