"""Gradients, what they predict, the balanced transform, and the spreading of bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconv.allocate import allocate, hull
from kvconv.calibrate import Settings, calibrate, draw
from kvconv.candidates import candidates
from kvconv.candidates.balanced import balanced
from kvconv.choose import Option, Trial, options
from kvconv.collect import ChannelStatistics
from kvconv.objective import OBJECTIVES
from kvconv.samples import HeadSamples
from kvconv.spd import geometric_mean
from kvconv.text import language_reference
from kvkernels.spec import QuantSpec
from kvrun.errors import KvError
from kvrun.models import load_model
from kvrun.plan import HeadPlan, HeadTransform
from kvrun.tokenizer import Tokenizer

PLAIN = HeadPlan(QuantSpec(4, 32))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(d: int, seed: int) -> np.ndarray:
    """A random second moment whose eigenvalues differ by three orders of magnitude."""
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return (q * np.logspace(-1.5, 1.5, d)) @ q.T


def test_the_geometric_mean_solves_its_equation() -> None:
    a, b = spread(12, 0), spread(12, 1)
    m = geometric_mean(a, b)
    np.testing.assert_allclose(m @ np.linalg.inv(a) @ m, b, rtol=1e-6, atol=1e-8)


def test_the_balanced_transform_costs_less_than_any_rotation() -> None:
    """Keys and queries that point elsewhere: its cost through the real quantizer is a fraction of Hadamard's."""
    d = 64
    roots = [torch.linalg.cholesky(torch.from_numpy(spread(d, seed))).float() for seed in (2, 3)]
    x = (noise(2, 512, d) @ roots[0].T).contiguous()
    gradient = (noise(2, 512, d, seed=1) @ roots[1].T).contiguous()
    statistics = ChannelStatistics.of(x, gradient=gradient)
    samples = HeadSamples("v", x, statistics, gradient)
    spec, fisher = QuantSpec(4, 64), OBJECTIVES["fisher"]
    by_name = {c.name: c.fit(statistics, spec) for c in candidates()}
    cost = {n: Trial(samples, t, fisher).cost(spec) for n, t in by_name.items() if t is not None}
    assert cost["balanced-fisher"] < 0.4 * cost["hadamard"]
    assert cost["balanced-fisher"] == min(cost.values())
    t = balanced(statistics.outer / statistics.n, statistics.fisher)  # type: ignore[arg-type]
    assert np.sqrt(np.mean(np.square(x.reshape(-1, d).numpy() @ t.T))) == pytest.approx(1.0, rel=0.01)


def test_singular_moments_still_give_a_transform_that_can_be_undone() -> None:
    x = noise(1, 300, 64)
    x[:, :, 10:] = 0.0
    statistics = ChannelStatistics.of(x, gradient=torch.zeros_like(x))
    for candidate in candidates():
        transform = candidate.fit(statistics, QuantSpec(4, 32))
        if transform is not None and transform.matrix is not None:
            assert np.isfinite(transform.matrix).all() and np.linalg.cond(transform.matrix) < 1e4


def test_fisher_counts_half_the_mean_square_of_gradient_times_error() -> None:
    x, gradient = noise(2, 50, 32), noise(2, 50, 32, seed=1)
    samples = HeadSamples("v", x, ChannelStatistics.of(x, gradient=gradient), gradient)
    trial = Trial(samples, HeadTransform(hadamard=32), OBJECTIVES["fisher"])
    plain = Trial(samples, HeadTransform(), OBJECTIVES["fisher"])
    error = noise(2, 50, 32, seed=2)
    error -= x * ((error * x).sum() / (x * x).sum())  # no shrinking in it
    half = 0.5 * float((gradient * error).sum(-1).square().mean())
    assert plain.meter(error) == pytest.approx(half, rel=1e-4)
    assert trial.cost(QuantSpec(3, 32)) > 0 and plain.cost(QuantSpec(8, 32)) < 0.01 * plain.cost(QuantSpec(3, 32))


def test_fisher_counts_shrinking_of_all_tokens_together() -> None:
    """Gradients along the values: ten tokens shrunk together cost ten times what ten independent errors cost."""
    x = noise(3, 10, 32)
    gradient = x.clone()
    samples = HeadSamples("v", x, ChannelStatistics.of(x, gradient=gradient), gradient)
    plain = Trial(samples, HeadTransform(), OBJECTIVES["fisher"])
    alike = plain.meter(0.1 * x)
    signs = torch.where(torch.arange(10) % 2 == 0, 0.1, -0.1)[:, None]
    assert alike == pytest.approx(11 * plain.meter(signs * x), rel=0.1)


@pytest.mark.parametrize("side", ["k", "v"])
def test_query_counts_what_queries_and_the_output_projection_see(side: str) -> None:
    x, q = noise(1, 60, 16), noise(40, 16, seed=2)
    metric = (q.T @ q).double().numpy()
    statistics = ChannelStatistics.of(x, **{"query" if side == "k" else "output": metric})  # type: ignore[arg-type]
    trial = Trial(HeadSamples(side, x, statistics), HeadTransform(), OBJECTIVES["query"])
    error = noise(1, 60, 16, seed=5)
    seen = float((error @ q.T).square().sum()) / 60
    centred = x - x.mean(1, keepdim=True)
    unit = float((centred @ q.T).square().sum()) / 60 if side == "v" else 60 * 16
    assert trial.meter(error) == pytest.approx(seen / unit, rel=1e-3)


def option(bits: float, cost: float) -> Option:
    return Option(PLAIN, bits, cost)


def test_the_hull_leaves_out_what_never_pays() -> None:
    kept = hull([option(4, 1.0), option(2, 10.0), option(3, 9.5), option(5, 1.5), option(6, 0.5)])
    assert [o.bits for o in kept] == [2, 4, 6]


@pytest.mark.parametrize("bits", [2.5, 3.1, 4.0, 5.7, 8.5])
def test_bits_go_where_they_save_most_and_never_beyond_the_budget(bits: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.lognormal(0, 2, 40)
    heads = [[option(b + 0.5, w * 4.0**-b) for b in (2, 3, 4, 5, 6, 8)] for w in weights]
    sizes = [64 if i % 2 else 128 for i in range(40)]
    chosen = allocate(heads, sizes, bits)
    used = sum(o.bits * n for o, n in zip(chosen, sizes, strict=True)) / sum(sizes)
    assert bits - 0.1 < used <= bits + 1e-9
    uniform = max((b for b in (2, 3, 4, 5, 6, 8) if b + 0.5 <= bits), default=2)
    assert sum(o.cost for o in chosen) <= sum(w * 4.0**-uniform for w in weights)


def test_a_budget_below_the_narrowest_code_is_refused() -> None:
    with pytest.raises(KvError, match=r"2\.4 bits are less than the narrowest storage takes, 2\.50"):
        allocate([[option(2.5, 1.0)]], [64], 2.4)


def test_a_constant_head_costs_nothing_at_any_width() -> None:
    x = torch.full((1, 40, 32), 0.5)
    found = options(HeadSamples.of(x, "k"), [QuantSpec(2, 32), QuantSpec(16)], OBJECTIVES["roundtrip"])
    assert [o.cost for o in found] == [0.0, 0.0]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_every_objective_keeps_to_the_budget(objective: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", n_layer=2, n_head_kv=[2, 1])
    settings = Settings(bits=3.3, n_chunks=2, chunk_tokens=96, objective=objective)
    sample = draw(language_reference(), Tokenizer(path).encode, settings, 4096, None)
    recipe = calibrate(load_model(path), sample, settings)
    sizes = [head.spec.bits_per_value(64) for side in (recipe.k, recipe.v) for layer in side for head in layer]
    assert 2.9 < np.mean(sizes) <= 3.3
    assert recipe.provenance.objective == objective
    for before, after in (("k_before", "k_after"), ("v_before", "v_after")):
        for b, a in zip(getattr(recipe.provenance, before), getattr(recipe.provenance, after), strict=True):
            assert all(0 <= y <= x for x, y in zip(b, a, strict=True))
