"""The paired bootstrap: what is known to differ differs, what does not is not distinguishable."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvrun.evaluation.bootstrap import BLOCK, paired_difference


def test_the_interval_is_that_of_the_normal_law_where_tokens_are_independent() -> None:
    rng = np.random.default_rng(1)
    b = rng.exponential(size=64 * 200)
    noise = rng.normal(size=len(b))
    found = paired_difference(b + noise + 0.1, b)
    assert found is not None and found.distinguishable
    expected = 1.96 / math.sqrt(len(b))
    assert found.mean == pytest.approx(0.1 + noise.mean())
    assert found.high - found.mean == pytest.approx(expected, rel=0.2)
    assert found.mean - found.low == pytest.approx(expected, rel=0.2)


def test_pairing_sees_a_difference_far_below_the_spread_of_the_tokens() -> None:
    b = np.random.default_rng(2).exponential(size=1000)
    found = paired_difference(1.001 * b, b)
    assert found is not None and found.distinguishable and found.low > 0
    other = paired_difference(b, 1.001 * b)
    assert other is not None and other.distinguishable and other.high < 0


def test_what_is_equal_but_for_noise_is_not_distinguishable() -> None:
    rng = np.random.default_rng(3)
    found = paired_difference(rng.normal(size=2000), rng.normal(size=2000))
    assert found is not None and not found.distinguishable and found.low < 0 < found.high


def test_neighbours_that_move_together_widen_the_interval() -> None:
    """One draw for each block says as much as one token: single tokens drawn alone would make it 8 times narrower."""
    together = np.repeat(np.random.default_rng(4).normal(size=40), BLOCK)
    wide, narrow = (paired_difference(together, np.zeros_like(together), block=n) for n in (BLOCK, 1))
    assert wide is not None and narrow is not None
    assert wide.high - wide.low == pytest.approx(math.sqrt(BLOCK) * (narrow.high - narrow.low), rel=0.2)


def test_short_and_unpaired_input() -> None:
    assert paired_difference(np.ones(BLOCK), np.zeros(BLOCK)) is None
    found = paired_difference(np.ones(BLOCK + 1), np.zeros(BLOCK + 1))
    assert found is not None and (found.low, found.mean, found.high) == (1, 1, 1)
    with pytest.raises(ValueError, match="same tokens"):
        paired_difference(np.ones(3), np.ones(4))
