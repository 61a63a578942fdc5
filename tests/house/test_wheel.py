"""What a user installs: three packages, two programs, nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.house.files import PACKAGES, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves its traces in the folder it builds from; nothing is downloaded."""
    source = tmp_path_factory.mktemp("source") / "kvconv"
    source.mkdir()
    for folder in ("kvconv", "runtime", "kernels", "tests", "tools"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    out = source.parent / "out"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, env={**os.environ, "PIP_QUIET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_exactly_the_three_packages_are_installed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [f for f in archive.namelist() if ".dist-info/" not in f]
    expected = {
        (Path(package) / path.relative_to(folder)).as_posix()
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
    } | {"kvrun/report/template.html"}
    assert set(files) == expected


def test_programs_and_licence_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (f for f in archive.namelist() if f.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
        assert any(f.endswith("LICENSE") for f in archive.namelist())
    assert "kvconv = kvconv.cli:main" in text
    assert "kvrun = kvrun.cli:main" in text
