"""One side of `kvrun bench` in a process of its own: `python -m kvrun.bench_worker`, started by `kvrun.bench` alone.

Every setting, ours and llama.cpp's alike, is timed in its own child, so that its memory is its own; the parent lets one
child work at a time and takes turns between them. Messages in: `open`, then any number of `depth` (fill the cache),
`run` (time one repetition, after which the cache is as it was) and `state`. When stdin closes, the child leaves.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvrun.errors import KvError

if TYPE_CHECKING:
    from kvrun.cache import KVCache, Mark
    from kvrun.llamacpp_worker import LlamaContext


#: Exit status when the parent has gone; nobody reads it.
_ORPHANED = 3


class Player(Protocol):
    """What both sides can do."""

    def facts(self) -> dict[str, Any]:
        """What is known by now, for the parent's rows."""

    def fill(self, tokens: Sequence[int], n_ctx: int) -> None:
        """A new cache for `n_ctx` tokens with `tokens` in it."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens and compute the logits of the last one."""

    def back(self) -> None:
        """Forget what came after `fill`."""


class Ours:
    """kvrun. request: the arguments of `load_session` under `session`, and `n_ubatch`."""

    def __init__(self, request: dict[str, Any]) -> None:
        from kvrun.commands.common import load_session

        self.session = load_session(announce=False, **request["session"])
        self.n_ubatch = request["n_ubatch"]
        self.cache: KVCache | None = None
        self.mark: Mark | None = None

    def facts(self) -> dict[str, Any]:
        """What does not depend on the depth, and what the present cache takes."""
        found: dict[str, Any] = {"impl": self.session.engine.name}
        if self.cache is not None:
            found |= {
                "kv_bytes": self.cache.n_bytes,
                "bits_per_value": self.cache.bits_per_value,
                "packed_read": self.cache.packed_read,
            }
        return found

    def fill(self, tokens: Sequence[int], n_ctx: int) -> None:
        """A new cache with `tokens` in it."""
        self.cache = self.session.engine.new_cache(self.session.plan, n_ctx)
        self.session.engine.forward([1], self.cache)
        self.cache.clear()
        if tokens:
            self.feed(tokens)
        self.mark = self.cache.mark()

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        assert self.cache is not None
        self.session.engine.prefill(tokens, self.cache, n_ubatch=self.n_ubatch)

    def back(self) -> None:
        """Forget what came after `fill`."""
        assert self.cache is not None and self.mark is not None
        self.cache.rewind(self.mark)


class Theirs:
    """llama.cpp. request: of `kvrun.llamacpp.request_for`."""

    def __init__(self, request: dict[str, Any]) -> None:
        import llama_cpp

        from kvrun.llamacpp_worker import LlamaModel, Log

        self.lib, self.request = llama_cpp, request
        self.model = LlamaModel(request["model"], Log(), extra_buffers=request["extra_buffers"])
        self.context: LlamaContext | None = None
        self.depth = 0

    def facts(self) -> dict[str, Any]:
        """What llama.cpp's log says of the present context; the parent makes bytes of it."""
        found: dict[str, Any] = {"version": self.lib.__version__}
        if self.context is not None:
            found |= {"n_cells": self.context.n_cells, "kv_mib": self.context.kv_mib}
        return found

    def fill(self, tokens: Sequence[int], n_ctx: int) -> None:
        """A new context with `tokens` in it."""
        from kvrun.llamacpp_worker import LlamaContext

        if self.context is not None:
            self.lib.llama_free(self.context.handle)
        self.context = LlamaContext(self.model, self.request["types"], self.request | {"n_ctx": n_ctx})
        self.feed([1])
        self.context.clear()
        self.feed(tokens)
        self.depth = len(tokens)

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens; llama.cpp computes the last one's logits of each batch."""
        assert self.context is not None
        step = self.request["n_ubatch"]
        for first in range(0, len(tokens), step):
            part = tokens[first : first + step]
            array = (ctypes.c_int32 * len(part))(*part)
            status = self.lib.llama_decode(self.context.handle, self.lib.llama_batch_get_one(array, len(part)))
            self.lib.llama_synchronize(self.context.handle)
            if status != 0:
                raise KvError(self.model.log.take_reason(f"llama_decode failed with status {status}"))

    def back(self) -> None:
        """Forget what came after `fill`."""
        assert self.context is not None
        self.lib.llama_memory_seq_rm(self.lib.llama_get_memory(self.context.handle), 0, self.depth, -1)


def run(player: Player, prompt: Sequence[int], generated: Sequence[int]) -> dict[str, Any]:
    """One repetition: a prompt at once, then tokens one by one. Nanoseconds of all, and up to the first result."""
    start = time.perf_counter_ns()
    first = 0
    if prompt:
        player.feed(prompt)
        first = time.perf_counter_ns() - start
    for token in generated:
        player.feed([token])
        first = first or time.perf_counter_ns() - start
    total = time.perf_counter_ns() - start
    player.back()
    return {"ns": total, "first_ns": first}


def peak_bytes() -> int:
    """The most memory that this process had at once, mapped weights included."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    return 0


def serve(receive: Callable[[], dict[str, Any] | None], send: Callable[..., None]) -> None:
    """Answer messages until there are no more."""
    begun = time.perf_counter()
    player: Player | None = None
    while (message := receive()) is not None:
        what = message["do"]
        if what == "open":
            player = Ours(message) if message["engine"] == "kvrun" else Theirs(message)
            send("opened", seconds=time.perf_counter() - begun, **player.facts())
        elif player is None:
            raise ValueError("the first message must be `open`")
        elif what == "depth":
            start = time.perf_counter()
            player.fill(message["tokens"], message["n_ctx"])
            send("filled", seconds=time.perf_counter() - start, **player.facts())
        elif what == "run":
            send("sample", **run(player, message["prompt"], message["generated"]))
        elif what == "state":
            send("state", peak_bytes=peak_bytes(), **player.facts())


def main() -> int:
    """Serve the parent. A reason for failing goes out as an `error` message, with exit status 1."""
    from kvrun.child import dump_no_core, take_stdout
    from kvrun.console import describe

    channel = take_stdout()

    def send(event: str, **values: Any) -> None:
        channel.write(json.dumps({"event": event, **values}) + "\n")
        channel.flush()

    messages: queue.Queue[bytes] = queue.Queue()

    def listen() -> None:
        # A parent that has gone ends us also in the middle of a long prompt.
        for line in sys.stdin.buffer:
            messages.put(line)
        os._exit(_ORPHANED)

    def receive() -> dict[str, Any] | None:
        message: dict[str, Any] = json.loads(messages.get())
        return message

    dump_no_core()
    threading.Thread(target=listen, daemon=True).start()
    try:
        serve(receive, send)
    except Exception as error:
        send("error", message=describe(error))
        return 1
    return 0


if __name__ == "__main__":
    # Past the interpreter's clean-up: freeing llama.cpp's globals in the wrong order can crash after all is done.
    status = main()
    sys.stderr.flush()
    os._exit(status)
