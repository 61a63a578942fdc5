"""What Gemma's metadata says, and what is refused of it; its graph is held to llama.cpp in test_parity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrun.engine import Engine
from kvrun.engines import choose_engine
from kvrun.errors import KvError
from kvrun.models import load_model

TOKENS = [72, 5, 130, 261, 44, 44, 299, 0, 17, 90, 31]


def windows(path: Path) -> list[int]:
    return [layer.sliding for layer in load_model(path).config.geometry]


def test_which_layers_slide(tiny_model: Callable[..., Path]) -> None:
    assert windows(tiny_model("gemma2", n_layer=5)) == [40, 0, 40, 0, 40]
    assert windows(tiny_model("gemma3", n_layer=8)) == [40] * 5 + [0, 40, 40]
    assert windows(tiny_model("gemma3", keys={"attention.sliding_window": 0})) == [0, 0]
    pattern = {"attention.sliding_window": 7, "attention.sliding_window_pattern": 3}
    assert windows(tiny_model("gemma3", n_layer=4, keys=pattern)) == [7, 7, 0, 7]
    # Only these architectures slide: llama.cpp lets the key have no effect on others.
    assert windows(tiny_model("llama", keys={"attention.sliding_window": 7})) == [0, 0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", -3.0),
        ("attention.sliding_window", "x"),
        ("attention.sliding_window_pattern", 0),
        ("attn_logit_softcapping", -1.0),
        ("final_logit_softcapping", float("nan")),
    ],
)
def test_senseless_keys_are_refused(key: str, value: Any, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(KvError, match=key):
        load_model(tiny_model("gemma2", keys={key: value}))


def test_rope_and_scale_by_layer(tiny_model: Callable[..., Path]) -> None:
    model = load_model(tiny_model("gemma3", n_layer=6, rope_theta=1e6, rope_scale=8.0))
    assert model.rope_of(0) is model.rope_of(4) is not model.rope_of(5)
    turned, global_ = (model.rope_of(il).angles(3, torch.float64)[1] for il in (0, 5))
    half = len(turned) // 2
    # The fastest pair of channels turns by one radian a token, and by an eighth where the model is stretched.
    assert torch.arccos(turned[0]).item() == pytest.approx(1.0)
    assert torch.arccos(global_[0]).item() == pytest.approx(1 / 8)
    assert torch.asin(turned[-1]).item() == pytest.approx(10000 ** (-(half - 1) / half))
    assert model.attention_scale(0) == pytest.approx(64**-0.5) and model.attention_softcap == 0
    # The largest ones, told by their number of layers, scale by the width of the model per head.
    wide = load_model(tiny_model("gemma2", n_layer=46, n_ff=8, head_dim=8, n_embd=64))
    assert wide.attention_scale(0) == pytest.approx(16**-0.5)


def test_logits_stay_below_the_cap(tiny_model: Callable[..., Path]) -> None:
    engine = Engine(load_model(tiny_model("gemma2", keys={"final_logit_softcapping": 1.5})))
    logits = engine.forward_bypassing_cache(TOKENS)
    assert 1.0 < float(logits.abs().max()) <= 1.5


def test_auto_takes_the_reference_engine_and_says_why(tiny_model: Callable[..., Path]) -> None:
    model = load_model(tiny_model("gemma3"))
    engine, why = choose_engine("auto", model)
    assert engine.name == "reference" and "gemma3" in why
    with pytest.raises(KvError, match="--engine reference"):
        choose_engine("cpu", model)
