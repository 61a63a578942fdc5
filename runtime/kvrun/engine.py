"""The reference engine: token ids in, logits out, with every key and value read through the packed cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from .cache import KVCache
from .errors import KvError
from .plan import CachePlan

if TYPE_CHECKING:
    from .models import Model

Wanted = Literal["none", "last", "all"]

#: `block_rows` of a model whose results must not depend on how a text is cut into chunks (see `Engine`).
CHUNK_INVARIANT_ROWS = 64


class Stopped(Exception):
    """`should_stop` said so between two chunks; the cache holds the chunks that were finished."""


class Engine:
    """Runs a model in torch, on the CPU, in float32 (or float64 for proofs).

    It knows token ids and nothing of text. A chunk is final only when every layer has taken it: a chunk that is
    interrupted leaves the cache as it was.

    What a query sees does not depend on how the text was cut into chunks, but in float32 the last bit of a product
    does, a last bit can flip a code, and flips spread. With a model loaded with `block_rows=CHUNK_INVARIANT_ROWS` the
    products with weights are made in blocks of one size and attention is computed in float64, and the chunks do not
    show. Evaluation runs so; it costs a fifth for long chunks and most of the speed of single tokens.
    """

    name = "reference"

    def __init__(self, model: Model, *, dtype: torch.dtype = torch.float32) -> None:
        if model.dtype != dtype:
            raise ValueError(f"the model computes in {model.dtype}, not {dtype}")
        self.model = model
        self.dtype = dtype

    def new_cache(self, plan: CachePlan, n_ctx: int) -> KVCache:
        """An empty cache for `n_ctx` tokens."""
        self.model.set_context(n_ctx)
        dtype = torch.float64 if self.model.weights.block_rows else self.dtype
        return KVCache(plan, n_ctx, dtype, rope_of=self.model.rope_of)

    def _tokens(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        if ids.ndim != 1 or ids.numel() == 0:
            raise ValueError("a chunk needs at least one token")
        n_vocab = self.model.config.n_vocab
        if int(ids.min()) < 0 or int(ids.max()) >= n_vocab:
            raise KvError(f"a token id is outside the vocabulary of {n_vocab}; the tokenizer belongs to another model")
        return ids

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], cache: KVCache, *, logits: Wanted = "last") -> Tensor:
        """Append `tokens` to the cache as one chunk.

        Returns logits [n_out, n_vocab] in the engine's dtype: of all tokens, of the last one, or of none.
        """
        ids = self._tokens(tokens)
        positions = torch.arange(cache.n_tokens, cache.n_tokens + len(ids))

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.to(cache.dtype) for x in (q, k, v))
            scale, softcap = self.model.attention_scale(il), self.model.attention_softcap
            return cache.attend(il, q, k, v, scale, softcap).to(self.dtype)

        x = self._blocks(ids, positions, attend)
        cache.commit(len(ids))
        if logits == "none":
            return x.new_empty(0, self.model.config.n_vocab)
        return self.model.output(x if logits == "all" else x[-1:])

    def stream(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        *,
        n_ubatch: int = 512,
        logits: Wanted = "all",
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Append `tokens` chunk by chunk; yields (index of the chunk's first token, its logits).

        Only one chunk of logits exists at a time. Raises `Stopped` between chunks when `should_stop` says so.
        """
        if n_ubatch < 1:
            raise ValueError("n_ubatch must be 1 or more")
        for first in range(0, len(tokens), n_ubatch):
            if should_stop is not None and should_stop():
                raise Stopped
            yield first, self.forward(tokens[first : first + n_ubatch], cache, logits=logits)

    def prefill(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        *,
        n_ubatch: int = 512,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Append `tokens` chunk by chunk; returns the logits after the last one, [1, n_vocab].

        on_progress: called with the number of tokens done after each chunk.
        """
        if len(tokens) == 0:
            raise ValueError("a prompt needs at least one token")
        for first in range(0, len(tokens), n_ubatch):
            if should_stop is not None and should_stop():
                raise Stopped
            chunk = tokens[first : first + n_ubatch]
            out = self.forward(chunk, cache, logits="last" if first + n_ubatch >= len(tokens) else "none")
            if on_progress is not None:
                on_progress(first + len(chunk))
        return out

    @torch.inference_mode()
    def forward_bypassing_cache(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, n_vocab] of a plain forward pass whose attention reads no cache at all.

        This is the mistake behind many published figures: whatever the cache type, the result is the same. It exists
        to show that, and as the full-precision reference of the calibrator.
        """
        ids = self._tokens(tokens)

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.model.plain_attention(il, q, k, v)

        return self.model.output(self._blocks(ids, torch.arange(len(ids)), attend))

    @torch.inference_mode()
    def observe(self, tokens: Sequence[int], n_ctx: int, see: Callable[[int, Tensor, Tensor], None]) -> None:
        """Show the keys and values of every layer, [n_head_kv, n, head_dim] after RoPE, as a cache would be given them.

        n_ctx: of the context that the tokens are thought of as the beginning of.
        """
        ids = self._tokens(tokens)
        self.model.set_context(n_ctx)

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            see(il, k, v)
            return self.model.plain_attention(il, q, k, v)

        self._blocks(ids, torch.arange(len(ids)), attend)

    def _blocks(
        self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        x = self.model.embed(ids)
        for il in range(self.model.config.n_layer):
            x = self.model.block(il, x, positions, attend)
        return x
