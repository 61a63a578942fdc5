"""The chat at the prompt: reads lines, runs commands, streams answers to stdout and everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvrun.chat import Conversation
from kvrun.console import LateProgress, describe, note, printable, printable_text
from kvrun.errors import KvError
from kvrun.generate import Timing
from kvrun.interrupt import Interrupts

HELP = """\
/exit    leave (Ctrl-D, too)
/clear   forget the conversation
/regen   answer the latest question again
/stats   what the conversation and its cache hold
/help    this list
A line that ends in \\ goes on in the next. A space before a / makes it part of the question.
Ctrl-C stops an answer, twice leaves."""

PROMPT = "> "


class LineReader:
    """Lines of stdin, with a prompt and line editing only where a person sits at a terminal."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._editing = self.interactive and sys.stdout.isatty()
        reconfigure = getattr(sys.stdin, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
        if self._editing:
            import readline  # noqa: F401 - input() edits lines once it is imported

    def read(self) -> str | None:
        """The next line without its end, joined with the next where it ends in a backslash; None at the end."""
        lines: list[str] = []
        while True:
            line = self._line()
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self) -> str | None:
        if self._editing:
            try:
                return input(PROMPT)
            except EOFError:
                return None
        if self.interactive:
            sys.stderr.write(PROMPT)
            sys.stderr.flush()
        line = sys.stdin.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None


class Repl:
    """Runs a conversation until the person leaves.

    stats: lines for `/stats`.  timings: print the line with the speed after each turn.
    """

    def __init__(
        self, conversation: Conversation, reader: LineReader, stats: Callable[[], str], *, timings: bool = True
    ) -> None:
        self.conversation, self.reader, self.stats, self.timings = conversation, reader, stats, timings
        self.interrupts = Interrupts()
        self._to_terminal = sys.stdout.isatty()

    def run(self, first: str | None = None, *, single_turn: bool = False) -> None:
        """Read and answer. first: question to begin with.  single_turn: leave after one answer.

        Raises KeyboardInterrupt when the person leaves with Ctrl-C, and KvError when nobody is there to read of it.
        """
        with self.interrupts:
            if first is not None and first.strip():
                if self.reader.interactive and not single_turn:
                    note(PROMPT + printable_text(first))
                self._turn(lambda: self._ask(first))
                if single_turn:
                    return
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if not self._command(line.strip()):
                        return
                elif line.strip():
                    self._turn(lambda line=line: self._ask(line))  # type: ignore[misc]
                    if single_turn:
                        return
            if self.reader.interactive:
                note("")

    def _read(self) -> str | None:
        while True:
            try:
                self.interrupts.raise_at_once = True
                line = self.reader.read()
            except KeyboardInterrupt:
                if self.interrupts.count > 1 or not self.reader.interactive:
                    raise
                note("\nCtrl-C again or /exit leaves", style="dim")
                continue
            finally:
                self.interrupts.raise_at_once = False
            self.interrupts.reset()
            return line

    def _command(self, line: str) -> bool:
        """Run a command; False leaves."""
        if line == "/exit":
            return False
        if line == "/clear":
            self.conversation.clear()
            note("the conversation is empty", style="dim")
        elif line == "/regen":
            self._turn(self._regenerate)
        elif line == "/stats":
            note(self.stats())
        else:
            if line != "/help":
                note(f"there is no command {printable(line.split()[0])}")
            note(HELP)
        return True

    def _ask(self, question: str) -> Timing:
        progress = LateProgress("reading", unit="tokens")
        try:
            return self.conversation.ask(question, self._write, should_stop=self.interrupts.stop, on_progress=progress)
        finally:
            progress.close()

    def _regenerate(self) -> Timing:
        progress = LateProgress("reading", unit="tokens")
        try:
            return self.conversation.regenerate(self._write, should_stop=self.interrupts.stop, on_progress=progress)
        finally:
            progress.close()

    def _turn(self, answer: Callable[[], Timing]) -> None:
        try:
            timing = answer()
        except KvError as error:
            if not self.reader.interactive:
                raise
            note(f"error: {describe(error)}")
            return
        if self.conversation.unanswered is None:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if timing.reason == "context":
            n_ctx = self.conversation.cache.n_ctx
            note(f"the context of {n_ctx} tokens is full and cut the answer; /clear starts anew, or use a larger -c")
        if timing.reason == "interrupt" and self.conversation.unanswered is not None:
            note("stopped before the answer began; /regen goes on")
        if self.timings:
            note(timing.line(self.conversation.cache, self.conversation.engine), style="dim")
        if timing.reason == "interrupt" and not self.reader.interactive:
            raise KeyboardInterrupt

    def _write(self, text: str) -> None:
        sys.stdout.write(printable_text(text) if self._to_terminal else text)
        sys.stdout.flush()
