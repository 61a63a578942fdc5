"""What logits say about a cache: perplexity, KL divergence from reference logits, and the share of equal top choices.

Logits arrive a batch at a time and are dropped at once; only scalars per token are kept, so that medians and
percentiles are exact. numpy alone: the child process that runs llama.cpp uses the same code and has no torch.

All sums run in float64, a few rows at a time: a KL divergence of 1e-9 must not drown in the rounding of a softmax over
150 000 entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrun.errors import MeasurementError

if TYPE_CHECKING:
    from kvrun.evaluation.stored import StoredRows

#: Values handled at once: float64 temporaries of 4 MiB stay in the CPU's cache.
_BLOCK_VALUES = 1 << 19


@dataclass(frozen=True)
class Summary:
    """Statistics over scored tokens, `*_se` are standard errors of the mean; KL figures are None without a reference.

    n: tokens.  ppl: perplexity.  kld_*: KL divergence in nats per token from the reference.  same_top: share, 0 to 1.
    ln_ppl_ratio: mean of `log p_reference(token) - log p(token)`, paired token by token.
    rms_dp: root mean square of `p(token) - p_reference(token)`, 0 to 1; llama-perplexity's RMS of delta p.
    """

    n: int
    ppl: float
    ppl_se: float
    kld_mean: float | None = None
    kld_mean_se: float | None = None
    kld_median: float | None = None
    kld_p90: float | None = None
    kld_p99: float | None = None
    kld_p999: float | None = None
    kld_max: float | None = None
    same_top: float | None = None
    same_top_se: float | None = None
    ln_ppl_ratio: float | None = None
    ln_ppl_ratio_se: float | None = None
    rms_dp: float | None = None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64. logits: any float [n, n_vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


class TokenScores:
    """Scores of tokens, fed a batch of logits at a time; keeps scalars per token and never the logits.

    nll, kld, nll_reference, same_top, confidence: float64 / bool [n] so far, in the order they were added; all but
    `nll` are empty when there is no reference.
    """

    def __init__(self) -> None:
        self._nll: list[np.ndarray] = []
        self._nll_reference: list[np.ndarray] = []
        self._kld: list[np.ndarray] = []
        self._same_top: list[np.ndarray] = []
        self._confidence: list[np.ndarray] = []

    def add(self, logits: np.ndarray, targets: np.ndarray, reference: np.ndarray | StoredRows | None = None) -> None:
        """Score a batch.

        logits: float [n, n_vocab].  targets: int [n], the token that follows each position.
        reference: the same positions by the reference, as logits float [n, n_vocab] or as they were kept on disk; give
            it always or never.
        Raises MeasurementError for logits that are not finite: no statistic of them would mean anything.
        """
        if logits.ndim != 2 or len(targets) != len(logits):
            raise ValueError(f"logits must be [n, n_vocab] with n targets, not {logits.shape} with {len(targets)}")
        if reference is not None:
            shape = reference.shape if isinstance(reference, np.ndarray) else (len(reference), reference.n_vocab)
            if shape != logits.shape:
                raise ValueError(f"reference logits are {shape}, the logits {logits.shape}")
        if self._nll and (reference is None) != (not self._kld):
            raise ValueError("give reference logits for every batch or for none")
        rows = max(1, _BLOCK_VALUES // max(1, logits.shape[1]))
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            self._add_block(logits[part], np.asarray(targets[part]), None if reference is None else reference[part])

    def _add_block(self, logits: np.ndarray, targets: np.ndarray, reference: np.ndarray | StoredRows | None) -> None:
        index = np.arange(len(logits))
        log_q = log_softmax(logits)
        nll = -log_q[index, targets]
        if not np.isfinite(nll).all():
            raise MeasurementError(
                "the model's output is not finite (NaN or infinity): the weights or the cache are damaged; "
                "check the file, and try an f16 cache"
            )
        if reference is not None:
            if isinstance(reference, np.ndarray):
                log_p = log_softmax(reference)
                nll_reference = -log_p[index, targets]
                probability = np.exp(log_p)
                confidence, best = probability.max(axis=1), reference.argmax(axis=1)
                log_p -= log_q
                kld = np.einsum("ij,ij->i", probability, log_p)
            else:
                nll_reference, kld = -reference.log_p_target, reference.kld(log_q)
                confidence, best = reference.confidence, reference.argmax
            if not (np.isfinite(kld).all() and np.isfinite(nll_reference).all()):
                raise MeasurementError("the reference logits are not finite; check the model file")
            self._kld.append(kld)
            self._nll_reference.append(nll_reference)
            self._same_top.append(logits.argmax(axis=1) == best)
            self._confidence.append(confidence)
        self._nll.append(nll)

    @property
    def nll(self) -> np.ndarray:
        """Negative log-probability of the right token, float64 [n]."""
        return _join(self._nll)

    @property
    def nll_reference(self) -> np.ndarray:
        """The same by the reference logits."""
        return _join(self._nll_reference)

    @property
    def kld(self) -> np.ndarray:
        """KL divergence of this distribution from the reference, float64 [n] in nats."""
        return _join(self._kld)

    @property
    def same_top(self) -> np.ndarray:
        """Whether both have the same most probable token, bool [n]."""
        return _join(self._same_top).astype(bool)

    @property
    def confidence(self) -> np.ndarray:
        """Probability that the reference gives its most probable token, float64 [n]."""
        return _join(self._confidence)

    def as_dict(self) -> dict[str, list[Any]]:
        """Everything per token as plain lists, to be sent to another process."""
        names = ("nll", "nll_reference", "kld", "same_top", "confidence")
        return {name: getattr(self, name).tolist() for name in names}

    @classmethod
    def from_dict(cls, values: dict[str, list[Any]]) -> TokenScores:
        """The scores that `as_dict` was made of."""
        scores = cls()
        for name in ("nll", "nll_reference", "kld", "same_top", "confidence"):
            if values.get(name):
                getattr(scores, f"_{name}").append(np.asarray(values[name]))
        return scores

    def __len__(self) -> int:
        return sum(len(part) for part in self._nll)

    @property
    def ppl(self) -> float:
        """Perplexity so far: what a running line shows."""
        return _exp(float(self.nll.mean())) if len(self) else math.nan

    def summary(self) -> Summary:
        """Statistics of everything added so far. Raises MeasurementError when nothing was."""
        if not len(self):
            raise MeasurementError("no position was scored; use a longer text or a smaller context (-c)")
        nll = self.nll
        ppl = _exp(float(nll.mean()))
        if not self._kld:
            return Summary(len(nll), ppl, ppl * standard_error(nll))
        kld, same = self.kld, self.same_top.astype(np.float64)
        ratio = nll - self.nll_reference
        median, p90, p99, p999 = (float(q) for q in np.quantile(kld, (0.5, 0.9, 0.99, 0.999)))
        return Summary(
            n=len(nll),
            ppl=ppl,
            ppl_se=ppl * standard_error(nll),
            kld_mean=float(kld.mean()),
            kld_mean_se=standard_error(kld),
            kld_median=median,
            kld_p90=p90,
            kld_p99=p99,
            kld_p999=p999,
            kld_max=float(kld.max()),
            same_top=float(same.mean()),
            same_top_se=standard_error(same),
            ln_ppl_ratio=float(ratio.mean()),
            ln_ppl_ratio_se=standard_error(ratio),
            rms_dp=float(np.sqrt(np.square(np.exp(-nll) - np.exp(-self.nll_reference)).mean())),
        )


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of independent values; 0 for a single one. llama-perplexity's `+/-` is the same."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
