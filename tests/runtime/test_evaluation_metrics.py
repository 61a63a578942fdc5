"""Statistics of logits, against the formulas written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvrun.errors import MeasurementError
from kvrun.evaluation.metrics import TokenScores, log_softmax, standard_error

N, VOCAB = 203, 331


def written_out(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, one row and one entry at a time."""
    out = np.empty(logits.shape)
    for i, row in enumerate(logits.astype(np.float64)):
        total = math.fsum(math.exp(x - row.max()) for x in row)
        out[i] = [x - row.max() - math.log(total) for x in row]
    return out


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference logits, logits near them, and targets; float32 as engines give them."""
    rng = np.random.default_rng(5)
    reference = (4 * rng.standard_normal((N, VOCAB)) + 30).astype(np.float32)
    logits = (reference + rng.standard_normal((N, VOCAB)) * rng.random((N, 1)) - 12).astype(np.float32)
    return reference, logits, rng.integers(0, VOCAB, N)


def scored(reference: np.ndarray | None, logits: np.ndarray, targets: np.ndarray, step: int = N) -> TokenScores:
    scores = TokenScores()
    for i in range(0, len(logits), step):
        part = slice(i, i + step)
        scores.add(logits[part], targets[part], None if reference is None else reference[part])
    return scores


def test_every_figure_is_what_its_formula_says(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    reference, logits, targets = batch
    log_p, log_q = written_out(reference), written_out(logits)
    nll = np.array([-log_q[i, t] for i, t in enumerate(targets)])
    kld = np.array(
        [
            math.fsum(math.exp(p) * (p - q) for p, q in zip(*rows, strict=True))
            for rows in zip(log_p, log_q, strict=True)
        ]
    )
    same = [int(np.argmax(p) == np.argmax(q)) for p, q in zip(log_p, log_q, strict=True)]
    ratio = np.array([log_p[i, t] - log_q[i, t] for i, t in enumerate(targets)])

    found = scored(reference, logits, targets).summary()

    def se(values: np.ndarray) -> float:
        return math.sqrt(sum((v - values.mean()) ** 2 for v in values) / (len(values) - 1) / len(values))

    assert found.n == N
    assert found.ppl == pytest.approx(math.exp(nll.mean()), rel=1e-12)
    assert found.ppl_se == pytest.approx(math.exp(nll.mean()) * se(nll), rel=1e-12)
    assert found.kld_mean == pytest.approx(kld.mean(), rel=1e-11)
    assert found.kld_mean_se == pytest.approx(se(kld), rel=1e-11)
    ordered = np.sort(kld)
    for name, share in (("kld_median", 0.5), ("kld_p90", 0.9), ("kld_p99", 0.99), ("kld_p999", 0.999)):
        at = share * (N - 1)
        low = int(at)
        expected = ordered[low] + (at - low) * (ordered[low + 1] - ordered[low])
        assert getattr(found, name) == pytest.approx(expected, rel=1e-11), name
    assert found.kld_max == pytest.approx(ordered[-1], rel=1e-11)
    assert found.same_top == pytest.approx(sum(same) / N)
    assert 0.3 < found.same_top < 1
    assert found.ln_ppl_ratio == pytest.approx(ratio.mean(), rel=1e-10)
    assert found.ln_ppl_ratio_se == pytest.approx(se(ratio), rel=1e-10)
    change = [math.exp(log_q[i, t]) - math.exp(log_p[i, t]) for i, t in enumerate(targets)]
    assert found.rms_dp == pytest.approx(math.sqrt(math.fsum(c * c for c in change) / N), rel=1e-10)


def test_how_the_logits_are_cut_into_batches_does_not_matter(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    whole = scored(*batch)
    for step in (1, 7, 64):
        parts = scored(*batch, step=step)
        for name in ("nll", "kld", "nll_reference", "same_top"):
            assert np.array_equal(getattr(parts, name), getattr(whole, name)), (name, step)


def test_large_vocabularies_are_handled_in_blocks() -> None:
    rng = np.random.default_rng(1)
    reference = rng.standard_normal((9, 200_001)).astype(np.float32)
    logits = reference + np.float32(1e-3) * rng.standard_normal(reference.shape).astype(np.float32)
    log_p, log_q = log_softmax(reference), log_softmax(logits)
    expected = (np.exp(log_p) * (log_p - log_q)).sum(1)
    assert scored(reference, logits, np.arange(9)).kld == pytest.approx(expected, rel=1e-9)


def test_a_tiny_divergence_does_not_drown_in_rounding() -> None:
    """Two distributions over many tokens that differ in one by 1e-6: the divergence is p (1 - p) d^2 / 2, 1e-17."""
    logits = np.zeros((1, 150_000))
    shifted = logits.copy()
    shifted[0, 3] += 1e-3
    kld = scored(logits, shifted, np.array([0])).kld[0]
    p = 1 / 150_000
    assert kld == pytest.approx(math.log1p(p * math.expm1(1e-3)) - p * 1e-3, rel=1e-3)
    assert scored(logits, logits + 1e4, np.array([0])).kld[0] == pytest.approx(0, abs=1e-12)


def test_without_a_reference_there_is_perplexity_alone(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    _, logits, targets = batch
    found = scored(None, logits, targets).summary()
    assert found.ppl == scored(*batch).summary().ppl
    assert found.kld_mean is None and found.same_top is None and found.ln_ppl_ratio is None


def test_uniform_logits_have_the_vocabulary_as_perplexity() -> None:
    found = scored(None, np.zeros((5, 64), np.float16), np.arange(5)).summary()
    assert found.ppl == pytest.approx(64) and found.ppl_se == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("damage", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["logits", "reference"])
def test_logits_that_are_not_finite_give_no_figure(
    batch: tuple[np.ndarray, np.ndarray, np.ndarray], damage: float, where: str
) -> None:
    reference, logits, targets = (part.copy() for part in batch)
    (logits if where == "logits" else reference)[N // 2, 7] = damage
    with pytest.raises(MeasurementError, match="not finite"), np.errstate(invalid="ignore"):
        scored(reference, logits, targets)


def test_misuse_is_an_error(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    reference, logits, targets = batch
    with pytest.raises(ValueError, match="n targets"):
        scored(None, logits, targets[:-1], step=N)
    with pytest.raises(ValueError, match="reference logits"):
        TokenScores().add(logits, targets, reference[:, :-1])
    scores = scored(reference, logits, targets)
    with pytest.raises(ValueError, match="every batch"):
        scores.add(logits, targets)
    with pytest.raises(MeasurementError, match="no position"):
        TokenScores().summary()


def test_the_standard_error_of_one_value_is_not_a_number_to_trip_over() -> None:
    assert standard_error(np.array([3.0])) == 0.0
