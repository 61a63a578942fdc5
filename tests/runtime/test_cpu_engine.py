"""The CPU engine against the reference engine: tiny F32 models tightly, quantized ones within ggml's rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkernels.spec import QuantSpec
from kvrun.cache import KVCache
from kvrun.cache_types import plan_for
from kvrun.cpu_engine import MAX_CHUNK, CpuEngine
from kvrun.engine import Engine, Stopped
from kvrun.errors import KvError, UnsupportedModelError
from kvrun.models import Model, load_model
from kvrun.plan import CachePlan, HeadPlan, HeadTransform

Tiny = Callable[..., Path]
MODELS = {
    "llama": ("llama", {}),
    "llama, own output, one KV head, d=128": ("llama", {"tied": False, "n_head_kv": 1, "head_dim": 128, "n_layer": 3}),
    "llama, linear scaling, d=80": ("llama", {"rope_scale": 4.0, "head_dim": 80, "n_head": 6, "n_head_kv": 3}),
    "llama, frequency factors": ("llama", {"rope_factors": True, "rope_theta": 500000.0}),
    "llama, KV heads differ by layer, d_v=24": ("llama", {"n_head_kv": (2, 1, 4), "n_layer": 3, "head_dim_v": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, own output, d=48": ("qwen2", {"tied": False, "head_dim": 48, "n_layer": 3}),
}


def tokens_for(model: Model, n: int) -> list[int]:
    return np.random.default_rng(5).integers(0, model.config.n_vocab, n).tolist()


def cache_and_logits(
    engine: Engine, plan: CachePlan, tokens: list[int], sizes: list[int]
) -> tuple[KVCache, torch.Tensor]:
    cache = engine.new_cache(plan, len(tokens))
    parts, at = [], 0
    for size in sizes:
        parts.append(engine.forward(tokens[at : at + size], cache, logits="all"))
        at += size
    assert cache.n_tokens == len(tokens)
    return cache, torch.cat(parts)


def logits_of(engine: Engine, plan: CachePlan, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    return cache_and_logits(engine, plan, tokens, sizes)[1]


def divergence(ours: torch.Tensor, reference: torch.Tensor) -> float:
    a, b = reference.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def transformed(plan: CachePlan, geometry_d: tuple[int, int]) -> CachePlan:
    """The plan with an order, a Hadamard block and an offset on the keys of head 0, and an order on its values."""
    rng = np.random.default_rng(2)

    def turn(heads: tuple[HeadPlan, ...], d: int, keys: bool) -> tuple[HeadPlan, ...]:
        offset = rng.standard_normal(d).astype(np.float32) if keys else None
        t = HeadTransform(rng.permutation(d).astype(np.uint16), 8 if keys else 0, None, offset)
        return (replace(heads[0], transform=t, clip=0.97), *heads[1:])

    return replace(
        plan,
        k=tuple(turn(heads, geometry_d[0], True) for heads in plan.k),
        v=tuple(turn(heads, geometry_d[1], False) for heads in plan.v),
    )


@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_give_the_references_logits(tiny_model: Tiny, name: str) -> None:
    arch, options = MODELS[name]
    model = load_model(tiny_model(arch, **options))
    tokens = tokens_for(model, 150)
    engine, reference = CpuEngine(model, n_threads=2), Engine(model)
    for type_k, type_v in (("f16", "f16"), ("kv8", "kv4"), ("kv3", "f16")):
        plan = plan_for(model.config.geometry, type_k, type_v, recipe=None)
        free, free_logits = cache_and_logits(reference, plan, tokens, [150])
        for sizes in ([150], [64, 1, 1, 7, 77], [1] * 150):
            ours, got = cache_and_logits(engine, plan, tokens, sizes)
            # With the same packed tokens both compute the same; so whatever differs in free running is codes that a
            # last bit flipped, and those are few.
            forced = reference.new_cache(plan, len(tokens))
            for mine, theirs in zip(ours.layers, forced.layers, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    b.store.read = a.store.read  # type: ignore[method-assign]
            want = reference.forward(tokens, forced, logits="all")
            assert divergence(got, want) < 1e-7, f"{type_k}/{type_v} in steps {sizes[:4]}"
            assert divergence(got, free_logits) < 2e-4, f"{type_k}/{type_v} in steps {sizes[:4]}"
            assert share_that_differs(ours, free) < 0.02


def share_that_differs(ours: KVCache, theirs: KVCache) -> float:
    """Share of restored packed values that differ by more than rounding does: 1 % of their RMS."""
    different, total = 0, 1
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for a, b in zip(mine, other, strict=True):
            x, y = (side.store.read(side.store.capacity, torch.float32) for side in (a, b))
            different += int(((x - y).abs() > 0.01 * y.pow(2).mean().sqrt()).sum())
            total += x.numel()
    return different / total


def test_transforms_on_both_axes(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("qwen2", n_layer=3))
    tokens = tokens_for(model, 120)
    geometry = model.config.geometry
    plan = plan_for(geometry, "kv4", "kv4", recipe=None, sinks=3, window=10)
    keys = tuple(tuple(HeadPlan(QuantSpec(4, 32, "channel")) for _ in heads) for heads in plan.k)
    for p in (plan, replace(plan, k=keys)):
        p = transformed(p, (geometry[0].head_dim_k, geometry[0].head_dim_v))
        want = logits_of(Engine(model), p, tokens, [120])
        for sizes in ([120], [50, 1, 69]):
            assert divergence(logits_of(CpuEngine(model, n_threads=3), p, tokens, sizes), want) < 1e-4


@pytest.mark.parametrize(
    ("arch", "options"),
    [("qwen2", {"n_layer": 3}), ("llama", {"head_dim": 80, "n_head": 6, "n_head_kv": 3}), ("llama", {"yarn_from": 64})],
)
def test_rotating_offsets_beside_others(tiny_model: Tiny, arch: str, options: dict) -> None:
    """Head 0 with a rotating offset and an order, head 1 with a constant one, layer 1 with neither."""
    model = load_model(tiny_model(arch, **options))
    tokens = tokens_for(model, 150)
    d = model.config.geometry[0].head_dim_k
    rng = np.random.default_rng(4)
    turns = HeadTransform(rng.permutation(d).astype(np.uint16), 8, None, rng.normal(0, 2, d).astype(np.float32), True)
    still = HeadTransform(offset=rng.normal(0, 2, d).astype(np.float32))
    # In f16 no code can flip, so the bound can be tight; with four bits a few do.
    for name, limit in (("f16", 1e-7), ("kv4", 5e-4)):
        plan = plan_for(model.config.geometry, name, name, recipe=None, sinks=3, window=10)
        layers = list(plan.k)
        for il in (0, 2) if len(layers) > 2 else (0,):
            heads = layers[il]
            layers[il] = (replace(heads[0], transform=turns), replace(heads[1], transform=still), *heads[2:])
        plan = replace(plan, k=tuple(layers))
        want = logits_of(Engine(model), plan, tokens, [150])
        for sizes in ([150], [50, 1, 1, 98]):
            for n_threads in (1, 3):
                assert divergence(logits_of(CpuEngine(model, n_threads=n_threads), plan, tokens, sizes), want) < limit


def test_a_chunk_longer_than_a_pass(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    n = MAX_CHUNK + 70
    tokens, plan = tokens_for(model, n), plan_for(model.config.geometry, "kv4", "kv4", recipe=None)
    engine = CpuEngine(model, n_threads=2)
    want = logits_of(Engine(model), plan, tokens, [n])
    assert divergence(logits_of(engine, plan, tokens, [n]), want) < 1e-4
    last = engine.prefill(tokens, engine.new_cache(plan, n), n_ubatch=n)
    assert torch.equal(last, engine.prefill(tokens, engine.new_cache(plan, n), n_ubatch=MAX_CHUNK))
    assert engine.forward(tokens[:3], engine.new_cache(plan, n), logits="none").shape == (0, model.config.n_vocab)


def test_a_window_beyond_the_context_takes_no_more_than_the_context(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    tokens = tokens_for(model, 40)
    f16 = plan_for(model.config.geometry, "f16", "f16", recipe=None)
    plan = plan_for(model.config.geometry, "kv4", "kv4", recipe=None, sinks=5, window=2**31 - 1)
    engine = CpuEngine(model, n_threads=1)
    cache = engine.new_cache(plan, 40)
    # Five sinks and two copies of the 35 tokens that the window can hold, in f16: both copies are allocated.
    assert cache.n_bytes == 2 * cache.n_values * (5 + 2 * 35) // 40
    got = logits_of(engine, plan, tokens, [33, 1, 6])
    assert divergence(got, logits_of(Engine(model), f16, tokens, [40])) < 1e-7


def test_counts_and_sizes_are_the_references(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    tokens = tokens_for(model, 100)
    engine, reference = CpuEngine(model, n_threads=1), Engine(model)
    for type_k, type_v in (("f16", "f16"), ("kv4", "kv2"), ("f16", "kv4")):
        plan = plan_for(model.config.geometry, type_k, type_v, recipe=None)
        ours, theirs = engine.new_cache(plan, 132), reference.new_cache(plan, 132)
        for e, cache in ((engine, ours), (reference, theirs)):
            e.forward(tokens[:90], cache, logits="none")
            e.forward(tokens[90:91], cache, logits="none")
        assert (ours.packed_read, ours.tokens_read) == (theirs.packed_read, theirs.tokens_read)
        # What is printed is what is allocated: the window is there twice, and packed tokens fill whole pages of 32.
        # 132 tokens less 4 sinks and 32 of the window are 3 whole pages; an f16 side keeps the same 96 packed.
        windows = sum(side.recent.numel() * 2 for layer in ours.layers for side in layer)
        if plan.quantizes:
            assert ours.n_bytes == theirs.n_bytes + windows
        else:
            per_token = theirs.n_bytes // 132
            assert windows == 0 and ours.n_bytes == 160 * per_token
        assert ours.bits_per_value == ours.n_bytes * 8 / ours.n_values


def test_marks_interruptions_and_two_caches(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama", n_layer=3))
    tokens = tokens_for(model, 130)
    engine = CpuEngine(model, n_threads=2)
    plan = plan_for(model.config.geometry, "kv4", "kv3", recipe=None, sinks=2, window=9)
    straight = logits_of(engine, plan, tokens, [60, 70])[60:]
    cache, other = engine.new_cache(plan, 130), engine.new_cache(plan, 200)
    engine.forward(tokens[:60], cache)
    mark = cache.mark()
    engine.forward(tokens[:100][::-1], other)  # another conversation in between
    engine.forward(tokens[:50], cache)
    cache.rewind(mark)
    assert torch.equal(engine.forward(tokens[60:], cache, logits="all"), straight)
    cache.rewind(mark)

    # A pass that stops after the first layer leaves the cache as it was.
    stages = engine._stages(cache, 20)
    assert len(stages) == 3
    compute = stages[1].graph.compute
    stages[1].graph.compute = _interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.forward(tokens[5:25], cache)
    stages[1].graph.compute = compute  # type: ignore[method-assign]
    assert cache.n_tokens == 60
    assert torch.equal(engine.forward(tokens[60:], cache, logits="all"), straight)
    with pytest.raises(KvError, match="larger -c"):
        engine.forward(tokens[:1], cache)
    calls = iter([False, True])
    with pytest.raises(Stopped):
        engine.prefill(tokens, engine.new_cache(plan, 130), n_ubatch=50, should_stop=lambda: next(calls))


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_cache_calls_without_the_graph(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    plan = transformed(plan_for(model.config.geometry, "kv4", "kv4", recipe=None), (64, 64))
    ours, theirs = CpuEngine(model, n_threads=2).new_cache(plan, 90), Engine(model).new_cache(plan, 90)
    q, k, v = torch.randn(4, 90, 64), torch.randn(2, 90, 64), torch.randn(2, 90, 64)
    for piece in (slice(0, 50), slice(50, 90)):
        for il in range(model.config.n_layer):
            a, b = (c.attend(il, q[:, piece], k[:, piece], v[:, piece], 64**-0.5) for c in (ours, theirs))
            assert ((a - b).pow(2).mean() / b.pow(2).mean()).sqrt() < 1e-5
        ours.commit(piece.stop - piece.start)
        theirs.commit(piece.stop - piece.start)
    assert (ours.packed_read, ours.tokens_read) == (theirs.packed_read, theirs.tokens_read)


def test_what_it_cannot_run_is_refused_in_one_line(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_model("llama"))
    with pytest.raises(KvError, match="--engine reference"):
        CpuEngine(model, dtype=torch.float64)
    monkeypatch.setattr("kvrun.cpu_graph.LlamaGraph.arch", ("other",))
    with pytest.raises(UnsupportedModelError, match="no graph for architecture 'llama'"):
        CpuEngine(model)


def test_engines_in_threads_of_their_own(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    plan = plan_for(model.config.geometry, "kv4", "kv4", recipe=None)
    tokens = tokens_for(model, 60)
    want = logits_of(CpuEngine(model, n_threads=1), plan, tokens, [60])
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(logits_of(CpuEngine(model, n_threads=1), plan, tokens, [60])))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and all(torch.equal(r, want) for r in results)


@pytest.mark.model
def test_smollm2_within_what_ggml_rounds(smollm2: Path) -> None:
    model = load_model(smollm2)
    text = "The cache holds what the model has read. " * 20
    from kvrun.tokenizer import Tokenizer

    tokens = Tokenizer(smollm2).encode(text)[:96]
    engine, reference = CpuEngine(model, n_threads=2), Engine(model)
    plan = plan_for(model.config.geometry, "f16", "f16", recipe=None)
    want = logits_of(reference, plan, tokens, [96])
    assert divergence(logits_of(engine, plan, tokens, [60, 1, 35]), want) < 5e-3
