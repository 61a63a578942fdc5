"""`kvconv strip` gives the model back as it was; writing a recipe over another leaves nothing of the first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvconv.cli import app
from kvconv.output import write
from kvkernels.spec import QuantSpec
from kvrun.console import exit_status
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import rewrite, write_metadata_file
from kvrun.plan import HeadPlan, HeadTransform, LayerGeometry
from kvrun.recipe import Provenance, Recipe, sidecar_metadata
from tools.make_tiny_model import make_tiny_model

SHAPE = LayerGeometry(1, 64, 64)
SCORE = ((0.5,),)
MADE = Provenance("test", "text.txt", "0" * 64, 1, 64, 128, 0, "roundtrip", SCORE, SCORE, SCORE, SCORE)


@pytest.fixture
def model(tmp_path: Path) -> GGUFFile:
    """A model that also holds a key nobody knows and a key that only looks like one of a recipe."""
    base = GGUFFile(make_tiny_model("qwen2", tmp_path / "base.gguf"))
    foreign = {"someone.else": np.arange(5, dtype=np.uint16), "kvconvert.note": "not ours, Grüße"}
    rewrite(base, tmp_path / "model.gguf", drop_prefix="", add=foreign)
    return GGUFFile(tmp_path / "model.gguf")


def recipe_for(model: GGUFFile, transform: HeadTransform) -> Recipe:
    """One layer of one head: only the keys matter here."""
    head = HeadPlan(QuantSpec(4, 32), transform)
    plain = HeadPlan(QuantSpec(4, 32))
    return Recipe(model.fingerprint(), model.arch, (SHAPE,), ((head,),), ((plain,),), 4, 32, MADE)


def large_and_small(model: GGUFFile) -> tuple[Recipe, Recipe]:
    """A recipe with arrays that the second does not have."""
    large = recipe_for(model, HeadTransform(order=np.arange(64, dtype=np.uint16)[::-1], offset=np.ones(64, np.float32)))
    return large, replace(recipe_for(model, HeadTransform()), window=64)


def kvconv(*argv: str | Path) -> int:
    return exit_status(app, [str(word) for word in argv], prog="kvconv")


def test_strip_gives_the_model_back(model: GGUFFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_recipe, out = tmp_path / "with.gguf", tmp_path / "näme with spaces.gguf"
    recipe, _ = large_and_small(model)
    write(recipe, model, with_recipe, sidecar=False, force=False)
    before = with_recipe.read_bytes()
    assert kvconv("strip", with_recipe, "-o", out) == 0
    assert f"{len(recipe.to_metadata())} keys" in capsys.readouterr().out
    stripped = GGUFFile(out)
    assert stripped.keys() == model.keys()
    assert [stripped.raw_kv(key) for key in stripped] == [model.raw_kv(key) for key in model]
    assert stripped.tensor_infos_raw == model.tensor_infos_raw
    assert stripped.data_raw().tobytes() == model.data_raw().tobytes()
    assert out.read_bytes() == model.path.read_bytes()
    assert with_recipe.read_bytes() == before


def test_a_damaged_recipe_can_be_removed_too(model: GGUFFile, tmp_path: Path) -> None:
    damaged, out = tmp_path / "damaged.gguf", tmp_path / "out.gguf"
    rewrite(model, damaged, drop_prefix="", add={"kvconv.version": 999, "kvconv.unheard_of": "x"})
    assert kvconv("strip", damaged, "-o", out) == 0
    assert out.read_bytes() == model.path.read_bytes()


def test_a_second_recipe_replaces_the_first(model: GGUFFile, tmp_path: Path) -> None:
    first, second, fresh = tmp_path / "1.gguf", tmp_path / "2.gguf", tmp_path / "fresh.gguf"
    large, small = large_and_small(model)
    write(large, model, first, sidecar=False, force=False)
    write(small, GGUFFile(first), second, sidecar=False, force=False)
    write(small, model, fresh, sidecar=False, force=False)
    assert set(large.to_metadata()) - set(small.to_metadata())
    assert second.read_bytes() == fresh.read_bytes()
    assert Recipe.from_metadata(GGUFFile(second)) == small


def test_what_strip_refuses_is_one_line(model: GGUFFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_recipe, sidecar, taken = (tmp_path / name for name in ("with.gguf", "kvconv-model.gguf", "taken.gguf"))
    recipe, _ = large_and_small(model)
    write(recipe, model, with_recipe, sidecar=False, force=False)
    write_metadata_file(sidecar, sidecar_metadata(recipe, "m"))
    taken.write_bytes(b"mine")
    cases = [
        (model.path, tmp_path / "out.gguf", [], "holds no recipe"),
        (sidecar, tmp_path / "out.gguf", [], "a recipe alone"),
        (with_recipe, taken, [], "--force"),
        (with_recipe, with_recipe, ["--force"], "never changed"),
    ]
    for source, out, flags, why in cases:
        before = source.read_bytes()
        assert kvconv("strip", source, "-o", out, *flags) == 1
        err = capsys.readouterr().err
        assert why in " ".join(err.split()) and "Traceback" not in err
        assert source.read_bytes() == before
    assert taken.read_bytes() == b"mine" and not (tmp_path / "out.gguf").exists()
    assert kvconv("strip", with_recipe, "-o", taken, "--force") == 0
    assert taken.read_bytes() == model.path.read_bytes()
