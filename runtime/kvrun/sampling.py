"""Choosing the next token: top-k, top-p, min-p, temperature, in llama.cpp's order and with its defaults.

top-k: Fan et al. 2018, "Hierarchical Neural Story Generation".  top-p: Holtzman et al. 2019, "The Curious Case of
Neural Text Degeneration".  min-p: Nguyen et al. 2024, "Turning Up the Heat".  Each filter sees the probabilities that
the filters before it left, renormalized, and the temperature comes last, as in llama.cpp.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrun.errors import KvError


@dataclass(frozen=True)
class SamplingOptions:
    """top_k: 0 keeps all.  top_p: 1 keeps all.  min_p: 0 keeps all.  temp: 0 is greedy.  seed: -1 draws one."""

    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    temp: float = 0.8
    seed: int = -1


class Sampler:
    """Draws tokens. `seed` is the seed in use, also where it was drawn."""

    def __init__(self, options: SamplingOptions | None = None) -> None:
        self.options = options or SamplingOptions()
        self.seed = self.options.seed if self.options.seed >= 0 else secrets.randbits(32)
        self._random = np.random.default_rng(self.seed)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.options.temp <= 0

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [m] of the tokens that are left, likeliest first, and their probabilities float64 [m].

        logits: [n_vocab]. Equal logits are ordered by id.
        """
        ids = _top_k(logits, self.options.top_k)
        kept = logits[ids].astype(np.float64)
        if self.options.top_p < 1:
            # the token that reaches the share is the last one in
            n = 1 + int(np.searchsorted(np.cumsum(_softmax(kept)), self.options.top_p))
            ids, kept = ids[:n], kept[:n]
        if self.options.min_p > 0:
            n = int(np.count_nonzero(kept >= kept[0] + np.log(self.options.min_p)))
            ids, kept = ids[:n], kept[:n]
        if self.greedy:
            return ids[:1], np.ones(1)
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, and so probability 0, is the right limit
            return ids, _softmax((kept - kept[0]) / self.options.temp)

    def sample(self, logits: Any) -> int:
        """The next token. logits: [n_vocab] or [1, n_vocab], tensor or array. Raises KvError if they are not finite."""
        values = np.asarray(logits).reshape(-1)
        best = int(np.argmax(values))
        if not np.isfinite(values[best]):
            raise KvError("the model computed logits that are not finite; the file is damaged or not supported")
        if self.greedy:
            return best
        ids, probabilities = self.candidates(values)
        return int(self._random.choice(ids, p=probabilities))


def _top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the `k` largest logits, largest first, equal ones by id; all of them for k <= 0."""
    if 0 < k < len(logits):
        threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
        above = np.flatnonzero(logits > threshold)
        ids = np.concatenate([above, np.flatnonzero(logits == threshold)[: k - len(above)]])
    else:
        ids = np.arange(len(logits))
    return ids[np.lexsort((ids, -logits[ids]))]


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
