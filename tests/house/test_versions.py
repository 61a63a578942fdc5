"""One version everywhere, dependencies that are declared, and pins that fit them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.house.files import PACKAGES, ROOT, name, package_trees

if sys.version_info >= (3, 11):
    import tomllib
else:  # mypy brings it along there
    import tomli as tomllib

#: Import name -> distribution, where they differ.
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python"}


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def requirements(extra: str | None = None) -> list[Requirement]:
    listed = project()["dependencies"] if extra is None else project()["optional-dependencies"][extra]
    return [Requirement(line) for line in listed]


def pins() -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def test_one_version_everywhere() -> None:
    version = project()["version"]
    assert import_module("kvrun").__version__ == version
    assert import_module("kvconv").__version__ == version
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == version


@pytest.mark.parametrize("program", ["kvconv", "kvrun"])
def test_the_programs_tell_their_version(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program, "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}:{ROOT / 'kernels'}", "PATH": ""},
    )
    assert done.stdout.split("\n")[0] == f"{program} {project()['version']}"


def test_every_import_is_declared() -> None:
    declared = {canonicalize_name(r.name) for r in [*requirements(), *requirements("report")]}
    undeclared = set()
    for path, tree in package_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            for top in {module.split(".")[0] for module in modules}:
                known = top in sys.stdlib_module_names or top in PACKAGES
                if not known and canonicalize_name(DISTRIBUTIONS.get(top, top)) not in declared:
                    undeclared.add(f"{name(path)}: {top}")
    assert undeclared == set()


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    tested: dict[str, list[Requirement]] = {}
    for pin in pins():
        tested.setdefault(canonicalize_name(pin.name), []).append(pin)
    for wanted in [*requirements(), *requirements("demo"), *requirements("report"), *requirements("test")]:
        found = tested.get(canonicalize_name(wanted.name), [])
        assert found, f"{wanted.name} is not in constraints.txt"
        for pin in found:
            exact = [s.version for s in pin.specifier if s.operator == "=="]
            if wanted.name == "triton":
                assert not exact, "triton must not be pinned: CUDA builds of torch pin their own"
            else:
                assert exact and wanted.specifier.contains(Version(exact[0])), f"{pin} does not satisfy {wanted}"


def test_each_pin_holds_for_every_supported_python() -> None:
    """A package with markers has exactly one pin for each Python version from 3.10 to 3.13."""
    for minor in range(10, 14):
        environment = {"python_version": f"3.{minor}"}
        active = [canonicalize_name(p.name) for p in pins() if p.marker is None or p.marker.evaluate(environment)]
        assert len(active) == len(set(active))
        assert set(active) == {canonicalize_name(p.name) for p in pins()}


def test_licence_text_is_the_licence() -> None:
    text = Path(ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project()["license"]["text"] == "Apache-2.0"
    assert "Apache License" in text and "Version 2.0, January 2004" in text
