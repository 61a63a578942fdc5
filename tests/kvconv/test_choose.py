"""The chooser: the real quantizer decides, identity wins ties, sinks have no say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvconv.calibrate import choose_layer
from kvconv.candidates import Candidate, candidates
from kvconv.choose import MARGIN, choose_head, round_trip_error
from kvconv.collect import ChannelStatistics
from kvconv.gather import SideSamples
from kvconv.objective import OBJECTIVES
from kvkernels.quantize import dequantize, quantize
from kvkernels.spec import QuantSpec
from kvrun.errors import KvError
from kvrun.plan import HeadTransform

G32 = QuantSpec(4, 32)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def named(*names: str) -> list[Candidate]:
    return [candidate for candidate in candidates() if candidate.name in names]


def test_every_candidate_is_found_and_identity_comes_first() -> None:
    names = [candidate.name for candidate in candidates()]
    assert names[0] == "identity"
    assert set(names) >= {"identity", "order", "hadamard", "order+hadamard"}
    assert [c.rank for c in candidates()] == sorted(c.rank for c in candidates())
    assert all(type(candidate).__doc__ for candidate in candidates())


def test_even_noise_keeps_identity() -> None:
    # Channels that are all alike: an order is noise, and a rotation makes Gaussian out of Gaussian.
    for side in ("k", "v"):
        choice = choose_head(noise(3, 501, 64), G32, side)
        assert choice.plan.transform.is_identity, choice.plan.transform.name
        assert choice.before == choice.after > 0


def test_an_exact_tie_keeps_identity() -> None:
    # The wide channels already have a group of their own: sorting moves channels about within the groups only.
    x = noise(2, 301, 64) * torch.where(torch.arange(64) < 32, 1.0, 10.0)
    order = named("order")[0].fit(ChannelStatistics.of(x), G32)
    assert order is not None and order.order is not None and sorted(order.order[:32]) == list(range(32))
    tied = round_trip_error(x, G32, order)
    assert tied == pytest.approx(round_trip_error(x, G32, HeadTransform()), rel=1e-9)
    assert choose_head(x, G32, "v", pool=named("identity", "order")).plan.transform.is_identity


def test_an_order_that_hurts_is_refused() -> None:
    # Ranges that a single token sets: sorting by them tears apart the two groups that belong together.
    x = noise(1, 400, 64, seed=1)
    x[:, :, :32] *= 10.0
    spread = torch.linspace(0.1, 1.0, 64)
    x[0, 0] = torch.where(torch.arange(64) % 2 == 0, 200.0 * spread, 100.0 * spread)
    order = named("order")[0].fit(ChannelStatistics.of(x), G32)
    assert order is not None
    assert round_trip_error(x, G32, order) > round_trip_error(x, G32, HeadTransform())
    assert choose_head(x, G32, "v", pool=named("identity", "order")).plan.transform.is_identity


def test_an_order_that_helps_is_taken() -> None:
    # Wide and narrow channels alternate, so that every group is as coarse as its widest channel.
    x = noise(1, 400, 64)
    x[:, :, ::2] *= 30.0
    choice = choose_head(x, G32, "v", pool=named("identity", "order"))
    assert choice.plan.transform.name == "order"
    assert choice.after < (1 - MARGIN) * choice.before


def test_a_rotation_that_helps_is_taken_and_the_simpler_one_wins() -> None:
    x = noise(1, 400, 64)
    x[:, :, 7] *= 50.0
    choice = choose_head(x, QuantSpec(4, 64), "v")
    assert choice.plan.transform.name == "hadamard64"
    assert choice.after < 0.8 * choice.before


def test_keys_that_lie_far_from_zero_get_an_offset_and_values_do_not() -> None:
    x = noise(2, 300, 64) + 40.0 * noise(64, seed=3)
    choice = choose_head(x, QuantSpec(4, 64), "k")
    assert choice.plan.transform.offset is not None
    np.testing.assert_allclose(choice.plan.transform.offset, x.mean((0, 1)), rtol=1e-4, atol=1e-4)
    assert choice.after < 0.05 * choice.before
    assert choose_head(x, QuantSpec(4, 64), "v").plan.transform.offset is None


def test_the_margin_decides() -> None:
    x = noise(1, 400, 64)
    x[:, :, ::2] *= 1.6
    pool = named("identity", "order")
    plain = choose_head(x, G32, "v", pool=pool, margin=0.0)
    gain = 1 - plain.after / plain.before
    assert plain.plan.transform.name == "order" and 0.02 < gain < 0.5
    assert choose_head(x, G32, "v", pool=pool, margin=gain + 0.01).plan.transform.is_identity
    assert choose_head(x, G32, "v", pool=pool, margin=gain - 0.01).plan.transform.name == "order"


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("dim", [40, 64, 96])
def test_every_choice_can_be_stored(dim: int, side: str, axis: str) -> None:
    x = noise(2, 97, dim) * torch.linspace(0.1, 5.0, dim)
    spec = QuantSpec(3, 8 if axis == "token" else 32, axis)  # type: ignore[arg-type]
    choice = choose_head(x, spec, side)
    choice.plan.spec.check_head_dim(dim)
    assert 0 < choice.after <= choice.before


def test_the_error_is_that_of_the_real_quantizer() -> None:
    x = noise(2, 64, 64).half().float()
    codes = quantize(x.half(), G32)
    restored = dequantize(*codes, G32, torch.float32)
    assert round_trip_error(x, G32, HeadTransform()) == pytest.approx(float((restored - x).square().sum()), rel=1e-6)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).numpy()
    whole = QuantSpec(4, 64)  # the group is the head: an order changes nothing at all
    assert round_trip_error(x, whole, HeadTransform(order=order)) == round_trip_error(x, whole, HeadTransform())


def test_a_matrix_that_stretches_is_undone_before_errors_are_counted() -> None:
    x = noise(1, 200, 32)
    stretched = HeadTransform(matrix=4.0 * np.eye(32, dtype=np.float32))
    spec = QuantSpec(4, 32)
    assert round_trip_error(x, spec, stretched) == pytest.approx(round_trip_error(x, spec, HeadTransform()), rel=1e-2)


def test_constant_heads_keep_identity() -> None:
    for x in (torch.zeros(2, 50, 64), torch.full((2, 50, 64), 0.3), noise(64).expand(2, 50, 64)):
        choice = choose_head(x, G32, "k")
        assert choice.plan.transform.is_identity
        assert (choice.before, choice.after) == (0.0, 0.0)


def test_nothing_is_transformed_where_nothing_is_quantized() -> None:
    choice = choose_head(noise(1, 50, 64) + 9.0, QuantSpec(16), "k")
    assert choice.plan.transform.is_identity and (choice.before, choice.after) == (0.0, 0.0)


def test_what_fits_no_f16_is_named_by_layer_and_head() -> None:
    found = SideSamples(3, 1, 40, 64)
    x = noise(3, 1, 40, 64)
    x[1, 0, 7, 3] = 1e6
    found.add(slice(0, 1), [0], x, noise(3, 1, 40, 64), None, np.stack([np.eye(64)] * 3))
    with pytest.raises(KvError, match="values of layer 2, KV head 1: a value exceeds 65504"):
        choose_layer(2, "v", found, [QuantSpec(16)], OBJECTIVES["roundtrip"])


def test_a_key_too_large_for_f16_is_saved_by_its_offset() -> None:
    x = noise(1, 100, 64)
    x[:, :, 0] += 1e5
    choice = choose_head(x, QuantSpec(4, 64), "k")
    assert choice.plan.transform.offset is not None
    assert choice.before == pytest.approx(1.0) and choice.after < 0.1


def test_statistics_merge() -> None:
    x = noise(1, 90, 16).double().float()
    whole = ChannelStatistics.of(x)
    parts = ChannelStatistics.of(x[:, :17]).merge(ChannelStatistics.of(x[:, 17:]))
    assert parts.n == whole.n == 90
    for name in ("mean", "range", "low", "high", "squares"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12)
    assert parts.deviation == pytest.approx(float((x - x.mean(1, keepdim=True)).double().square().sum()), rel=1e-5)
