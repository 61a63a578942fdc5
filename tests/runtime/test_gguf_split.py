"""Models in several files: any part opens all of it, and a part that is missing or foreign is named in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrun import llamacpp
from kvrun.cache_types import plan_for
from kvrun.cli import app
from kvrun.console import exit_status
from kvrun.cpu_engine import CpuEngine
from kvrun.engine import Engine
from kvrun.errors import GGUFError, KvError
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_split import SplitFile, open_model, whole_stem
from kvrun.gguf_write import rewrite
from kvrun.models import load_model
from tools.make_tiny_model import make_tiny_model

#: The tiny llama has 20 tensors: three parts hold them, after a first one without any.
PER_PART = 8


@pytest.fixture
def whole(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The same model, written in parts by gguf's own writer."""
    first = make_tiny_model("llama", tmp_path / "tïny.gguf", split=PER_PART)
    found = sorted(tmp_path.iterdir())
    assert first == found[0] and [path.name[-10:-5] for path in found] == [f"{len(found):05d}"] * len(found)
    assert not GGUFFile(first).tensors and len(found) == 4
    return found


def test_any_part_is_the_whole_model(whole: Path, parts: list[Path]) -> None:
    alone = GGUFFile(whole)
    for path in parts:
        model = open_model(path)
        assert model.path == parts[0] and [part.path for part in model.parts] == parts
        assert model.keys() == alone.keys()
        assert [model.raw_kv(key) for key in model] == [alone.raw_kv(key) for key in alone]
        assert set(model.tensors) == set(alone.tensors)
        assert all(model.tensor_bytes(n).tobytes() == alone.tensor_bytes(n).tobytes() for n in model.tensors)
        assert model.fingerprint() == alone.fingerprint()
        assert model.n_bytes == sum(path.stat().st_size for path in parts)


def test_a_file_alone_is_no_split_model(whole: Path) -> None:
    assert not isinstance(open_model(whole), SplitFile)
    assert whole_stem(whole) == whole.stem and whole_stem(Path("a/b-00002-of-00003.gguf")) == "b"


@pytest.mark.parametrize("kind", [Engine, CpuEngine])
def test_engines_run_all_parts(kind: type[Engine], whole: Path, parts: list[Path]) -> None:
    out = []
    for path in (whole, parts[2]):
        engine = kind(load_model(path))
        cache = engine.new_cache(plan_for(engine.model.config.geometry, "f16", "f16", recipe=None), 40)
        out.append(engine.forward(list(range(3, 43)), cache, logits="all"))
    assert torch.equal(*out)


def test_llama_cpp_runs_the_parts_and_the_joined_file_alike(parts: list[Path], tmp_path: Path) -> None:
    rewrite(open_model(parts[1]), tmp_path / "joined.gguf", drop_prefix="kvconv.", add={"kvconv.version": 1})
    tokens = list(range(3, 67))
    of_parts, of_whole = (
        llamacpp.logits(path, tokens, tmp_path / f"{i}.npy")
        for i, path in enumerate((load_model(parts[3]).file.path, tmp_path / "joined.gguf"))
    )
    assert np.isfinite(of_whole).all() and of_parts.tobytes() == of_whole.tobytes()


def test_parts_may_be_links_to_files_of_other_names(parts: list[Path], tmp_path: Path) -> None:
    """As the cache of a model hub keeps them."""
    (tmp_path / "links").mkdir()
    for i, path in enumerate(parts):
        os.replace(path, tmp_path / f"blob{i}")
        (tmp_path / "links" / path.name).symlink_to(tmp_path / f"blob{i}")
    assert load_model(tmp_path / "links" / parts[1].name).config.n_layer == 2


def said(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command ends with."""
    assert exit_status(app, ["generate", "-m", str(path), "-p", "hello"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out, captured.err
    return captured.err


def test_a_missing_part_is_named(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    parts[2].unlink()
    line = said(parts[1], capsys)
    assert parts[2].name in line and "part 3 of 4" in line and "download it" in line


def test_a_cut_part_is_named(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    parts[3].write_bytes(parts[3].read_bytes()[:-4])
    assert parts[3].name in said(parts[0], capsys)


def test_a_part_of_another_name_is_refused(parts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    renamed = parts[1].with_name("mine.gguf")
    shutil.copy(parts[1], renamed)
    line = said(renamed, capsys)
    assert "mine.gguf" in line and "-00002-of-00004.gguf" in line
    shutil.copy(parts[1], parts[2])
    line = said(parts[0], capsys)
    assert parts[2].name in line and "split.no 1" in line
    assert "another part" in said(parts[2], capsys)


def test_a_part_of_another_model_is_refused(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    make_tiny_model("llama", tmp_path / "other" / parts[0].name[: -len("-00001-of-00004.gguf")], n_layer=3, split=10)
    others = sorted((tmp_path / "other").iterdir())
    assert len(others) == len(parts)
    shutil.copy(others[3], parts[3])
    assert parts[3].name in said(parts[0], capsys)


@pytest.mark.parametrize(
    ("key", "value"), [("split.no", "x"), ("split.no", 4), ("split.count", 99999), ("split.tensors.count", 2.5)]
)
def test_senseless_numbers_are_refused(key: str, value: object, parts: list[Path], tmp_path: Path) -> None:
    file = GGUFFile(parts[1])
    rewrite(file, tmp_path / "edited", drop_prefix=key, add={key: value})
    os.replace(tmp_path / "edited", parts[1])
    for path in parts[:2]:
        with pytest.raises(KvError, match=parts[1].stem):
            open_model(path)


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    rewrite(GGUFFile(parts[2]), parts[3], drop_prefix="split.no", add={"split.no": 3}, force=True)
    with pytest.raises(GGUFError, match=r"00004-of-00004.gguf: not a part of this model \(it holds tensor"):
        open_model(parts[0])
