"""Ctrl-C: once stops the generation, twice leaves."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Counts Ctrl-C while it is entered as a context.

    The first Ctrl-C only sets a flag, which is looked at between tokens and between chunks of a prompt, so the cache is
    never left in the middle of one. The second raises KeyboardInterrupt, which ends the program with status 130.
    `reset` starts anew. Outside the main thread, and where Ctrl-C is ignored (`nohup`), nothing is installed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.raise_at_once = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or self.raise_at_once:
            raise KeyboardInterrupt

    def reset(self) -> None:
        """Forget what was pressed before."""
        self.count = 0

    def stop(self) -> bool:
        """Whether to stop: Ctrl-C was pressed since the last `reset`."""
        return self.count > 0
