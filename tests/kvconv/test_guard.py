"""The guard: what makes a recipe worse on held-out text goes back, what does not stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvconv.calibrate import Settings, calibrate, draw
from kvconv.cli import app
from kvconv.guard import guard, uniform_settings, verdict_line
from kvconv.report import bits_per_value
from kvconv.text import Text, held_out, language_reference
from kvrun.console import exit_status
from kvrun.evaluation.windows import Windows
from kvrun.models import Model, load_model
from kvrun.plan import HeadPlan, HeadTransform
from kvrun.recipe import Recipe
from kvrun.tokenizer import Tokenizer
from tools.make_tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("guard") / "tiny.gguf", n_layer=4, n_head_kv=[2, 1, 4, 2])


@pytest.fixture(scope="module")
def made(path: Path) -> tuple[Model, Recipe, Windows]:
    """A model, a recipe of 3 bits with no sinks and no window, and windows that it was not made of."""
    model = load_model(path)
    settings = Settings(bits=3.0, shared=True, n_chunks=8, chunk_tokens=160, sinks=0, window=0)
    sample = draw(language_reference(), Tokenizer(path).encode, settings, 4096, None)
    assert sample.tokens.shape == (8, 160) and sample.held.shape == (2, 160)
    return model, calibrate(model, sample, settings), Windows(sample.held)


def spoiled(recipe: Recipe, side: str, layers: list[int]) -> Recipe:
    """The recipe with matrices that stretch one channel out of 64 a thousand times, which the others drown in."""
    heads = list(getattr(recipe, side))
    stretch = np.ones(64)
    stretch[5] = 1000.0
    for il in layers:
        turn = HeadTransform(matrix=np.diag(stretch))
        heads[il] = tuple(HeadPlan(head.spec, turn) for head in heads[il])
    return replace(recipe, **{side: tuple(heads)})


def test_a_good_recipe_stays_as_it_is(made: tuple[Model, Recipe, Windows]) -> None:
    model, recipe, windows = made
    steps: list[float] = []
    kept, verdict = guard(model, recipe, windows, fixed=False, on_progress=lambda done, total: steps.append(done))
    assert kept == recipe and not verdict.reverted and not verdict.replaced
    assert verdict.n_scored == windows.n_scored and verdict.kld == verdict.kld_before < verdict.kld_uniform
    assert verdict.uniform and "Nothing was taken back" in verdict_line(verdict, 2)
    assert steps == sorted(steps)


@pytest.mark.parametrize("side", ["k", "v"])
def test_the_layer_that_spoils_it_goes_back_and_no_other(made: tuple[Model, Recipe, Windows], side: str) -> None:
    model, recipe, windows = made
    bad = spoiled(recipe, side, [2])
    mended, verdict = guard(model, bad, windows, fixed=False)
    assert verdict.reverted == ((side, 2),) and not verdict.replaced
    assert verdict.kld < 0.7 * verdict.kld_before and verdict.kld < verdict.kld_uniform
    for name in "kv":
        for il, (layer, was) in enumerate(zip(getattr(mended, name), getattr(bad, name), strict=True)):
            if (name, il) == (side, 2):
                assert all(head.transform.name == "hadamard64" for head in layer)
                assert [head.spec for head in layer] == [head.spec for head in was]
            else:
                assert [head.transform.name for head in layer] == [head.transform.name for head in was]
    line = verdict_line(verdict, 2)
    assert f"{'keys' if side == 'k' else 'values'} of layer 2." in line and "2 held-out pieces" in line


def test_what_is_worse_all_over_is_never_written(made: tuple[Model, Recipe, Windows]) -> None:
    model, recipe, windows = made
    bad = spoiled(spoiled(recipe, "k", [0, 1, 2, 3]), "v", [0, 1, 2, 3])
    mended, verdict = guard(model, bad, windows, fixed=False)
    assert verdict.kld <= verdict.kld_uniform < verdict.kld_before
    assert bits_per_value(mended) <= bits_per_value(recipe)
    assert verdict.replaced or len(verdict.reverted) == 8


def test_a_uniform_setting_is_no_larger_than_the_recipe(made: tuple[Model, Recipe, Windows]) -> None:
    recipe = made[1]
    settings = uniform_settings(recipe, fixed=False)
    assert list(settings) == ["2 bits uniform", "2 bits uniform rotated", "2 bits cubic", "2 bits cubic rotated"]
    for plan in settings.values():
        assert bits_per_value(replace(recipe, k=plan.k, v=plan.v)) <= bits_per_value(recipe)
        assert (plan.sinks, plan.window) == (recipe.sinks, recipe.window)
    # Where widths were given, each side is held to its own.
    for plan in uniform_settings(recipe, fixed=True).values():
        for side in "kv":
            assert bits_per_value(replace(recipe, k=plan.k, v=plan.v), side) <= bits_per_value(recipe, side) + 1e-6


def test_pieces_that_are_held_out() -> None:
    assert held_out(18, 2) == [4, 13] and held_out(5, 1) == [2]
    assert held_out(2, 0) == [] and held_out(1, 1) == []
    assert Settings().n_held == 2 and Settings(n_chunks=3).n_held == 0 and Settings(n_chunks=5).n_held == 1
    # A text that is a piece too short costs one of those held out, not both, and none of those that are read.
    sample = draw(
        Text("a text", "a" * 17 * 64, ""),
        lambda text: [ord(c) for c in text],
        Settings(chunk_tokens=64, window=4),
        4096,
        None,
    )
    assert (len(sample.tokens), len(sample.held)) == (16, 1)
    assert Settings(guard=False).n_held == 0 and Settings(window=300).n_held == 0


def test_the_command_says_what_the_guard_found(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["calibrate", str(path), "--chunks", "4", "--chunk-tokens", "160", "-t", "1", "--force"]
    assert exit_status(app, options, prog="kvconv") == 0
    assert "\nguard: on 1 held-out piece (79 positions) the recipe diverges by 0." in capsys.readouterr().out
    assert exit_status(app, [*options, "--no-guard"], prog="kvconv") == 0
    printed = capsys.readouterr()
    assert "guard" not in printed.out and "held out" not in printed.err
    assert exit_status(app, [*options, "--window", "90"], prog="kvconv") == 0
    printed = capsys.readouterr()
    assert (
        "guard" not in printed.out and "the recipe is not measured, as no piece of the text is held out" in printed.err
    )
