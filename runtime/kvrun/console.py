"""What every command of kvrun and kvconv does alike: errors, exit codes, lines on stderr, progress and tables.

Text that the user asked for goes to stdout, everything else to stderr. An error is one line that says why and what to
do. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. `KVRUN_TRACE=1` shows the traceback as well.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

from kvrun.errors import KvError

CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""Base of what the command line parser raises; typer bundles its own click in newer versions."""

OS_ERROR_ADVICE = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "free some of your quota or write to another disk",
    errno.EACCES: "check the permissions of the file and its folder",
    errno.EPERM: "check the permissions of the file and its folder",
    errno.EROFS: "write to another disk",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file, not a folder",
    errno.EMFILE: "close some files or raise `ulimit -n`",
    errno.ENOMEM: "use a smaller context (-c) or close other programs",
}


class UsageError(KvError):
    """The options do not make sense together; exit status 2."""


def printable(text: str) -> str:
    """`text` with everything that could drive a terminal written as an escape: strings from a file are not trusted.

    Control, format (bidirectional marks among them), surrogate and line-separator characters are escaped; letters of
    any script stay.
    """
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else _escape(c) for c in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def printable_text(text: str) -> str:
    """Text of several lines that is to be shown on a terminal: control characters are escaped, but for line and tab."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else _escape(c) for c in text)


def one_line(text: str) -> str:
    """`text` as a single printable line."""
    return printable(" ".join(text.split()))


def describe(error: BaseException) -> str:
    """The one line for an error: why, and what to do."""
    if isinstance(error, KvError):
        return one_line(str(error))
    if isinstance(error, CLICK_ERROR):
        return _describe_usage(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
        return "not enough memory; use a smaller context (-c), a smaller --weights-budget, or close other programs"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        why = error.strerror or str(error) or type(error).__name__
        return one_line(f"{where}{why}; {OS_ERROR_ADVICE.get(error.errno or 0, 'check the file and its disk')}")
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return one_line(f"unexpected {what}; this is a bug: run again with KVRUN_TRACE=1 and report what it prints")


def _describe_usage(error: Any) -> str:
    message = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    return one_line(f"{message}; see `{context.command_path} --help`" if context is not None else message)


def run(app: typer.Typer, argv: list[str] | None = None, *, prog: str | None = None) -> NoReturn:
    """Run a command line and leave the interpreter with the right status. `argv` is without the program's name."""
    sys.exit(exit_status(app, argv, prog=prog))


def exit_status(app: typer.Typer, argv: list[str] | None = None, *, prog: str | None = None) -> int:
    """Run a command line and return its exit status; nothing is raised."""
    _never_fail_on_encoding()
    try:
        result = typer.main.get_command(app).main(args=argv, prog_name=prog, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except SystemExit as leaving:  # the parser leaves this way when the reader of the pipe has gone
        _abandon_stdout_if_broken()
        return leaving.code if isinstance(leaving.code, int) else 1
    except BrokenPipeError:
        _abandon_stdout()
        return 1
    except (KeyboardInterrupt, typer.Abort):
        _abandon_stdout_if_broken()
        return 130
    except Exception as error:
        if os.environ.get("KVRUN_TRACE", "") not in ("", "0"):
            traceback.print_exc()
        _abandon_stdout_if_broken()
        print(f"error: {describe(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, (CLICK_ERROR, UsageError)) else 1


def _never_fail_on_encoding() -> None:
    """A character that the terminal's encoding lacks is shown as an escape instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _abandon_stdout_if_broken() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _abandon_stdout()


def _abandon_stdout() -> None:
    """Point stdout at nothing: the interpreter flushes it once more on exit, and would complain."""
    try:
        target = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, target)
    os.close(nothing)


def stderr() -> Console:
    """Console for everything that is not the text itself: colours only on a terminal and without `NO_COLOR`."""
    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def note(text: str, *, style: str | None = None) -> None:
    """One line on stderr. `text` is printed as it is: no markup. `NO_COLOR` takes the style away."""
    stderr().print(text, style=None if os.environ.get("NO_COLOR") else style)


@contextmanager
def progress(what: str, total: float | None = None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show progress on stderr while the block runs, only on a terminal.

    Yields `advance(done, total=None)`: how much is done so far (not how much more), and the total once it is known.
    """
    console = stderr()
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda done, total=None: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    numbers = TextColumn("{task.completed:.0f}/{task.total:.0f} " + unit if total else "{task.completed:.0f} " + unit)
    columns = (TextColumn("{task.description}"), BarColumn(), numbers, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: float, total: float | None = None) -> None:
            if total is None:
                bar.update(task, completed=done)
            else:
                bar.update(task, completed=done, total=total)

        yield advance


class LateProgress:
    """Progress of work that is often done at once: a bar appears only when there is more than one step.

    Call it with what is done and the total after each step, and `close` it in the end.
    """

    def __init__(self, what: str, *, unit: str = "") -> None:
        self.what, self.unit = what, unit
        self._open = ExitStack()
        self._advance: Callable[..., None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._advance is None and done < total:
            self._advance = self._open.enter_context(progress(self.what, total, unit=self.unit))
        if self._advance is not None:
            self._advance(done)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._open.close()
        self._advance = None
