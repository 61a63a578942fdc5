"""Errors are one line, exit statuses are 0, 1, 2 and 130, and nothing from a file drives the terminal."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from kvrun import console
from kvrun.errors import GGUFError


def status_of(action: Callable[[], None], argv: list[str] | None = None) -> int:
    """Exit status of a command line whose only command does `action`."""
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def act(number: int = 0) -> None:
        action()

    return console.exit_status(app, argv or [], prog="act")


def fail(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (GGUFError("model.gguf is truncated; download it again"), 1, ["truncated", "download it again"]),
        (console.UsageError("name one model"), 2, ["name one model"]),
        (OSError(errno.ENOSPC, "No space left on device", "out.gguf"), 1, ["out.gguf", "No space", "free some space"]),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, ["/x/y", "permissions"]),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "no.gguf"), 1, ["no.gguf", "check the path"]),
        (MemoryError(), 1, ["not enough memory", "-c"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), 1, ["not enough memory"]),
        (ZeroDivisionError("division by zero"), 1, ["ZeroDivisionError", "bug", "KVRUN_TRACE"]),
        (typer.BadParameter("7 is no width"), 2, ["7 is no width"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_one_line(
    error: BaseException, status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(fail(error)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert all(word in err for word in words), err


def test_success_is_0_and_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: None) == 0
    assert capsys.readouterr().err == ""


def test_a_wrong_option_is_2_and_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: None, ["--no-such"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--no-such" in err and "act --help" in err


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_trace_shows_the_traceback_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRUN_TRACE", "1")
    assert status_of(fail(GGUFError("bad file"))) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.rstrip().endswith("error: bad file")


def test_a_message_with_a_hostile_name_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status_of(fail(GGUFError("key 'a\x1b[2Jb\nc\u202ed' is not known")))
    err = capsys.readouterr().err
    assert err == "error: key 'a\\x1b[2Jb c\\u202ed' is not known\n"


def test_printable_keeps_letters_of_any_script() -> None:
    assert console.printable("añ日本\t\x00\x9b") == "añ日本\\t\\x00\\x9b"
    assert console.printable_text("two\nlines\x1b[31m\u200d") == "two\nlines\\x1b[31m\u200d"


def python(code: str, **kwargs: object) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", "import sys; from kvrun import console; import typer\n" + code]
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(program, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, **kwargs)  # type: ignore[call-overload,no-any-return]


WRITER = """
app = typer.Typer()
@app.command()
def write() -> None:
    for i in range({lines}):
        print("line", i)
console.run(app, [])
"""


def test_a_closed_pipe_is_quiet() -> None:
    process = python(WRITER.format(lines=100_000), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_is_one_line(lines: int) -> None:
    with open("/dev/full", "wb") as full:
        _, err = (process := python(WRITER.format(lines=lines), stdout=full)).communicate()
    assert process.returncode == 1
    assert err.count(b"\n") == 1 and b"No space left" in err and b"free some space" in err


def test_progress_and_colours_stay_off_what_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("reading", 10, unit="tokens") as advance:
        advance(5)
    late = console.LateProgress("reading", unit="tokens")
    late(1, 2)
    late(2, 2)
    late.close()
    console.note("plain [red]text[/red]", style="bold red")
    out, err = capsys.readouterr()
    assert out == "" and err == "plain [red]text[/red]\n"
