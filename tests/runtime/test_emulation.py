"""The proof that both engines are measured alike: llama.cpp's formats cost in our cache what they cost there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrun.cache_types import plan_for
from kvrun.engine import Engine
from kvrun.evaluation.perplexity import run_plans
from kvrun.evaluation.texts import default_text
from kvrun.evaluation.windows import cut
from kvrun.gguf_file import GGUFFile
from kvrun.llamacpp import LlamaSetting, measure
from kvrun.models import load_model
from kvrun.tokenizer import Tokenizer
from tools.expand_to_f32 import expand_to_f32


@pytest.mark.slow
@pytest.mark.model
def test_our_emulation_lands_where_llama_cpp_does(smollm2: Path, tmp_path: Path) -> None:
    """6 windows of 1024 tokens, each engine against its own f16 cache, weights in F32 so that llama.cpp rounds nothing
    but its cache.
    """
    path = tmp_path / "smollm2-f32.gguf"
    expand_to_f32(GGUFFile(smollm2), path)
    engine, text = Engine(load_model(path)), default_text()
    geometry = engine.model.config.geometry
    windows = cut(Tokenizer(path).encode(text.text), 1024, bos=None, limit=6)
    types = ("q4_0", "q8_0")
    plans = [plan_for(geometry, f"emu-{name}", f"emu-{name}", recipe=None) for name in types]
    f16 = plan_for(geometry, "f16", "f16", recipe=None)
    ours = [
        run.row(model="smollm2", text=text, n_threads=2) for run in run_plans(engine, windows, plans, reference=f16)
    ]
    for name, emulated in zip(types, ours, strict=True):
        real = measure(path, windows, LlamaSetting(name, name), geometry, n_threads=2)
        assert emulated.error == real.error == "" and emulated.rotation == real.rotation == "on"
        assert emulated.bits_per_value == pytest.approx(real.bits_per_value)
        assert emulated.kld_mean is not None and real.kld_mean is not None
        print(f"{name}: ours {emulated.kld_mean:.5f} +/- {emulated.kld_mean_se:.5f}, llama.cpp {real.kld_mean:.5f}")
        assert emulated.kld_mean == pytest.approx(real.kld_mean, rel=0.1)
