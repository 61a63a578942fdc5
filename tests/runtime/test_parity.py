"""kvrun's forward pass against llama.cpp's, on random tiny models and on real ones.

With F32 weights and without flash attention llama.cpp computes what kvrun computes up to the order of additions and to
RoPE angles that it accumulates in float32. With flash attention and an f16 cache it also rounds queries to f16. With
quantized weights it rounds activations to 8 bits, so there the two can only be near.
"""

from __future__ import annotations

import os
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrun import llamacpp
from kvrun.cache_types import plan_for
from kvrun.cpu_engine import CpuEngine
from kvrun.cpu_graph import LlamaGraph
from kvrun.engine import Engine
from kvrun.evaluation.metrics import Summary, TokenScores, log_softmax
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import rewrite
from kvrun.models import load_model
from kvrun.tokenizer import Tokenizer
from tools.expand_to_f32 import expand_to_f32
from tools.make_tiny_model import make_tiny_model

TEXT = pydoc_data.topics.topics["execmodel"]

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, own output, one KV head, d=128": ("llama", {"tied": False, "n_head_kv": 1, "head_dim": 128, "n_layer": 3}),
    "llama, linear scaling, d=80": ("llama", {"rope_scale": 4.0, "head_dim": 80, "n_head": 6, "n_head_kv": 3}),
    "llama, frequency factors": ("llama", {"rope_factors": True, "rope_theta": 500000.0}),
    "qwen2": ("qwen2", {}),
    "llama, YaRN": ("llama", {"rope_scale": 4.0, "yarn_from": 128}),
    "llama, experts": ("llama", {"n_expert": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3, d=128, YaRN": ("qwen3", {"head_dim": 128, "n_head_kv": 1, "rope_scale": 2.0, "yarn_from": 256}),
    "qwen3moe": ("qwen3moe", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", {}),
    "smollm3, five layers": ("smollm3", {"n_layer": 5}),
    "phi3": ("phi3", {}),
    "phi3, short and long factors": (
        "phi3",
        {"rope_factors": True, "keys": {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.2}},
    ),
    "gemma2, three layers": ("gemma2", {"n_layer": 3}),
    "gemma3, seven layers": ("gemma3", {"n_layer": 7, "rope_theta": 1e6}),
    "gemma3, linear scaling, d=256, one KV head": (
        "gemma3",
        {"n_layer": 6, "rope_scale": 8.0, "head_dim": 256, "n_head_kv": 1, "keys": {"attention.sliding_window": 33}},
    ),
    "gemma3, nothing slides": ("gemma3", {"keys": {"attention.sliding_window": 0}}),
    "qwen2, own output, d=48": ("qwen2", {"tied": False, "head_dim": 48, "n_layer": 3}),
}


def tokens_of(path: Path, n: int) -> list[int]:
    tokens = Tokenizer(path).encode(TEXT)[:n]
    assert len(tokens) == n
    return tokens


def through_the_cache(path: Path, tokens: Sequence[int], kind: type[Engine] = Engine) -> np.ndarray:
    """kvrun's logits by way of its f16 cache, [n, n_vocab]."""
    engine = kind(load_model(path))
    cache = engine.new_cache(plan_for(engine.model.config.geometry, "f16", "f16", recipe=None), len(tokens))
    return torch.cat([logits for _, logits in engine.stream(tokens, cache, n_ubatch=128)]).numpy()


def divergence(ours: np.ndarray, theirs: np.ndarray, tokens: Sequence[int]) -> Summary:
    scores = TokenScores()
    scores.add(ours[:-1], np.array(tokens[1:]), theirs[:-1])
    return scores.summary()


@pytest.fixture(scope="module", params=TINY.values(), ids=list(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, options = request.param
    return make_tiny_model(arch, tmp_path_factory.mktemp("parity") / "tiny.gguf", **options)


def test_tiny_models_agree_in_log_probability(tiny: Path, tmp_path: Path) -> None:
    tokens = tokens_of(tiny, 128)
    theirs = llamacpp.logits(tiny, tokens, tmp_path / "l.npy", type_k="f32", type_v="f32", flash_attn=False)
    ours = Engine(load_model(tiny)).forward_bypassing_cache(tokens).numpy()
    worst = np.abs(log_softmax(ours) - log_softmax(theirs)).max()
    # llama.cpp looks GELU up in a table of f16 numbers, so Gemma is nearer only in the mean (the test below).
    limit = 1e-2 if load_model(tiny).config.arch.startswith("gemma") else 1e-4
    assert worst <= limit, worst
    # Neither side may win by being trivial.
    entropy = -(np.exp(log_softmax(theirs)) * log_softmax(theirs)).sum(1).mean()
    assert 1.0 < entropy < 0.8 * np.log(theirs.shape[1])


def test_tiny_models_agree_through_the_f16_cache(tiny: Path, tmp_path: Path) -> None:
    tokens = tokens_of(tiny, 300)
    theirs = llamacpp.logits(tiny, tokens, tmp_path / "l.npy")
    compiled = load_model(tiny).config.arch in LlamaGraph.arch and "blk.0.ffn_gate.weight" in GGUFFile(tiny).tensors
    for kind in (Engine, *([CpuEngine] if compiled else [])):
        found = divergence(through_the_cache(tiny, tokens, kind), theirs, tokens)
        assert found.kld_mean is not None and found.kld_mean <= 1e-5, (kind.name, found)


def test_added_metadata_changes_nothing_in_llama_cpp(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "tiny.gguf")
    added = {"kvconv.version": 1, "kvconv.k.order": np.arange(64, dtype=np.uint8), "kvconv.text": "a"}
    rewrite(GGUFFile(path), tmp_path / "with.gguf", drop_prefix="kvconv.", add=added)
    tokens = tokens_of(path, 64)
    before, after = (llamacpp.logits(tmp_path / f"{n}.gguf", tokens, tmp_path / f"{n}.npy") for n in ("tiny", "with"))
    assert before.tobytes() == after.tobytes()


@pytest.fixture(scope="module")
def smollm2_f32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 with every weight in F32, 540 MB; removed when this file's tests are done."""
    out = tmp_path_factory.mktemp("f32") / "smollm2-f32.gguf"
    expand_to_f32(GGUFFile(smollm2), out)
    yield out
    out.unlink()


@pytest.mark.model
def test_expanding_changes_no_weight(smollm2: Path, smollm2_f32: Path) -> None:
    source, expanded = GGUFFile(smollm2), GGUFFile(smollm2_f32)
    assert list(expanded.tensors) == list(source.tensors)
    for name in ("token_embd.weight", "blk.29.ffn_down.weight", "blk.3.attn_k.weight", "output_norm.weight"):
        np.testing.assert_array_equal(expanded.dequantize(name), source.dequantize(name))
    assert all(expanded.raw_kv(key) == source.raw_kv(key) for key in source if not key.startswith("general."))


@pytest.mark.model
def test_smollm2_in_f32_agrees_in_log_probability(smollm2_f32: Path, tmp_path: Path) -> None:
    tokens = tokens_of(smollm2_f32, 256)
    theirs = llamacpp.logits(smollm2_f32, tokens, tmp_path / "l.npy", type_k="f32", type_v="f32", flash_attn=False)
    ours = Engine(load_model(smollm2_f32)).forward_bypassing_cache(tokens).numpy()
    worst = max(
        np.abs(log_softmax(ours[i : i + 64]) - log_softmax(theirs[i : i + 64])).max() for i in range(0, len(tokens), 64)
    )
    assert worst <= 1e-3, worst


@pytest.mark.model
def test_smollm2_in_f32_agrees_through_the_f16_cache(smollm2_f32: Path, tmp_path: Path) -> None:
    tokens = tokens_of(smollm2_f32, 512)
    theirs = llamacpp.logits(smollm2_f32, tokens, tmp_path / "l.npy")
    for kind in (Engine, CpuEngine):
        found = divergence(through_the_cache(smollm2_f32, tokens, kind), theirs, tokens)
        assert found.kld_mean is not None and found.same_top is not None
        assert found.kld_mean <= 1e-5 and found.same_top >= 0.995, (kind.name, found)


def quantized_models() -> list[str]:
    """SmolLM2, and the file that KVCONV_TEST_QWEN names."""
    return ["smollm2", *filter(None, [os.environ.get("KVCONV_TEST_QWEN")])]


@pytest.mark.model
@pytest.mark.parametrize("which", quantized_models(), ids=lambda which: Path(which).stem)
def test_quantized_weights_stay_near(request: pytest.FixtureRequest, tmp_path: Path, which: str) -> None:
    path = request.getfixturevalue("smollm2") if which == "smollm2" else Path(which)
    tokens = tokens_of(path, 512)
    theirs = llamacpp.logits(path, tokens, tmp_path / "l.npy")
    for kind in (Engine, CpuEngine):
        found = divergence(through_the_cache(path, tokens, kind), theirs, tokens)
        assert found.kld_mean is not None and found.same_top is not None
        assert found.kld_mean <= 5e-3 and found.same_top >= 0.94, (kind.name, found)
