"""The set-up that `make demo` and `make test` begin with: one clear line where it cannot go on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.house.files import ROOT
from tools import environment


def make(venv: Path, python: str) -> tuple[int, list[str]]:
    """Exit status and what `make` prints, its own last word left out."""
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT), f"PYTHON={python}", f"VENV={venv}", f"{venv}/.ready-test"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("make")]


def test_no_python(tmp_path: Path) -> None:
    status, lines = make(tmp_path / "venv", "no-such-python")
    assert status == 2
    assert len(lines) == 1 and "no 'no-such-python'" in lines[0] and "PYTHON=" in lines[0]
    assert not (tmp_path / "venv").exists()


def test_too_old_a_python(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    status, lines = make(tmp_path / "venv", str(old))
    assert status == 2
    assert len(lines) == 1 and "Python 3.9.1" in lines[0] and "3.10 to 3.13" in lines[0]


def test_no_venv_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = environment.importlib.util.find_spec
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda n: None if n == "ensurepip" else find_spec(n))
    with pytest.raises(SystemExit, match=r"error: this Python .* cannot create virtual environments; .*-venv"):
        environment.create(tmp_path / "venv")


class FakePip:
    """Records what would be installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, installed: str, wheel: Path | None, works: bool) -> None:
        self.calls: list[tuple[str, ...]] = []

        def pip_install(python: Path, *arguments: str, note: str = "", quiet: bool = False) -> bool:
            self.calls.append(arguments)
            return works

        monkeypatch.setattr(environment, "pip_install", pip_install)
        monkeypatch.setattr(environment, "installed", lambda python, name: installed)
        monkeypatch.setattr(environment, "kept_wheel", lambda python, version: wheel)


def test_what_is_installed_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, installed=environment.pinned("llama-cpp-python"), wheel=None, works=True)
    environment.install_compiled(Path("python"))
    assert pip.calls == []


def test_a_kept_wheel_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pip = FakePip(monkeypatch, installed="", wheel=Path("kept/llama.whl"), works=True)
    environment.install_compiled(Path("python"))
    assert pip.calls == [("--find-links", "kept", "llama-cpp-python")]
    assert "compiled earlier" in capsys.readouterr().out


def test_compiling_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    FakePip(monkeypatch, installed="", wheel=None, works=True)
    monkeypatch.setattr(environment, "has_compiler", lambda: True)
    environment.install_compiled(Path("python"))
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and "about 6 minutes" in out[0]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, installed="", wheel=None, works=False)
    monkeypatch.setattr(environment, "has_compiler", lambda: False)
    with pytest.raises(SystemExit, match=r"error: .* no C\+\+ compiler; install one"):
        environment.install_compiled(Path("python"))
