"""However the text is cut into chunks, the log-probabilities are the same: the whole model, every cache type."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkernels.spec import QuantSpec
from kvrun.cache_types import TYPE_NAMES, plan_for
from kvrun.engine import CHUNK_INVARIANT_ROWS, Engine, Stopped
from kvrun.errors import KvError
from kvrun.models import load_model
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.tokenizer import Tokenizer

PLAIN = [name for name in TYPE_NAMES if name != "auto"]


def transformed(geometry: tuple[LayerGeometry, ...], sinks: int, window: int) -> CachePlan:
    """Every kind of transform and both axes at once, as a recipe could ask for."""
    rng = np.random.default_rng(0)

    def head(d: int, il: int, side: str) -> HeadPlan:
        order = rng.permutation(d).astype(np.uint16) if il % 2 else None
        offset = rng.standard_normal(d).astype(np.float32) if side == "k" else None
        spec = QuantSpec(4, 32, "channel") if side == "k" and il % 2 else QuantSpec(3, d)
        return HeadPlan(spec, HeadTransform(order=order, hadamard=16, offset=offset), 0.97)

    def layers(side: str) -> tuple[tuple[HeadPlan, ...], ...]:
        dims = [g.head_dim_k if side == "k" else g.head_dim_v for g in geometry]
        return tuple(
            tuple(head(d, il, side) for _ in range(g.n_head_kv))
            for il, (g, d) in enumerate(zip(geometry, dims, strict=True))
        )

    return CachePlan(geometry, layers("k"), layers("v"), sinks, window)


def plans(geometry: tuple[LayerGeometry, ...], sinks: int, window: int) -> dict[str, CachePlan]:
    named = {name: plan_for(geometry, name, name, recipe=None, sinks=sinks, window=window) for name in PLAIN}
    mixed = plan_for(geometry, "kv3", "f16", recipe=None, sinks=sinks, window=window)
    return {**named, "kv3/f16": mixed, "transformed": transformed(geometry, sinks, window)}


def log_probs(engine: Engine, plan: CachePlan, tokens: list[int], chunk: int) -> torch.Tensor:
    cache = engine.new_cache(plan, len(tokens))
    logits = torch.cat([part for _, part in engine.stream(tokens, cache, n_ubatch=chunk)])
    return torch.log_softmax(logits, -1)


def kl_divergence(base: torch.Tensor, other: torch.Tensor) -> float:
    base, other = base.double(), other.double()
    return float((base.exp() * (base - other)).sum(-1).mean())


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 32), (3, 0), (0, 13), (5, 7)])
def test_chunks_agree_to_rounding_in_float64(
    tiny_model: Callable[..., Path], arch: str, sinks: int, window: int
) -> None:
    engine = Engine(load_model(tiny_model(arch), dtype=torch.float64), dtype=torch.float64)
    tokens = np.random.default_rng(1).integers(0, engine.model.config.n_vocab, 140).tolist()
    for name, plan in plans(engine.model.config.geometry, sinks, window).items():
        alone = log_probs(engine, plan, tokens, 1)
        for chunk in (7, 64, 512):
            error = float((log_probs(engine, plan, tokens, chunk) - alone).abs().max())
            assert error <= 1e-9, f"{name}, chunks of {chunk}, S={sinks} W={window}: {error:.1e}"


@pytest.mark.model
def test_chunks_agree_on_a_real_model_in_float32_with_a_window(smollm2: Path) -> None:
    engine = Engine(load_model(smollm2, block_rows=CHUNK_INVARIANT_ROWS))
    tokens = Tokenizer(smollm2).encode(pydoc_data.topics.topics["assert"])[:56]
    for name in ("kv4", "kv2"):
        plan = plan_for(engine.model.config.geometry, name, name, recipe=None, sinks=4, window=32)
        alone = log_probs(engine, plan, tokens, 1)
        for chunk in (7, 512):
            assert kl_divergence(alone, log_probs(engine, plan, tokens, chunk)) <= 1e-5, f"{name}, chunks of {chunk}"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "qwen"])
def test_chunks_agree_on_real_models_for_every_type(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    tokens = Tokenizer(path).encode(pydoc_data.topics.topics["specialnames"])[:80]
    for dtype, limit in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        rows = CHUNK_INVARIANT_ROWS if dtype == torch.float32 else 0
        engine = Engine(load_model(path, dtype=dtype, block_rows=rows), dtype=dtype)
        for sinks, window in ((4, 32),) if dtype == torch.float32 else ((4, 32), (0, 0), (3, 5)):
            for kind, plan in plans(engine.model.config.geometry, sinks, window).items():
                alone = log_probs(engine, plan, tokens, 1)
                for chunk in (7, 64, 512):
                    other = log_probs(engine, plan, tokens, chunk)
                    exact = dtype == torch.float64
                    error = float((alone - other).abs().max()) if exact else kl_divergence(alone, other)
                    assert error <= limit, f"{kind} {dtype} chunks of {chunk} S={sinks} W={window}: {error:.1e}"


def test_float32_without_blocks_lets_the_chunks_show(tiny_model: Callable[..., Path]) -> None:
    # Why evaluation multiplies in blocks: the codes are the same until a last bit differs.
    path = tiny_model("llama")
    tokens = np.random.default_rng(1).integers(0, 200, 70).tolist()
    differences = []
    for rows in (0, CHUNK_INVARIANT_ROWS):
        engine = Engine(load_model(path, block_rows=rows))
        plan = plan_for(engine.model.config.geometry, "kv2", "kv2", recipe=None, sinks=0, window=0)
        alone, whole = (log_probs(engine, plan, tokens, chunk) for chunk in (1, 512))
        differences.append(float((alone - whole).abs().max()))
    assert differences[1] <= 1e-5 < differences[0]


def test_a_chunk_that_is_stopped_leaves_whole_chunks(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(load_model(tiny_model("llama")))
    plan = plan_for(engine.model.config.geometry, "kv4", "kv4", recipe=None)
    cache = engine.new_cache(plan, 64)
    answers = iter([False, False, True])
    with pytest.raises(Stopped):
        engine.prefill(list(range(1, 41)), cache, n_ubatch=8, should_stop=lambda: next(answers))
    assert cache.n_tokens == 16
    rest = engine.prefill(list(range(17, 41)), cache, n_ubatch=8)
    fresh = engine.prefill(list(range(1, 41)), engine.new_cache(plan, 64), n_ubatch=8)
    assert torch.equal(rest, fresh)


def test_tokens_outside_the_vocabulary_and_a_full_context_are_one_line(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(load_model(tiny_model("llama")))
    cache = engine.new_cache(plan_for(engine.model.config.geometry, "f16", "f16", recipe=None), 4)
    with pytest.raises(KvError, match="vocabulary"):
        engine.forward([10**6], cache)
    with pytest.raises(KvError, match="larger -c"):
        engine.forward([1, 2, 3, 4, 5], cache)
    assert cache.n_tokens == 0
