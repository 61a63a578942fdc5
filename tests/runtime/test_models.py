"""Model graphs without llama.cpp: what is refused, RoPE, budgets, chunking, and adding an architecture."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvrun.models
from kvrun.engine import Engine
from kvrun.errors import GGUFError, KvError, UnsupportedModelError
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import rewrite
from kvrun.layers import Rope
from kvrun.models import load_model, supported_architectures
from kvrun.models.llama import Llama
from kvrun.plan import LayerGeometry
from kvrun.rope_scaling import RopeScaling
from tools.make_tiny_model import ARCHITECTURES, make_tiny_model

TOKENS = [72, 5, 130, 261, 44, 44, 299, 0, 17, 90, 31]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("models") / "tiny.gguf")


def edited(path: Path, out: Path, key: str, value: Any) -> Path:
    """A copy of a model with one key replaced, or dropped where `value` is None."""
    rewrite(GGUFFile(path), out, drop_prefix=key, add={} if value is None else {key: value}, force=True)
    return out


def test_configuration(tmp_path: Path) -> None:
    path = make_tiny_model(
        "llama",
        tmp_path / "m.gguf",
        n_layer=3,
        n_head=6,
        n_head_kv=[6, 3, 1],
        head_dim=40,
        head_dim_v=24,
        rope_scale=2.0,
    )
    config = load_model(path).config
    assert (config.n_layer, config.n_embd, config.n_head, config.n_head_kv) == (3, 64, (6, 6, 6), (6, 3, 1))
    assert config.geometry == (LayerGeometry(6, 40, 24), LayerGeometry(3, 40, 24), LayerGeometry(1, 40, 24))
    assert (config.rope_scaling.factor, config.n_rot, config.rope_style) == (2.0, 40, "interleaved")
    assert load_model(make_tiny_model("qwen2", tmp_path / "q.gguf")).config.rope_style == "neox"


def test_every_head_shape_runs(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "m.gguf", n_head=6, n_head_kv=[3, 1], head_dim=40, head_dim_v=24)
    model = load_model(path)
    q, k, v = model.qkv(1, model.embed(torch.tensor(TOKENS)), torch.arange(len(TOKENS)))
    assert (q.shape, k.shape, v.shape) == ((6, 11, 40), (1, 11, 40), (1, 11, 24))
    assert all(part.is_contiguous() for part in (q, k, v))
    logits = Engine(model).forward_bypassing_cache(TOKENS)
    assert logits.shape == (11, model.config.n_vocab) and torch.isfinite(logits).all()


def test_a_budget_changes_memory_and_nothing_else(path: Path) -> None:
    rich, poor = load_model(path), load_model(path, budget_bytes=0)
    assert torch.equal(*(Engine(m).forward_bypassing_cache(TOKENS) for m in (rich, poor)))
    assert poor.weights.kept_bytes == 0
    kept = dict(rich.file.tensors)
    if "output.weight" in kept:  # then only rows of the embedding are read
        del kept["token_embd.weight"]
    assert rich.weights.kept_bytes == 4 * sum(math.prod(info.shape) for info in kept.values())


def test_a_chunk_is_its_tokens_one_by_one(path: Path) -> None:
    """Norms, RoPE and projections know nothing of the neighbours: float64, both ways, with positions that jump."""
    model = load_model(path, dtype=torch.float64)
    positions = torch.arange(len(TOKENS)) * 97

    def attend(il: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q * k.repeat_interleave(q.shape[0] // k.shape[0], 0)).sin()

    def run(tokens: list[int], positions: torch.Tensor) -> torch.Tensor:
        x = model.embed(torch.tensor(tokens))
        for il in range(model.config.n_layer):
            x = model.block(il, x, positions, attend)
        return model.output(x)

    whole = run(TOKENS, positions)
    single = torch.cat([run([token], positions[i : i + 1]) for i, token in enumerate(TOKENS)])
    assert whole.dtype == torch.float64
    torch.testing.assert_close(whole, single, rtol=0, atol=1e-11)


def test_biases_of_qwen2_are_used_and_required(tmp_path: Path) -> None:
    path = make_tiny_model("qwen2", tmp_path / "m.gguf")
    model = load_model(path)
    assert isinstance(model, Llama)
    linear = model.blk[0].attn_k
    bias = linear.bias
    assert bias is not None
    x = torch.randn(2, model.config.n_embd)
    torch.testing.assert_close(linear(x), x @ linear.weight.T + bias)
    content = path.read_bytes().replace(b"blk.1.attn_k.bias", b"blk.1.attn_k.bios")
    (tmp_path / "bare.gguf").write_bytes(content)
    with pytest.raises(KvError, match=r"blk\.1\.attn_k\.bi[ao]s"):
        load_model(tmp_path / "bare.gguf")


def test_an_unsupported_architecture_is_named_with_the_list(path: Path, tmp_path: Path) -> None:
    bad = edited(path, tmp_path / "bad.gguf", "general.architecture", "mamba\x1b[2J")
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(bad)
    message = str(caught.value)
    assert "mamba" in message and ", ".join(supported_architectures()) in message and message.isprintable()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("block_count", None, "block_count"),
        ("block_count", 0, "is 0"),
        ("block_count", 1 << 31, "is 2147483648"),
        ("block_count", "2", "whole number"),
        ("block_count", 3, r"blk\.2\..*\.weight' is missing"),
        ("block_count", 1, r"blk\.1\..*no place in the graph"),
        ("embedding_length", 96, "has shape"),
        ("attention.head_count", 0, "is 0"),
        ("attention.head_count_kv", 3, "does not divide"),
        ("attention.head_count_kv", np.array([2], np.uint32), "each of the 2 layers"),
        ("attention.head_count_kv", np.array([2, 0], np.uint32), "layers without attention"),
        ("attention.head_count_kv", np.array([2.0, 2.0], np.float32), "each of the 2 layers"),
        ("attention.layer_norm_rms_epsilon", math.nan, "is nan"),
        ("rope.freq_base", 0.0, r"is 0\.0"),
        ("rope.dimension_count", 63, "is 63"),
        ("rope.dimension_count", 66, "is 66"),
        ("rope.scaling.type", "novel", "RoPE scaling 'novel'"),
        ("rope.scaling.attn_factor", -1.5, r"is -1\.5"),
    ],
)
def test_senseless_metadata_ends_in_one_line(path: Path, tmp_path: Path, key: str, value: Any, why: str) -> None:
    bad = edited(path, tmp_path / "bad.gguf", f"{GGUFFile(path).arch}.{key}", value)
    with pytest.raises(KvError, match=why) as caught:
        load_model(bad)
    assert str(caught.value).isprintable() and "bad.gguf" in str(caught.value) and ";" in str(caught.value)


def test_other_files_that_are_no_model(path: Path, tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"split\.no"):
        load_model(edited(path, tmp_path / "split.gguf", "split.count", 3))
    with pytest.raises(GGUFError, match="is missing"):
        load_model(edited(path, tmp_path / "bare.gguf", "general.architecture", None))
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GGUFError, match="past the end of the file"):
        load_model(tmp_path / "cut.gguf")


def test_a_new_architecture_is_one_new_file(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = GGUFFile(path)
    kind = supported_architectures()[base.arch]
    (tmp_path / "novel.py").write_text(
        f"from {kind.__module__} import {kind.__name__} as Base\n\n\n"
        "class Novel(Base):\n    arch = ('novel', 'novel2')\n"
    )
    keys = {"novel2." + key.partition(".")[2]: base.get(key) for key in base if key.startswith(base.arch + ".")}
    rewrite(base, tmp_path / "step.gguf", drop_prefix=base.arch + ".", add=keys)
    novel = edited(tmp_path / "step.gguf", tmp_path / "novel.gguf", "general.architecture", "novel2")
    with pytest.raises(UnsupportedModelError):
        load_model(novel)
    monkeypatch.setattr(kvrun.models, "__path__", [*kvrun.models.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "kvrun.models.novel", raising=False)
    assert {"novel", "novel2"} < set(supported_architectures())
    assert torch.equal(*(Engine(load_model(p)).forward_bypassing_cache(TOKENS) for p in (novel, path)))


def rotated(
    x: np.ndarray, position: int, frequencies: np.ndarray, pair: Callable[[int], tuple[int, int]]
) -> np.ndarray:
    """The definition: pair `i` turned by `position * frequencies[i]`."""
    out = x.copy()
    for i, frequency in enumerate(frequencies):
        a, b = pair(i)
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[a], out[b] = x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos
    return out


@pytest.mark.parametrize("style", ["interleaved", "neox"])
@pytest.mark.parametrize("n_rot", [24, 16])
def test_rope_is_its_definition(style: Any, n_rot: int) -> None:
    positions, half = torch.tensor([0, 1, 7, 100_000]), n_rot // 2
    x = torch.randn(3, 4, 24, dtype=torch.float64)
    factors = torch.linspace(1, 4, half)
    rope = Rope(n_rot, 10000.0, style, scaling=RopeScaling(2.5), factors=factors)
    got = rope(x, positions)
    frequencies = 10000.0 ** (-2 * np.arange(half) / n_rot) / factors.double().numpy() / 2.5
    for head in range(3):
        for token, position in enumerate(positions.tolist()):
            wanted = rotated(
                x[head, token].numpy(),
                position,
                frequencies,
                (lambda i: (2 * i, 2 * i + 1)) if style == "interleaved" else (lambda i: (i, i + half)),
            )
            np.testing.assert_allclose(got[head, token].numpy(), wanted, rtol=0, atol=1e-9)
    # The same object at other positions and in another dtype: the kept table must not be the wrong one.
    again = rope(x[:, 3:], positions[3:])
    torch.testing.assert_close(again[:, 0], got[:, 3], rtol=0, atol=1e-12)
    single = rope(x.float(), positions)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), got, rtol=0, atol=1e-5)
    positions += 1  # in place: the same tensor object with other values
    assert not torch.allclose(rope(x, positions), got)
