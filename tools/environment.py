#!/usr/bin/env python3
"""Create a virtual environment and install the project with one of its extras: how `make demo` and `make test` begin.

usage: environment.py FOLDER EXTRA

Versions are those of constraints.txt. What is installed already stays. llama-cpp-python comes as source code and is
compiled, for minutes: that is announced, happens in a step of its own, and happens once (pip keeps the wheel).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
COMPILED = "llama-cpp-python"
HEARTBEAT_S = 60
NO_COMPILER = (
    f"{COMPILED} is compiled from source and there is no C++ compiler; install one "
    "(Debian and Ubuntu: apt install g++, Fedora: dnf install gcc-c++, macOS: xcode-select --install)"
)


def say(text: str) -> None:
    """One line that tells what happens next."""
    print(f"==> {text}", flush=True)


def pinned(name: str) -> str:
    """The version of `name` in constraints.txt."""
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        package, _, version = line.partition("==")
        if package.strip().lower() == name:
            return version.split(";")[0].strip()
    raise SystemExit(f"error: {CONSTRAINTS.name} does not pin {name}")


def create(folder: Path) -> Path:
    """The environment's interpreter; the environment is made where it is missing or does not run."""
    python = folder / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0:
        return python
    version = platform.python_version()
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        short = ".".join(version.split(".")[:2])
        raise SystemExit(
            f"error: this Python {version} cannot create virtual environments; install its venv module "
            f"(Debian and Ubuntu: apt install python{short}-venv)"
        )
    say(f"Creating {folder} with Python {version}")
    import venv

    venv.create(folder, clear=True, symlinks=True, with_pip=True)
    return python


def installed(python: Path, name: str) -> str:
    """Version of a package in the environment, empty where it is not installed."""
    code = (
        "import sys; from importlib import metadata as m\n"
        "try: print(m.version(sys.argv[1]))\nexcept m.PackageNotFoundError: pass"
    )
    return subprocess.run([python, "-c", code, name], capture_output=True, text=True, check=True).stdout.strip()


def pip_install(python: Path, *arguments: str, note: str = "", quiet: bool = False) -> bool:
    """Run pip under the constraints, and say every minute that it still works. Whether it succeeded."""
    command = [str(python), "-m", "pip", "install", "-qq", "--no-input", "-c", str(CONSTRAINTS), *arguments]
    variables = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1)),
    }
    output = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(command, env={**os.environ, **variables}, cwd=ROOT, stdout=output, stderr=output)
    minutes = 0
    while True:
        try:
            return process.wait(HEARTBEAT_S) == 0
        except subprocess.TimeoutExpired:
            minutes += 1
            print(f"    still {note}, {minutes} min so far", flush=True)


def kept_wheel(python: Path, version: str) -> Path | None:
    """A wheel of this version that pip compiled earlier, for whichever Python: its code does not depend on it."""
    command = [str(python), "-m", "pip", "cache", "list", "--format=abspath", COMPILED.replace("-", "_")]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
    ending = f"-{version}-py3-none-"
    return next((Path(p) for p in found if ending in p and p.endswith(f"{platform.machine()}.whl")), None)


def has_compiler() -> bool:
    """Whether a C++ compiler is at hand."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++").split()[0], "c++", "g++", "clang++"))


def install_compiled(python: Path) -> None:
    """Install llama-cpp-python: from the wheel that pip kept, else by compiling it."""
    version = pinned(COMPILED)
    if installed(python, COMPILED) == version:
        return
    wheel = kept_wheel(python, version)
    if wheel is not None:
        say(f"Installing {COMPILED} {version} as it was compiled earlier")
        done = pip_install(python, "--find-links", str(wheel.parent), COMPILED, note="installing")
    elif has_compiler():
        say(f"Compiling {COMPILED} {version}: about 6 minutes on 2 cores; pip keeps the result, so it happens once")
        done = pip_install(python, COMPILED, note="compiling")
    elif not pip_install(python, "--only-binary", COMPILED, COMPILED, note="looking for a wheel", quiet=True):
        raise SystemExit(f"error: {NO_COMPILER}")
    else:
        done = True
    if not done:
        raise SystemExit(f"error: {COMPILED} could not be installed; pip's message above says why")


def main() -> None:
    """Create, compile, install."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder, extra = Path(sys.argv[1]), sys.argv[2]
    python = create(folder)
    install_compiled(python)
    first = "" if installed(python, "torch") else "; PyTorch alone is 200 MB to 3 GB, as the package index has it"
    say(f"Installing the project with the extra '{extra}'{first}")
    if not pip_install(python, "-e", f".[{extra}]", note="installing"):
        raise SystemExit("error: the installation failed; pip's message above says why")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
