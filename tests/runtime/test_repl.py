"""The chat at a terminal and in a pipe: commands, Ctrl-C, Ctrl-D, what goes to stdout and what to stderr.

At a terminal means a pseudo-terminal here, and Ctrl-C is the byte that a keyboard sends.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrun import console
from kvrun.cli import app
from kvrun.errors import KvError
from kvrun.generate import Timing
from kvrun.repl import HELP, LineReader, Repl

CTRL_C, CTRL_D = b"\x03", b"\x04"
PATIENCE_S = 50.0
"""How long an expected word may take on a busy machine before the test fails."""
AGAIN_S = 8.0
"""When a key press at the prompt is repeated. Python's readline looks for signals only while it waits, so one that
arrives between the prompt and the waiting is noticed with the next; a person presses again, and so does a test."""

ECHO = """
import sys
import typer
from types import SimpleNamespace
from kvrun import console
from kvrun.generate import Timing
from kvrun.repl import LineReader, Repl

class Echo:
    '''Answers with the question; "forever" goes on until it is stopped and "deaf" even after that.'''
    unanswered = None
    cache = SimpleNamespace(n_bytes=1 << 20, bits_per_value=4.5, n_ctx=9)
    engine = SimpleNamespace(name="echo")
    def ask(self, question, write, *, should_stop, on_progress):
        write(f"you said {question}!")
        while question in ("forever", "deaf") and not should_stop():
            pass
        while question == "deaf":
            write("wait!" if self.unanswered is None else "")
            self.unanswered = ""
        return Timing(reason="interrupt" if should_stop() else "end")

app = typer.Typer()
@app.command()
def chat() -> None:
    Repl(Echo(), LineReader(), lambda: "statistics").run()
console.run(app, [])
"""


class Terminal:
    """A child at a pseudo-terminal."""

    def __init__(self, argv: list[str]) -> None:
        self.fd, inner = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TERM": "xterm"}

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.child = subprocess.Popen(
            [sys.executable, *argv],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(inner)
        self.shown = ""

    def send(self, data: bytes) -> None:
        os.write(self.fd, data)

    def until(self, pattern: str) -> str:
        """Read until `pattern` is shown; returns everything up to its end, which is taken away from `shown`."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.shown, re.DOTALL)) is None:
            data = self._read(deadline)
            if not data:
                pytest.fail(f"{pattern!r} was not shown before the program ended, but {self.shown!r}")
            self.shown += data
        taken, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return taken

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C at a prompt, again if nothing comes of it."""
        self.send(CTRL_C)
        while not select.select([self.fd], [], [], AGAIN_S)[0]:
            self.send(CTRL_C)

    def _read(self, deadline: float) -> str:
        """What comes next; empty when the program has ended."""
        if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            pytest.fail(f"nothing more was shown: {self.shown!r}")
        try:
            return os.read(self.fd, 4096).decode("utf-8", "replace")
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            return ""

    def status(self) -> int:
        """Exit status, once the program has ended."""
        while data := self._read(time.monotonic() + PATIENCE_S):
            self.shown += data
        return self.child.wait(PATIENCE_S)


@contextmanager
def terminal(*argv: str) -> Iterator[Terminal]:
    opened = Terminal(list(argv))
    try:
        yield opened
    finally:
        if opened.child.poll() is None:
            opened.child.kill()
            opened.child.wait()
        os.close(opened.fd)


@pytest.fixture
def chat() -> Iterator[Terminal]:
    with terminal("-c", ECHO) as opened:
        opened.until("> ")
        yield opened


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(chat: Terminal) -> None:
    chat.send(b"forever\n")
    chat.until("you said forever!")
    chat.send(CTRL_C)
    assert "Generation" in chat.until("> ")
    chat.send(b"thanks\n")
    chat.until("you said thanks!.*> ")
    chat.send(CTRL_D)
    assert chat.status() == 0


def test_ctrl_c_twice_leaves_with_130(chat: Terminal) -> None:
    chat.send(b"forever\n")
    chat.until("you said forever!")
    chat.send(CTRL_C)
    chat.until("> ")
    chat.interrupt_prompt()
    assert chat.status() == 130


def test_ctrl_c_twice_leaves_while_a_chunk_is_computed(chat: Terminal) -> None:
    chat.send(b"deaf\n")
    chat.until("you said deaf!")
    chat.send(CTRL_C)
    chat.until("wait!")
    chat.send(CTRL_C)
    assert chat.status() == 130
    assert "Traceback" not in chat.shown


def test_ctrl_c_at_the_prompt_needs_a_second_one(chat: Terminal) -> None:
    chat.send(b"half a line")
    chat.until("half a line")
    chat.interrupt_prompt()
    chat.until("Ctrl-C again or /exit leaves.*> ")
    chat.send(b"hello\n")
    assert "half" not in chat.until("you said hello!.*> ")
    chat.interrupt_prompt()
    chat.until("Ctrl-C again.*> ")
    chat.interrupt_prompt()
    assert chat.status() == 130


def test_exit_leaves(chat: Terminal) -> None:
    chat.send(b"/exit\n")
    assert chat.status() == 0


class Script:
    """A conversation that records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.unanswered: str | None = None
        self.error: KvError | None = None

        class Cache:
            n_bytes, bits_per_value, n_ctx = 1 << 21, 4.25, 64

        class Engine:
            name = "script"

        self.cache, self.engine = Cache(), Engine()

    def ask(self, question: str, write: Callable[[str], None], **_: object) -> Timing:
        if self.error is not None:
            raise self.error
        self.asked.append(question)
        write(f"answer {len(self.asked)}")
        return Timing(reason="context" if question == "fill" else "end")

    def regenerate(self, write: Callable[[str], None], **_: object) -> Timing:
        return self.ask("again", write)

    def clear(self) -> None:
        self.asked.append("(cleared)")


def piped(
    script: Script, lines: str, monkeypatch: pytest.MonkeyPatch, first: str | None = None, *, single_turn: bool = False
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), "utf-8"))
    Repl(script, LineReader(), lambda: "statistics").run(first, single_turn=single_turn)  # type: ignore[arg-type]


def test_a_pipe_gets_answers_on_stdout_and_the_rest_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    piped(script, "one\n\n/regen\n/stats\n  /not a command\nlast line", monkeypatch, "zero")
    out, err = capsys.readouterr()
    assert script.asked == ["zero", "one", "again", "  /not a command", "last line"]
    assert out == "".join(f"answer {i}\n" for i in range(1, 6))
    line = "[ Prompt: 0.0 t/s | Generation: 0.0 t/s | KV 2.0 MiB, 4.25 bits/value | script ]"
    assert err.splitlines() == [line, line, line, "statistics", line, line]


@pytest.mark.parametrize("line", ["/nope", "/clearly", "/exit now", "/"])
def test_an_unknown_command_prints_help_and_never_reaches_the_model(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    piped(script, f"{line}\n", monkeypatch)
    out, err = capsys.readouterr()
    assert script.asked == [] and out == ""
    assert f"there is no command {line.split()[0]}" in err and HELP in err


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    piped(script, "/help\n/clear\nhi\n/exit\nnever\n", monkeypatch)
    assert script.asked == ["(cleared)", "hi"]
    assert HELP in capsys.readouterr().err


def test_a_backslash_continues_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    piped(script, "one\\\ntwo\\\nthree\r\nopen\\", monkeypatch)
    assert script.asked == ["one\ntwo\nthree", "open"]


def test_a_single_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    piped(script, "two\nthree\n", monkeypatch, "one", single_turn=True)
    assert script.asked == ["one"]
    piped(script, "two\nthree\n", monkeypatch, single_turn=True)
    assert script.asked == ["one", "two"]


def test_a_full_context_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    piped(Script(), "fill\n", monkeypatch)
    assert "the context of 64 tokens is full" in capsys.readouterr().err


def test_an_error_ends_a_pipe_but_not_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    script.error = KvError("no room; use -c")
    with pytest.raises(KvError, match="no room"):
        piped(script, "one\n", monkeypatch)
    monkeypatch.setattr(LineReader, "__init__", lambda self: vars(self).update(interactive=True, _editing=False))
    piped(script, "one\ntwo\n", monkeypatch)
    out, err = capsys.readouterr()
    assert out == "" and err.count("error: no room; use -c") == 2


def test_bytes_that_are_no_text_do_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    Repl(script, LineReader(), lambda: "").run()  # type: ignore[arg-type]
    assert script.asked == ["caf\ufffd"]


QUIET = ["-t", "1", "-c", "256", "--temp", "0"]


@pytest.mark.model
def test_a_real_chat_in_a_pipe(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "What is the capital of France?\n/regen\nAnd of Italy?\n/stats\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), "utf-8"))
    argv = ["chat", str(smollm2), "-n", "12", "-ctk", "kv4", "-ctv", "kv4", "--sinks", "2", "--window", "8", *QUIET]
    assert console.exit_status(app, argv, prog="kvrun") == 0
    out, err = capfd.readouterr()
    answers = out.splitlines()
    assert len(answers) == 3 and "Paris" in answers[0] and answers[0] == answers[1] and "Rome" in answers[2]
    number = r"\d+\.\d"
    turn = rf"\[ Prompt: {number} t/s \| Generation: {number} t/s \| KV {number} MiB, {number}\d bits/value \| \w+ \]"
    assert len(re.findall(turn, err)) == 3
    packed = re.search(r"(\d+) packed tokens read", err)
    assert packed is not None and int(packed[1]) > 0
    assert "keys kv4, values kv4" in err


@pytest.mark.model
def test_ctrl_c_in_a_real_chat(smollm2: Path) -> None:
    with terminal("-m", "kvrun", "chat", str(smollm2), *QUIET) as chat:
        assert "keys f16, values f16" in chat.until("> ")
        chat.send(b"Write a long story about a dragon.\n")
        chat.until(r"about a dragon\.\r\n.*[a-z]+ [a-z]+ [a-z]+ ")
        chat.send(CTRL_C)
        chat.until(r"\[ Prompt: [^\]]* \].*> ")
        chat.send(b"/stats\n")
        used = re.search(r"(\d+) of 256 tokens", chat.until("context.*2 messages.*> "))
        assert used is not None and int(used[1]) < 250, "the story went on to the end of the context"
        chat.send(b"/nonsense\n")
        chat.until("there is no command /nonsense.*> ")
        chat.send(CTRL_D)
        assert chat.status() == 0
        assert "Traceback" not in chat.shown
