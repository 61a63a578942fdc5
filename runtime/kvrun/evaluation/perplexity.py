"""Runs texts through caches: each plan gets its own cache, and all advance together, a chunk at a time.

Every figure goes through the cache as decoding does: a chunk's keys and values are stored first, and its queries then
read what the visibility rule lets them see. Chunk size changes nothing but speed. The reference is a plan that all
others are in lock step with, so that one chunk of logits per engine pass is alive at a time, whatever the length of
the window; or it was kept on disk by an earlier run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrun import __version__
from kvrun.cache import KVCache
from kvrun.errors import KvError
from kvrun.evaluation.guard import check_cache_was_read
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.probe import check_cache_obeys
from kvrun.evaluation.stored import Recorder, StoredReference, StoredRows
from kvrun.evaluation.texts import MeasuredText
from kvrun.evaluation.windows import Chunk, Windows
from kvrun.plan import CachePlan
from kvrun.results import ResultRow, rotation_name

if TYPE_CHECKING:
    from torch import Tensor

    from kvrun.engine import Engine

#: What a plan may fail with while the others go on: our own errors, and torch's for shapes and memory.
FAILURES = (KvError, ValueError, RuntimeError, MemoryError)


class Run:
    """One plan on its way through the windows.

    scores: per token so far.  seconds, n_tokens: spent in and fed through this plan's own forward passes.
    failure: why the run ended early, None if it did not.
    bypass: attend to the chunk's own keys and values instead of the cache, the classic mistake. It runs, to show that
        its figures do not depend on the cache type; `check` refuses them.
    """

    def __init__(self, engine: Engine, plan: CachePlan, n_ctx: int, *, bypass: bool = False) -> None:
        self.engine, self.plan, self.bypass = engine, plan, bypass
        self.cache = engine.new_cache(plan, n_ctx)
        self.scores = TokenScores()
        self.seconds = 0.0
        self.n_tokens = 0
        self.n_windows = 0
        self.failure: Exception | None = None
        self._bypassed: Tensor | None = None
        self._probed = False

    def begin(self) -> None:
        """Forget the tokens of the window before."""
        self.cache.clear()
        self._bypassed = None

    def feed(self, window: np.ndarray, chunk: Chunk) -> np.ndarray | None:
        """Append a chunk of the window. Returns its logits [n, n_vocab] when it is scored."""
        begin = time.perf_counter()
        if self.bypass:
            logits = self._bypass(window, chunk)
        else:
            tokens = window[chunk.start : chunk.stop].tolist()
            logits = self.engine.forward(tokens, self.cache, logits="all" if chunk.scored else "none")
        self.seconds += time.perf_counter() - begin
        self.n_tokens += chunk.stop - chunk.start
        return logits.numpy() if chunk.scored else None

    def _bypass(self, window: np.ndarray, chunk: Chunk) -> Tensor:
        if self._bypassed is None:
            self._bypassed = self.engine.forward_bypassing_cache(window.tolist())
        return self._bypassed[chunk.start : chunk.stop]

    def check(self) -> None:
        """Raise the failure if there was one, or MeasurementError where the cache is not what its plan says.

        That is: it was not read as it must be, or it does not return what the plan makes of keys and values.
        """
        if self.failure is not None:
            raise self.failure
        cache = self.cache
        check_cache_was_read(self.plan, cache.n_ctx, self.n_windows, cache.packed_read, cache.tokens_read)
        if not self._probed and type(cache) is KVCache:  # compiled caches are held to this one by their own tests
            check_cache_obeys(self.plan, cache.n_ctx, self.engine.model.rope_of)
            self._probed = True

    def row(
        self, *, model: str, text: MeasuredText, n_threads: int, note: str = "", control: bool = False
    ) -> ResultRow:
        """The run as a row: with figures, or with the reason why there are none."""
        plan = self.plan
        rotated = [
            any(head.transform.hadamard or head.transform.matrix is not None for layer in side for head in layer)
            for side in (plan.k, plan.v)
        ]
        facts: dict[str, Any] = {
            "engine": "kvrun",
            "type_k": plan.type_k,
            "type_v": plan.type_v,
            "recipe": plan.recipe,
            "rotation": rotation_name(*rotated),
            "n_ctx": self.cache.n_ctx,
            "bits_per_value": self.cache.bits_per_value,
            "kv_bytes": self.cache.n_bytes,
            "packed_read": self.cache.packed_read,
            "sinks": plan.sinks,
            "window": plan.window,
            "impl": self.engine.name,
            "n_threads": n_threads,
            "version": __version__,
            "model": model,
            "text": text.name,
            "text_sha256": text.sha256,
            "note": note,
            "control": control,
        }
        try:
            self.check()
            summary = asdict(self.scores.summary())
        except FAILURES as error:
            return ResultRow(**facts, error=" ".join(str(error).split()) or type(error).__name__)
        rate = self.n_tokens / self.seconds if self.seconds > 0 else None
        return ResultRow(**facts, n_scored=summary.pop("n"), tokens_per_s=rate, **summary)


def run_plans(
    engine: Engine,
    windows: Windows,
    plans: Sequence[CachePlan],
    *,
    reference: CachePlan | StoredReference | None = None,
    n_ubatch: int = 512,
    bypass: bool = False,
    on_window: Callable[[int, list[Run]], None] | None = None,
    record: Recorder | None = None,
) -> list[Run]:
    """Run every plan over all windows; nothing is checked yet (`Run.check`, `Run.row`).

    reference: a plan whose logits the others are compared with. It is not in the result; name it in `plans` as well to
        get its own row, which costs no second pass. Or a reference of these windows that was kept on disk.
    on_window: called after each window with the number done and the runs.
    record: keeps the reference on disk while it is computed; closing it is the caller's.
    A plan that fails does not stop the others; a reference that fails raises.
    """
    runs = [Run(engine, plan, windows.n_ctx, bypass=bypass) for plan in plans]
    stored = reference if isinstance(reference, StoredReference) else None
    base = next((run for run in runs if run.plan is reference), None)
    if base is None and isinstance(reference, CachePlan):
        base = Run(engine, reference, windows.n_ctx)
    n_vocab = engine.model.config.n_vocab
    # The first pass expands the weights; it must not be the timed one.
    if plans:
        engine.forward(windows.tokens[0, :1].tolist(), engine.new_cache(plans[0], 1))
    for index in range(len(windows)):
        window = windows.tokens[index]
        live = [run for run in runs if run.failure is None]
        for run in {id(run): run for run in ([base] if base else []) + live}.values():
            run.begin()
        for chunk in windows.chunks(n_ubatch, n_vocab):
            targets = windows.targets(index, chunk)
            logits = None if base is None else base.feed(window, chunk)
            known: np.ndarray | StoredRows | None = logits if logits is None else logits[: len(targets)]
            if stored is not None and chunk.scored:
                known = stored.rows(windows.row_of(index, chunk), len(targets))
            for run in live:
                if run.failure is None:
                    _advance(run, window, chunk, targets, known, logits, is_base=run is base)
            if record is not None and logits is not None:
                record.add(logits[: len(targets)], targets)
        for run in live:
            run.n_windows += run.failure is None
        if on_window is not None:
            on_window(index + 1, runs)
    return runs


def _advance(
    run: Run,
    window: np.ndarray,
    chunk: Chunk,
    targets: np.ndarray,
    known: np.ndarray | StoredRows | None,
    own: np.ndarray | None,
    *,
    is_base: bool,
) -> None:
    """Feed one chunk to one run and score it against what is known. A failure is kept, unless it is the reference's.

    own: its logits where it is the reference and has been fed.
    """
    try:
        logits = own if is_base else run.feed(window, chunk)
        if logits is not None:
            run.scores.add(logits[: len(targets)], targets, known)
    except FAILURES as error:
        if is_base:
            raise
        run.failure = error
