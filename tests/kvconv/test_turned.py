"""The rotating key offset as calibration offers it: the mean before RoPE, found again and worth its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconv.calibrate import Settings, calibrate, draw
from kvconv.choose import options
from kvconv.objective import OBJECTIVES
from kvconv.samples import HeadSamples, Stored
from kvconv.text import language_reference
from kvconv.turned import with_turned
from kvkernels.spec import QuantSpec
from kvrun.layers import Rope
from kvrun.models import load_model
from kvrun.plan import HeadTransform
from kvrun.tokenizer import Tokenizer

D = 32


def turning_keys(strength: float) -> tuple[HeadSamples, torch.Tensor, torch.Tensor]:
    """Noise around a mean that turns with the position, at positions far apart; samples, positions, the mean."""
    g = torch.Generator().manual_seed(1)
    positions = torch.stack([torch.arange(start, start + 128) for start in (4, 700, 3000)])
    mean = torch.randn(1, 1, D, generator=g) * strength
    rope = Rope(D, 10000.0, "neox")
    x = torch.randn(3, 128, D, generator=g)
    x = x + rope(mean.expand(1, 384, D).contiguous(), positions.flatten()).view(3, 128, D)
    samples = HeadSamples.of(x, "k")
    return with_turned(samples, Rope(D, 10000.0, "neox"), positions), positions, mean[0, 0]


def test_the_mean_before_rope_is_found_and_taken_away() -> None:
    samples, positions, mean = turning_keys(10.0)
    assert samples.turned is not None
    np.testing.assert_allclose(samples.turned.mean, mean, atol=0.3)
    assert samples.turned.x.std() < 1.05 < 5 < samples.x.std()
    transform = HeadTransform(offset=samples.turned.mean, rotating=True)
    restored = Stored(samples, transform).exact
    turned = Rope(D, 10000.0, "neox")(
        torch.from_numpy(transform.offset).expand(1, 384, D).contiguous(), positions.flatten()
    )
    assert torch.allclose(restored + turned.view(3, 128, D), samples.x, atol=1e-4)
    thin = samples.thinned(128)
    assert thin.turned is not None and thin.turned.x.shape == thin.x.shape != samples.x.shape


def test_keys_whose_mean_turns_get_the_rotating_offset_and_others_do_not() -> None:
    specs = [QuantSpec(3, D)]
    samples, _, _ = turning_keys(10.0)
    chosen = options(samples, specs, OBJECTIVES["roundtrip"])[0].plan.transform
    assert chosen.rotating and chosen.offset is not None
    still, _, _ = turning_keys(0.0)
    assert not options(still, specs, OBJECTIVES["roundtrip"])[0].plan.transform.rotating


def test_calibration_offers_it_at_the_positions_it_reads(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen2", n_layer=2)
    model = load_model(path)
    mean = 40 * torch.linspace(-1, 1, model.config.head_dim_k)
    plain = model.qkv

    def qkv(il: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Layer 0 with the biases of a real model: keys far from zero before RoPE."""
        q, k, v = plain(il, x, positions)
        return q, k + model.rope(il, mean.expand_as(k).contiguous(), positions) * (il == 0), v

    monkeypatch.setattr(model, "qkv", qkv)
    tokenizer = Tokenizer(path)
    settings = Settings(bits=3.5, n_chunks=3, chunk_tokens=80, n_ctx=2048, objective="roundtrip", rotating=True)
    sample = draw(language_reference(), tokenizer.encode, settings, 4096, tokenizer.bos)
    recipe = calibrate(model, sample, settings)
    for head in recipe.k[0]:
        assert head.transform.rotating and head.transform.offset is not None
        assert np.corrcoef(head.transform.offset, mean)[0, 1] > 0.98  # the tiny model's own keys are in it too
    assert recipe.version >= 2 and recipe.plan().rotates
    assert not calibrate(model, sample, replace(settings, rotating=False)).plan().rotates
