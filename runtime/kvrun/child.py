"""A child process that speaks JSON, one message a line: for what may abort, or must be alone in its process."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


class Child:
    """`python -m module`, our packages importable in it. It must leave when its stdin closes.

    rotate: leave llama.cpp's rotation of quantized caches as it is; False switches it off.
    """

    def __init__(self, module: str, *, rotate: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(rotate),
            # Ctrl-C reaches us alone; we end the child.
            start_new_session=True,
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._stderr: list[bytes] = []
        self._readers = [
            threading.Thread(target=_pump, args=(self._process.stdout, self._lines.put), daemon=True),
            threading.Thread(target=_pump, args=(self._process.stderr, self._stderr.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def status(self) -> int:
        """Exit status, once it has ended; negative for a signal."""
        return int(self._process.returncode)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A child that is dead takes it in silence: it already says why by its exit status."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, None when the child has closed its stdout. Raises queue.Empty after `timeout_s`."""
        while line := self._lines.get(timeout=timeout_s):
            with suppress(ValueError):  # half a line of a child that was killed while writing
                message: dict[str, Any] = json.loads(line)
                return message
        return None

    def end(self, patience_s: float) -> None:
        """Wait for a child that has closed its stdout, and stop one that has not left by then."""
        child = self._process
        try:
            child.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            child.kill()
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdin is not None:
                with suppress(OSError):
                    child.stdin.close()
            for reader in self._readers:
                reader.join(timeout=5)

    def how_it_ended(self) -> str:
        """`ended by SIGABRT: last words`, for a child that ended."""
        last = last_words(b"".join(self._stderr).decode("utf-8", "replace"))
        status, how = self.status, f"ended with status {self.status}"
        if status < 0 or status > 128:
            with suppress(ValueError):
                how = f"ended by {signal.Signals(-status if status < 0 else status - 128).name}"
        return how + (f": {last}" if last else "")


def child_environment(rotate: bool) -> dict[str, str]:
    """The child's environment: our packages importable, no debugger started by ggml's abort, the rotation as asked."""
    environment = dict(os.environ)
    roots = [str(Path(__file__).resolve().parents[1])]
    roots += [path for path in sys.path if path and path not in roots]
    environment["PYTHONPATH"] = os.pathsep.join(roots)
    environment["GGML_NO_BACKTRACE"] = "1"
    # Threads that spin at barriers make llama.cpp many times slower as soon as anything else wants the CPU.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.pop("LLAMA_ATTN_ROT_DISABLE", None)
    if not rotate:
        environment["LLAMA_ATTN_ROT_DISABLE"] = "1"
    return environment


def _pump(stream: Any, put: Callable[[bytes], None]) -> None:
    """Read lines until the child closes the stream, then put an empty one."""
    for line in stream:
        put(line)
    put(b"")


def last_words(stderr: str) -> str:
    """The line of stderr that says why: a failed assertion, else the last line; without the build machine's paths."""
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    line = (asserted or lines or [""])[-1]
    return re.sub(r"^\S*[/\\](?=[^/\\\s]+:\d+:)", "", line)


def take_stdout() -> TextIO:
    """In the child: keep the pipe for ourselves and send what C code prints to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def dump_no_core() -> None:
    """In the child: an abort is an expected outcome here; a core file of the whole model is not."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
