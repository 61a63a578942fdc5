"""The layout that makes the import names ours alone, and the size of files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.files import PACKAGES, ROOT, name, python_files, text_files

MOST_LINES = 400


@pytest.mark.parametrize("folder", ["kernels", "runtime", "tests", "tools"])
def test_component_roots_are_no_packages(folder: str) -> None:
    """`kernels` and `runtime` are other people's packages: ours would shadow them or be overwritten by them."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_every_folder_with_code_is_a_package() -> None:
    """setuptools finds packages by their `__init__.py`; a folder without one would be missing from the wheel."""
    for root in PACKAGES.values():
        folders = {path.parent for path in root.rglob("*.py")}
        assert [name(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_files_are_short() -> None:
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_nothing_is_left_open() -> None:
    # Written in two parts, so that this file does not find itself.
    marks = ["TO" + "DO", "FIX" + "ME", r"\bXX" + r"X\b", "raise NotImplemented" + "Error", "place" + "holder"]
    marks += [r"mark\.sk" + "ip", r"mark\.xf" + "ail", r"pytest\.sk" + "ip", r"except( Exception)?:\s+pa" + "ss"]
    open_ends = re.compile("|".join(marks))
    found = [name(p) for p in python_files() if open_ends.search(p.read_text(encoding="utf-8"))]
    assert found == []


def test_no_path_and_no_index_of_one_machine() -> None:
    here = [re.escape(str(path)) + "/" for path in (ROOT.parent, Path.home()) if path != path.parent]
    # In two parts again.
    indexes = ["index-" + "url", r"download\.py" + "torch", "file" + ":///"]
    own = re.compile(rf"(?<![A-Za-z0-9_.])({'|'.join(here)})|{'|'.join(indexes)}")
    found = {name(p): m.group(0) for p in text_files() if (m := own.search(p.read_text(encoding="utf-8")))}
    assert found == {}
