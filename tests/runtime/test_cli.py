"""The command line as a user meets it: help, versions, wrong usage, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrun import cache_types, console
from kvrun.cli import app
from kvrun.commands import common

COMMANDS = ["bench", "chat", "compare", "generate", "perplexity"]
HEAVY = ["torch", "llama_cpp", "gguf", "scipy", "triton", "numba", "matplotlib", "kvconv"]


def kvrun(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = console.exit_status(app, list(argv), prog="kvrun")
    out, err = capfd.readouterr()
    return status, out, err


def child(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "COLUMNS": "100"}
    return subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("argv", [[], ["chat"], ["generate"], ["bench"]], ids=lambda argv: " ".join(argv) or "top")
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = f"""
import json, sys
from kvrun import cli, console
status = console.exit_status(cli.app, {[*argv, "--help"]}, prog="kvrun")
print(json.dumps([status, [name for name in {HEAVY} if name in sys.modules]]), file=sys.stderr)
"""
    done = child("-c", code)
    assert json.loads(done.stderr) == [0, []]
    assert "--help" in done.stdout and "Usage: kvrun" in done.stdout


def test_the_commands_and_what_their_help_says(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = kvrun(capfd, "-h")
    assert status == 0 and all(command in out for command in COMMANDS) and "common" not in out
    for command in COMMANDS:
        status, out, err = kvrun(capfd, command, "-h")
        assert (status, err) == (0, "") and "--model" in out and f"Usage: kvrun {command}" in out


def test_version_names_what_it_stands_on() -> None:
    done = child("-m", "kvrun", "--version")
    assert done.returncode == 0 and done.stderr == ""
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["kvrun", "torch", "llama-cpp-python", "gguf", "triton", "Python"]
    assert all(line.split()[1][0].isdigit() for line in done.stdout.splitlines() if "not installed" not in line)


def test_the_types_in_the_help_are_the_types_there_are() -> None:
    assert common.OUR_TYPES.split("|") == list(cache_types.TYPE_NAMES)
    assert set(common.INSTEAD_OF_LLAMA_CPP) == set(cache_types.LLAMACPP_TYPES)
    assert set(common.INSTEAD_OF_LLAMA_CPP.values()) <= set(cache_types.TYPE_NAMES)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["no command", "kvrun --help"]),
        (["chta"], ["chta"]),
        (["chat", "m.gguf", "--no-such"], ["--no-such", "kvrun chat --help"]),
        (["chat", "m.gguf", "-n", "many"], ["-n", "kvrun chat --help"]),
        (["chat"], ["no model", "smollm2", "-m"]),
        (["chat", "a.gguf", "-m", "b.gguf"], ["two models"]),
        (["chat", "m.gguf", "-ctk", "q4_0"], ["q4_0 is a format of llama.cpp", "use kv4", "kvrun compare"]),
        (["generate", "m.gguf", "-ctv", "Q8_0"], ["Q8_0 is a format of llama.cpp", "use kv8"]),
        (["chat", "m.gguf", "-ctk", "kv7"], ["unknown cache type kv7", "kv4"]),
        (["chat", "m.gguf", "-ngl", "99"], ["CPU", "-ngl 0"]),
        (["chat", "m.gguf", "--weights-budget", "much"], ["much", "800M"]),
        (["generate", "m.gguf"], ["no prompt", "-p", "-f"]),
        (["generate", "m.gguf", "-p", "x", "-f", "y"], ["twice"]),
        (["chat", "m.gguf", "--top-p", "1.5"], ["--top-p"]),
        (["chat", "m.gguf", "-c", "9" * 20], ["-c"]),
        (["chat", "m.gguf", "--sinks", "9" * 20], ["--sinks"]),
        (["chat", "m.gguf", "--window", "9" * 20], ["--window"]),
        (["chat", "m.gguf", "-t", "9" * 20], ["-t"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0] in COMMANDS else None,
)
def test_wrong_usage_is_2_and_one_line(argv: list[str], words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = kvrun(capfd, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_environment_gives_llama_cpps_options(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "q5_1")
    status, _, err = kvrun(capfd, "chat", "m.gguf")
    assert status == 2 and "q5_1" in err
    monkeypatch.delenv("LLAMA_ARG_CACHE_TYPE_K")
    monkeypatch.setenv("LLAMA_ARG_MODEL", "/nowhere/env.gguf")
    status, _, err = kvrun(capfd, "generate", "-p", "x")
    assert status == 1 and "/nowhere/env.gguf" in err
    status, _, err = kvrun(capfd, "generate", "-p", "x", "/nowhere/positional.gguf")
    assert status == 1 and "/nowhere/positional.gguf" in err


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "truncated"])
def test_a_bad_model_is_1_and_one_line(
    command: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"empty": b"", "text": b"a text" * 50, "truncated": b"GGUF\3\0\0\0\1"}[kind])
    status, out, err = kvrun(capfd, command, str(path), "-p", "x")
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and "model.gguf" in err and "bug" not in err


@pytest.mark.model
@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["-f", "missing.txt"], 1, ["missing.txt", "check the path"]),
        (["-f", "latin1.txt"], 1, ["latin1.txt is not UTF-8", "byte 3"]),
        (["-p", ""], 1, ["prompt is empty"]),
        (["-p", "one two three four five six seven", "-c", "5"], 1, ["needs 7 tokens", "holds 5", "-c"]),
        (["-p", "x", "-ctk", "auto"], 1, ["recipe", "kvconv calibrate"]),
        (["-p", "x", "--recipe", "missing.gguf"], 1, ["missing.gguf"]),
        (["-p", "x", "--recipe", "r.gguf", "--no-recipe"], 2, ["exclude each other"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("-") else None,
)
def test_bad_input_for_a_good_model(
    argv: list[str],
    status: int,
    words: list[str],
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9 au lait")
    got, out, err = kvrun(capfd, "generate", str(smollm2), *argv)
    last = err.splitlines()[-1]
    assert (got, out) == (status, "") and last.startswith("error: ")
    assert all(word in last for word in words), err


@pytest.mark.parametrize(
    ("text", "size"), [(None, None), ("0", 0), ("800M", 800 << 20), ("1.5G", 3 << 29), ("4GiB", 4 << 30), ("7kb", 7168)]
)
def test_sizes(text: str | None, size: int | None) -> None:
    assert common.parse_size(text) == size
