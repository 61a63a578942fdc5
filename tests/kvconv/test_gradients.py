"""Forward and back through the blocks: what is gathered of keys, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconv.gather import Chunks, budget_bytes, gather
from kvconv.gradients import LayerRecord, records
from kvrun.gguf_file import GGUFFile
from kvrun.models import Model, load_model


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Model:
    return load_model(tiny_model("llama", n_layer=2, n_head_kv=[2, 1]), dtype=torch.float64)


@pytest.fixture
def gemma(tiny_model: Callable[..., Path]) -> Model:
    """A sliding window in layer 0, soft caps."""
    path = tiny_model("gemma2", n_layer=2, n_head_kv=[2, 1], keys={"attention.sliding_window": 11})
    return load_model(path, dtype=torch.float64)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("which", ["model", "gemma"])
def test_gradients_are_those_of_what_is_read_packed(which: str, side: str, request: pytest.FixtureRequest) -> None:
    """Against finite differences: a key or value is moved where queries read it packed, and nowhere else."""
    model: Model = request.getfixturevalue(which)
    n, sinks, window, il = 24, 3, 5, 0
    tokens = torch.arange(5, 5 + n)
    positions = torch.arange(100, 100 + n)
    found = {r.il: r for r in records(model, tokens[None], positions[None], sinks=sinks, window=window, seeds=[3])}
    gradient = (found[il].grad_k if side == "k" else found[il].grad_v)[:, 0]

    def log_probability(move: torch.Tensor, labels: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k2, v2 = k.clone(), v.clone()
            if layer == il:
                (k2 if side == "k" else v2)[:, sinks:] += move
            group = q.shape[0] // k.shape[0]
            k, v, k2, v2 = (t.repeat_interleave(group, 0) for t in (k, v, k2, v2))
            rows, columns = torch.arange(n)[:, None], torch.arange(n)
            packed = (columns >= sinks) & (columns <= rows - window)
            s = torch.where(packed, q @ k2.transpose(1, 2), q @ k.transpose(1, 2)) * model.attention_scale(layer)
            if model.attention_softcap:
                s = model.attention_softcap * torch.tanh(s / model.attention_softcap)
            sliding = model.config.geometry[layer].sliding or n
            p = torch.softmax(s.masked_fill((columns > rows) | (columns <= rows - sliding), -torch.inf), -1)
            return (p * packed) @ v2 + (p * ~packed) @ v

        x = model.embed(tokens)
        for layer in range(model.config.n_layer):
            x = model.block(layer, x, positions, attend)
        logits = torch.log_softmax(model.output(x), -1)
        if labels is None:
            labels = torch.multinomial(logits.exp(), 1, generator=torch.Generator().manual_seed(3))
        return logits.gather(1, labels).sum(), labels

    with torch.no_grad():
        _, labels = log_probability(torch.zeros_like(gradient), None)
        for seed in range(4):
            direction = noise(*gradient.shape, seed=seed).double()
            up, down = (log_probability(s * 1e-5 * direction, labels)[0] for s in (1, -1))
            assert float((gradient * direction).sum()) == pytest.approx(float((up - down) / 2e-5), rel=1e-4, abs=1e-7)


def test_a_longer_calibration_is_the_sum_of_its_parts(model: Model) -> None:
    tokens = np.arange(3, 3 + 4 * 40).reshape(4, 40)
    positions = np.arange(4)[:, None] * 300 + np.arange(40)
    whole = gather(model, Chunks(tokens, positions, 4, 8, seed=1))
    parts = [gather(model, Chunks(tokens[a:b], positions[a:b], 4, 8, seed=1, first=a)) for a, b in ((0, 1), (1, 4))]
    for side in ("k", "v"):
        for il in range(model.config.n_layer):
            all_, a, b = (getattr(g, side)[il] for g in (whole, *parts))
            torch.testing.assert_close(all_.gradient.float(), torch.cat([a.gradient, b.gradient], 1).float())
            for one, x, y in zip(all_.statistics, a.statistics, b.statistics, strict=True):
                merged = x.merge(y)
                assert merged.n == one.n == 4 * 36
                for name in ("total", "outer", "low", "high", "query", "fisher", "output"):
                    if getattr(one, name) is not None:
                        np.testing.assert_allclose(getattr(merged, name), getattr(one, name), rtol=1e-3, atol=1e-6)


def recorded(model: Model, tokens: torch.Tensor, positions: torch.Tensor, window: int = 8) -> list[LayerRecord]:
    seeds = list(range(len(tokens)))
    return list(records(model, tokens, positions, sinks=2, window=window, seeds=seeds))[::-1]


def test_chunks_are_sequences_of_their_own(tiny_model: Callable[..., Path]) -> None:
    model = load_model(tiny_model("llama", n_layer=3, n_head_kv=[2, 1, 4]), budget_bytes=0)
    tokens = torch.arange(3, 3 + 2 * 40).view(2, 40)
    positions = torch.stack([torch.arange(40), torch.arange(1000, 1040)])
    together = recorded(model, tokens, positions)
    alone = recorded(model, tokens[:1], positions[:1])
    elsewhere = recorded(model, tokens[:1], positions[1:])
    for both, one, moved in zip(together, alone, elsewhere, strict=True):
        for name in ("k", "v", "grad_k", "grad_v"):
            torch.testing.assert_close(getattr(both, name)[:, :1], getattr(one, name), rtol=1e-3, atol=1e-5)
        assert not torch.allclose(one.k, moved.k)  # keys turn with the position
        torch.testing.assert_close(one.v, moved.v, rtol=1e-3, atol=1e-3)  # what attention gives does not


def test_only_one_layer_is_expanded_at_a_time(tiny_model: Callable[..., Path]) -> None:
    tiny = tiny_model("llama", n_layer=3, n_head_kv=[2, 1, 4])
    budget = budget_bytes(GGUFFile(tiny))
    model = load_model(tiny, budget_bytes=budget)
    tokens, kept = torch.arange(3, 43).view(1, 40), []
    for _ in records(model, tokens, torch.arange(40).view(1, 40), sinks=0, window=0, seeds=[0]):
        kept.append(model.weights.kept_bytes)
    assert len(kept) == 3 and max(kept) <= budget
    total = sum(int(np.prod(info.shape)) * 4 for info in model.file.tensors.values())
    assert 0 < budget < total / 2
