"""How a text is cut and which positions are scored: llama-perplexity's protocol, so that figures can be compared.

The text is tokenized once (with BOS where the model adds one) and cut into windows of `n_ctx` tokens that do not
overlap; BOS is written over the first token of each window. The second half of each window is scored: position `i`
predicts token `i + 1` for `i` from `n_ctx // 2` to `n_ctx - 2`. What is left at the end is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrun.errors import KvError

#: Smallest window: one scored position.
MIN_CTX = 4

#: Logits alive at once, per setting: 128 MiB in float32.
_LOGIT_VALUES = 1 << 25


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. stop - 1` of a window, fed at once; `scored` when their logits are needed."""

    start: int
    stop: int
    scored: bool


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a text. tokens: int64 [n_windows, n_ctx]."""

    tokens: np.ndarray

    @property
    def n_ctx(self) -> int:
        """Tokens per window."""
        return int(self.tokens.shape[1])

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def first(self) -> int:
        """First scored position of each window."""
        return self.n_ctx // 2

    @property
    def n_scored(self) -> int:
        """Scored positions over all windows."""
        return len(self) * (self.n_ctx - 1 - self.first)

    def chunks(self, n_ubatch: int, n_vocab: int) -> Iterator[Chunk]:
        """How a window is fed: at most `n_ubatch` tokens at a time, cut where the scored half begins.

        Scored chunks are shorter where `n_vocab` is large, so that the logits alive stay small. What a query sees does
        not depend on the cuts (`kvrun.visibility`).
        """
        if n_ubatch < 1:
            raise ValueError("n_ubatch must be positive")
        step_scored = max(1, min(n_ubatch, _LOGIT_VALUES // n_vocab))
        for begin, end, step, scored in ((0, self.first, n_ubatch, False), (self.first, self.n_ctx, step_scored, True)):
            for start in range(begin, end, step):
                yield Chunk(start, min(start + step, end), scored)

    def row_of(self, window: int, chunk: Chunk) -> int:
        """Number of the first position of a scored chunk, counted over the scored positions of all windows."""
        return window * (self.n_ctx - 1 - self.first) + chunk.start - self.first

    def targets(self, window: int, chunk: Chunk) -> np.ndarray:
        """The tokens that a scored chunk's positions predict: int64 [n], one less than the chunk at the very end."""
        following: np.ndarray = self.tokens[window, chunk.start + 1 : chunk.stop + 1]
        return following


def cut(tokens: Sequence[int], n_ctx: int, *, bos: int | None, limit: int | None = None) -> Windows:
    """Cut `tokens` into windows.

    bos: written over the first token of each window, None when the model adds none.
    limit: at most so many windows; None or a negative number takes all.
    Raises KvError when the text is shorter than one window.
    """
    if n_ctx < MIN_CTX:
        raise KvError(f"a context of {n_ctx} tokens leaves nothing to score; use -c {MIN_CTX} or more")
    n_windows = len(tokens) // n_ctx
    if n_windows == 0:
        raise KvError(
            f"the text has {len(tokens)} tokens, less than one window of {n_ctx}; use a longer text or a smaller "
            f"context (-c {max(MIN_CTX, len(tokens))} or less)"
            if len(tokens) >= MIN_CTX
            else f"the text has {len(tokens)} tokens, less than one window of {n_ctx}; use a longer text (-f)"
        )
    if limit is not None and limit >= 0:
        if limit == 0:
            raise KvError("--chunks 0 measures nothing; use 1 or more, or -1 for the whole text")
        n_windows = min(n_windows, limit)
    array = np.array(tokens[: n_windows * n_ctx], dtype=np.int64).reshape(n_windows, n_ctx)
    if bos is not None:
        array[:, 0] = bos
    return Windows(array)
