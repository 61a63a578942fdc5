"""The filters against their definitions, written out slowly, and against llama.cpp's own sampler chain."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrun.errors import KvError
from kvrun.sampling import Sampler, SamplingOptions

SETTINGS = [
    SamplingOptions(),
    SamplingOptions(top_k=0, top_p=1.0, min_p=0.0, temp=1.0),
    SamplingOptions(top_k=7, top_p=1.0, min_p=0.0, temp=0.5),
    SamplingOptions(top_k=0, top_p=0.7, min_p=0.0, temp=2.0),
    SamplingOptions(top_k=0, top_p=1.0, min_p=0.2, temp=1.0),
    SamplingOptions(top_k=1, top_p=0.5, min_p=0.5, temp=1.0),
    SamplingOptions(top_k=100_000, top_p=0.0, min_p=1.0, temp=1.0),
    SamplingOptions(top_k=25, top_p=0.6, min_p=0.1, temp=0.3),
    SamplingOptions(temp=0.0),
]


def probabilities(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def by_definition(logits: np.ndarray, options: SamplingOptions) -> dict[int, float]:
    """What may be drawn, and how likely, straight from the words in the help."""
    left = sorted(((float(x), i) for i, x in enumerate(logits)), key=lambda pair: (-pair[0], pair[1]))
    if options.top_k > 0:
        left = left[: options.top_k]
    if options.top_p < 1:
        share, kept = 0.0, []
        for pair, p in zip(left, probabilities([x for x, _ in left]), strict=True):
            kept.append(pair)
            share += p
            if share >= options.top_p:
                break
        left = kept
    if options.min_p > 0:
        ps = probabilities([x for x, _ in left])
        left = [pair for pair, p in zip(left, ps, strict=True) if p >= options.min_p * ps[0] * (1 - 1e-12)]
    if options.temp == 0:
        return {left[0][1]: 1.0}
    ps = probabilities([x / options.temp for x, _ in left])
    return {i: p for (_, i), p in zip(left, ps, strict=True)}


def by_llama_cpp(logits: np.ndarray, options: SamplingOptions) -> dict[int, float]:
    """The same from llama.cpp's sampler chain, without its last step, the drawing."""
    from llama_cpp import llama_cpp as api

    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(options.top_k))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_p(options.top_p, 0))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_min_p(options.min_p, 0))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(options.temp))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(1))  # fills in the probabilities
    data = (api.llama_token_data * len(logits))(*((i, float(x), 0.0) for i, x in enumerate(logits)))
    array = api.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
    api.llama_sampler_apply(chain, ctypes.byref(array))
    result = {array.data[i].id: array.data[i].p for i in range(array.size)}
    api.llama_sampler_free(chain)
    return {i: p for i, p in result.items() if p > 0}


def some_logits(seed: int, n: int = 301) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * 3).astype(np.float32)


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("source", [by_definition, by_llama_cpp])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_candidates(options: SamplingOptions, source: object, seed: int) -> None:
    logits = some_logits(seed)
    ids, p = Sampler(options).candidates(logits)
    expected = source(logits, options)  # type: ignore[operator]
    assert set(ids.tolist()) == set(expected)
    np.testing.assert_allclose(p, [expected[i] for i in ids.tolist()], rtol=2e-5)
    assert list(logits[ids]) == sorted(logits[ids], reverse=True)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=24),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    temp=st.sampled_from([0.0, 0.1, 1.0, 3.0]),
)
def test_candidates_with_ties(logits: list[float], top_k: int, top_p: float, min_p: float, temp: float) -> None:
    options = SamplingOptions(top_k=top_k, top_p=top_p, min_p=min_p, temp=temp)
    values = np.array(logits, dtype=np.float32)
    ids, p = Sampler(options).candidates(values)
    expected = by_definition(values, options)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(p, list(expected.values()), rtol=1e-9)


def test_draws_follow_the_probabilities() -> None:
    options = SamplingOptions(top_k=5, top_p=1.0, min_p=0.0, temp=1.0, seed=3)
    logits = np.array([0.0, 1.0, 2.0, 0.5, -1.0, -9.0], dtype=np.float32)
    sampler, n = Sampler(options), 4000
    counts = np.bincount([sampler.sample(logits) for _ in range(n)], minlength=6)
    ids, p = sampler.candidates(logits)
    # five standard errors of a binomial count
    assert np.all(np.abs(counts[ids] - n * p) < 5 * np.sqrt(n * p * (1 - p)))
    assert counts[5] == 0


def test_a_seed_repeats_and_minus_one_draws_another() -> None:
    logits = torch.from_numpy(some_logits(5)).reshape(1, -1)
    first, again = Sampler(SamplingOptions(seed=11)), Sampler(SamplingOptions(seed=11))
    assert [first.sample(logits) for _ in range(20)] == [again.sample(logits) for _ in range(20)]
    drawn = Sampler(SamplingOptions(seed=-1))
    repeated = Sampler(SamplingOptions(seed=drawn.seed))
    assert [drawn.sample(logits) for _ in range(20)] == [repeated.sample(logits) for _ in range(20)]
    assert len({Sampler(SamplingOptions()).seed for _ in range(4)}) > 1


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    sampler = Sampler(SamplingOptions(temp=0.0))
    assert sampler.sample(np.array([0.0, 7.0, 7.0, 1.0])) == 1


def test_a_tiny_temperature_does_not_overflow() -> None:
    options = SamplingOptions(temp=5e-324, seed=0)
    assert Sampler(options).sample(np.array([1.0, 3.0, 2.0])) == 1


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float, temp: float) -> None:
    with pytest.raises(KvError, match="not finite"):
        Sampler(SamplingOptions(temp=temp)).sample(np.array([0.0, bad, 1.0]))


def test_the_defaults_are_llama_cpps() -> None:
    options = SamplingOptions()
    assert (options.top_k, options.top_p, options.min_p, options.temp, options.seed) == (40, 0.95, 0.05, 0.8, -1)
