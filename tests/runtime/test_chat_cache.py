"""Conversations in the real packed cache: after stopping, going back and asking again it is as good as a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvkernels.spec import QuantSpec
from kvrun.cache_types import plan_for
from kvrun.chat import Conversation
from kvrun.engine import Engine
from kvrun.models import load_model
from kvrun.plan import CachePlan, HeadPlan, LayerGeometry
from kvrun.sampling import Sampler, SamplingOptions
from kvrun.tokenizer import Tokenizer

QUESTION = "What is the name of the river that flows through the old town, and where does it meet the sea? "


def token_wise(geometry: tuple[LayerGeometry, ...]) -> CachePlan:
    return plan_for(geometry, "kv3", "kv2", recipe=None, sinks=3, window=5)


def channel_wise(geometry: tuple[LayerGeometry, ...]) -> CachePlan:
    """Keys in groups of 32 tokens of one channel: the cache packs a block at a time."""
    keys = HeadPlan(QuantSpec(2, 32, "channel"))
    k = tuple((keys,) * layer.n_head_kv for layer in geometry)
    v = plan_for(geometry, "f16", "kv4", recipe=None).v
    return CachePlan(geometry, k, v, sinks=1, window=0)


def unpacked(geometry: tuple[LayerGeometry, ...]) -> CachePlan:
    return plan_for(geometry, "f16", "f16", recipe=None)


def stop_after(n: int) -> Callable[[], bool]:
    looks = iter(range(n))
    return lambda: next(looks, None) is None


@pytest.mark.parametrize("plan", [token_wise, channel_wise, unpacked])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_conversation_with_detours(
    arch: str, plan: Callable[[tuple[LayerGeometry, ...]], CachePlan], tiny_model: Callable[..., Path]
) -> None:
    path = tiny_model(arch)
    engine = Engine(load_model(path, dtype=torch.float64), dtype=torch.float64)
    layout = plan(engine.model.config.geometry)
    cache = engine.new_cache(layout, 1024)
    sampler = Sampler(SamplingOptions(seed=1, temp=1.0))
    chat = Conversation(engine, Tokenizer(path), cache, sampler, n_predict=50, n_ubatch=32)

    def same_as_fresh() -> None:
        fresh, n = engine.new_cache(layout, 1024), cache.n_tokens
        probe = [*chat.tokens, 7]
        expected = engine.prefill(probe, fresh).log_softmax(-1)
        mark = cache.mark()
        got = engine.prefill(probe[n:], cache, n_ubatch=3).log_softmax(-1)
        cache.rewind(mark)
        assert float((got - expected).abs().max()) < 1e-9

    said: list[str] = []
    chat.ask(QUESTION, said.append)
    same_as_fresh()
    chat.ask("And why? " * 9, said.append, should_stop=stop_after(40))
    same_as_fresh()
    assert chat.regenerate(said.append).n_prompt == 0
    same_as_fresh()
    chat.ask(QUESTION * 4, said.append, should_stop=stop_after(5))
    assert chat.unanswered is not None
    same_as_fresh()
    chat.ask("Short?", said.append)
    same_as_fresh()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3
    assert len(said) > 60, "a model that says nothing tests nothing"
    if layout.quantizes:
        assert cache.packed_read > 0


def test_the_probe_sees_one_wrong_token(tiny_model: Callable[..., Path]) -> None:
    """The tolerance above is far from what one token changes."""
    engine = Engine(load_model(tiny_model("llama"), dtype=torch.float64), dtype=torch.float64)
    plan = token_wise(engine.model.config.geometry)
    tokens = list(range(10, 90))
    right, wrong = (engine.prefill([first, *tokens], engine.new_cache(plan, 128)).log_softmax(-1) for first in (3, 4))
    assert float((right - wrong).abs().max()) > 1e-6
