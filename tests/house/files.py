"""The files of this project, for the tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Package -> its folder.
PACKAGES = {"kvconv": ROOT / "kvconv", "kvrun": ROOT / "runtime/kvrun", "kvkernels": ROOT / "kernels/kvkernels"}
FOLDERS = ("kvconv", "runtime", "kernels", "tests", "tools", "docs", ".ci")
TOP = ("Makefile", "pyproject.toml", "constraints.txt")
TEXT = {".py", ".md", ".txt", ".toml", ".sh", ".json", ".jsonl", ".csv", ""}


def text_files() -> Iterator[Path]:
    """Every text file that belongs to the project, caches and builds left out."""
    yield from (ROOT / name for name in TOP)
    yield from sorted(ROOT.glob("*.md"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            parts = path.relative_to(ROOT).parts
            if path.is_file() and path.suffix in TEXT and not any(p.startswith("__") and "." not in p for p in parts):
                yield path


def python_files() -> Iterator[Path]:
    """Every Python file: packages, tests and tools."""
    return (path for path in text_files() if path.suffix == ".py")


def package_trees() -> Iterator[tuple[Path, ast.Module]]:
    """Every source file of the three packages with its syntax tree."""
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    """Path as the project names it."""
    return path.relative_to(ROOT).as_posix()
