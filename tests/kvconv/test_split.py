"""A split model gets its recipe as any other: a sidecar beside the first part, or one file of all parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconv.cli import app
from kvrun.cli import app as kvrun_app
from kvrun.console import exit_status
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_split import open_model
from kvrun.recipe import find_recipe
from tools.make_tiny_model import make_tiny_model

QUICK = ("--chunks", "2", "--chunk-tokens", "64", "--k-bits", "4", "--v-bits", "4", "--objective", "roundtrip")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    (tmp_path / "models").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    make_tiny_model("llama", tmp_path / "models" / "tiny.gguf", split=10)
    return sorted((tmp_path / "models").iterdir())


def kvconv(*argv: str | Path) -> int:
    return exit_status(app, [str(word) for word in argv], prog="kvconv")


def test_the_copy_with_a_recipe_is_one_file_and_strip_gives_the_joined_model(parts: list[Path]) -> None:
    before = [path.read_bytes() for path in parts]
    assert kvconv("calibrate", parts[1], *QUICK) == 0
    made, model = GGUFFile("tiny-kvconv.gguf"), open_model(parts[0])
    assert find_recipe(made) is not None and find_recipe(model, made.path) == find_recipe(made)
    assert "split.count" not in made
    assert kvconv("strip", made.path, "-o", "joined.gguf") == 0
    joined = GGUFFile("joined.gguf")
    assert [joined.raw_kv(key) for key in joined] == [model.raw_kv(key) for key in model]
    assert list(joined.tensors) == list(model.tensors)
    assert all(joined.tensor_bytes(n).tobytes() == model.tensor_bytes(n).tobytes() for n in joined.tensors)
    assert [path.read_bytes() for path in parts] == before


def test_a_sidecar_serves_all_parts(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert kvconv("calibrate", parts[2], *QUICK, "--sidecar") == 0
    assert (parts[0].parent / f"kvconv-{parts[0].name}").is_file()
    capsys.readouterr()
    assert kvconv("inspect", parts[1]) == 0
    assert parts[0].name in capsys.readouterr().err
    assert exit_status(kvrun_app, ["generate", "-m", str(parts[1]), "-p", "the", "-n", "3"]) == 0
    assert "recipe" in capsys.readouterr().err


def test_no_part_is_overwritten(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = [path.read_bytes() for path in parts]
    assert kvconv("calibrate", parts[0], *QUICK, "-o", parts[2], "--force") == 1
    assert "the model itself" in capsys.readouterr().err
    assert [path.read_bytes() for path in parts] == before
