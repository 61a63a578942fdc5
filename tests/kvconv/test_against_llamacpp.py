"""The point of it all, on the real model: our calibrated 4-bit cache beside llama.cpp's rotated q4_0."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconv.cli import app
from kvrun.cache_types import plan_for
from kvrun.console import exit_status
from kvrun.engine import Engine
from kvrun.evaluation.perplexity import run_plans
from kvrun.evaluation.texts import default_text
from kvrun.evaluation.windows import cut
from kvrun.gguf_file import GGUFFile
from kvrun.llamacpp import LlamaSetting, measure
from kvrun.models import load_model
from kvrun.recipe import Recipe
from kvrun.tokenizer import Tokenizer


@pytest.mark.model
def test_our_four_bits_are_no_worse_than_llama_cpps_at_no_more_bits(smollm2: Path, tmp_path: Path) -> None:
    """Without sinks and window, which llama.cpp does not have; each against its own f16 cache, on the same tokens."""
    made = tmp_path / "recipe.gguf"
    argv = ["calibrate", str(smollm2), "--sidecar", "-o", str(made), "--chunks", "4", "--chunk-tokens", "384"]
    assert exit_status(app, [*argv, "--sinks", "0", "--window", "0"], prog="kvconv") == 0
    recipe = Recipe.from_metadata(GGUFFile(made))
    text = default_text()
    assert not text.was_used_by(recipe)

    engine = Engine(load_model(smollm2))
    geometry = engine.model.config.geometry
    windows = cut(Tokenizer(smollm2).encode(text.text), 512, bos=None, limit=2)
    f16 = plan_for(geometry, "f16", "f16", recipe=None)
    plans = [
        plan_for(geometry, "auto", "auto", recipe=recipe, sinks=0, window=0),
        plan_for(geometry, "kv4", "kv4", recipe=None, sinks=0, window=0),
    ]
    ours, identity = (
        run.row(model="smollm2", text=text, n_threads=2) for run in run_plans(engine, windows, plans, reference=f16)
    )
    theirs = measure(smollm2, windows, LlamaSetting("q4_0", "q4_0"), geometry, n_threads=2)

    assert ours.error == identity.error == theirs.error == ""
    assert theirs.rotation == "on"
    assert ours.bits_per_value is not None and theirs.bits_per_value is not None
    assert ours.kld_mean is not None and theirs.kld_mean is not None and identity.kld_mean is not None
    assert ours.bits_per_value <= theirs.bits_per_value
    assert ours.kld_mean <= theirs.kld_mean, (ours.kld_mean, theirs.kld_mean)
    assert ours.kld_mean < identity.kld_mean / 1.5, "what calibration is for"
