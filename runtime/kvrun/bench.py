"""Speed of cache types, ours and llama.cpp's, as llama-bench measures it, with memory and quality beside it.

Every setting runs in a child of its own (`kvrun.bench_worker`). At each depth all children fill their caches; then they
take turns, one repetition each, so that whatever else the machine does meets all of them alike. Tokens are random and
the same for all. llama.cpp's rows and ours count the same work: a prompt up to the logits of its last token, or tokens
one by one with the logits of each.
"""

from __future__ import annotations

import queue
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrun import __version__, llamacpp
from kvrun.child import Child
from kvrun.errors import KvError
from kvrun.llamacpp import LlamaSetting
from kvrun.plan import CachePlan, LayerGeometry

if TYPE_CHECKING:
    from kvrun.engine import Engine

#: Seconds without a word from a child after which it is stopped: filling a deep cache says nothing.
TIMEOUT_S = 3600.0


class BenchError(KvError):
    """A child gave no sample."""


@dataclass(frozen=True)
class Job:
    """`n_prompt` tokens at once or `n_gen` one by one, with `n_depth` tokens in the cache before."""

    n_prompt: int
    n_gen: int
    n_depth: int


@dataclass(frozen=True)
class Setting:
    """One cache type of one engine.  engine: `kvrun` or `llama.cpp`.  request: the child's `open` message.

    impl: which implementation runs.  plan: of our settings: where it quantizes, a run that reads no packed token is no
    measurement.
    """

    engine: str
    type_k: str
    type_v: str
    request: dict[str, Any]
    impl: str = ""
    plan: CachePlan | None = None


@dataclass(frozen=True)
class BenchRow:
    """One test of one setting; the names that llama-bench has mean the same here.

    avg_ns, stddev_ns, samples_ns: of the repetitions.  *_ts: tokens per second.  median_ts: what to compare, a mean is
    moved by a single disturbance.  ttft_ms: median time to the first result of a repetition: to the end of the prompt,
    or of the first single token.  load_s: from the start of the process until the model is open.  fill_s: to read
    `n_depth` tokens.  peak_bytes: the most memory that the process had so far, mapped weights included.
    kv_bytes, bits_per_value: of the cache, as allocated for `n_depth + n_prompt + n_gen` tokens.
    packed_read: quantized tokens that attention read, None for llama.cpp.
    kld_mean, kld_mean_se: KL divergence of the cache type from f16, on `kld_text`; None where it was not measured.
    error: why there are no figures.
    """

    engine: str
    impl: str
    type_k: str
    type_v: str
    recipe: str
    model_filename: str
    model_size: int
    n_threads: int
    n_ubatch: int
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str = ""
    avg_ns: int | None = None
    stddev_ns: int | None = None
    samples_ns: list[int] = field(default_factory=list)
    avg_ts: float | None = None
    stddev_ts: float | None = None
    samples_ts: list[float] = field(default_factory=list)
    median_ts: float | None = None
    ttft_ms: float | None = None
    load_s: float | None = None
    fill_s: float | None = None
    peak_bytes: int | None = None
    kv_bytes: int | None = None
    bits_per_value: float | None = None
    packed_read: int | None = None
    kld_mean: float | None = None
    kld_mean_se: float | None = None
    kld_text: str = ""
    version: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row as plain types."""
        return asdict(self)


def jobs_for(n_prompt: Sequence[int], n_gen: Sequence[int], n_depth: Sequence[int]) -> list[Job]:
    """llama-bench's tests: every prompt length and every number of single tokens, at every depth; 0 leaves one out."""
    tests = [
        test
        for depth in sorted(set(n_depth))
        for test in [*(Job(p, 0, depth) for p in n_prompt if p), *(Job(0, n, depth) for n in n_gen if n)]
    ]
    if not tests:
        raise KvError("nothing to measure: -p and -n are both 0; give one of them a number of tokens")
    return tests


class _Side:
    """A setting and its child, until it fails."""

    def __init__(self, setting: Setting, row: BenchRow) -> None:
        self.setting, self.row = setting, row
        self.child = Child("kvrun.bench_worker")
        self.error = ""
        self.facts: dict[str, Any] = {}
        self.facts |= self.ask(do="open", engine=setting.engine, **setting.request)

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send and wait for the answer. Empty, and `error` is set, when there is none."""
        if self.error:
            return {}
        self.child.send(message)
        try:
            answer = self.child.receive(TIMEOUT_S)
        except queue.Empty:
            answer = {"event": "error", "message": f"nothing came for {TIMEOUT_S:g} s"}
        if answer is not None and answer["event"] != "error":
            return answer
        self.child.end(patience_s=5.0)
        self.error = answer["message"] if answer is not None else f"{self.setting.engine} {self.child.how_it_ended()}"
        return {}


def bench(
    settings: Sequence[Setting],
    tests: Sequence[Job],
    *,
    base: BenchRow,
    n_vocab: int,
    repetitions: int,
    geometry: Sequence[LayerGeometry],
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Iterator[BenchRow]:
    """Run all tests on all settings, interleaved; a row for each, also for what fails: it carries the reason.

    base: a row with what all have in common.  n_vocab: token ids are drawn below it.  geometry: of the model's cache.
    """
    rng = random.Random(seed)
    sides: list[_Side] = []
    try:
        for setting in settings:
            on_progress(f"opening {setting.engine} {setting.type_k}/{setting.type_v}")
            row = replace(
                base, engine=setting.engine, impl=setting.impl, type_k=setting.type_k, type_v=setting.type_v,
                recipe=setting.plan.recipe if setting.plan else "", version=__version__,
            )  # fmt: skip
            sides.append(_Side(setting, row))
        for depth in sorted({test.n_depth for test in tests}):
            here = [test for test in tests if test.n_depth == depth]
            n_ctx = depth + max(test.n_prompt + test.n_gen for test in here)
            past = [rng.randrange(n_vocab) for _ in range(depth)]
            for side in sides:
                if depth:
                    on_progress(f"reading {depth} tokens, {side.setting.engine} {side.row.type_k}/{side.row.type_v}")
                side.facts |= {"fill_s": side.ask(do="depth", tokens=past, n_ctx=n_ctx).get("seconds")}
            for test in here:
                prompt = [rng.randrange(n_vocab) for _ in range(test.n_prompt)]
                generated = [rng.randrange(n_vocab) for _ in range(test.n_gen)]
                on_progress(f"n_prompt {test.n_prompt}, n_gen {test.n_gen}, depth {depth}")
                yield from _turns(sides, test, prompt, generated, repetitions, geometry)
    finally:
        for side in sides:
            side.child.end(patience_s=0.0)


def _turns(
    sides: Sequence[_Side],
    test: Job,
    prompt: Sequence[int],
    generated: Sequence[int],
    repetitions: int,
    geometry: Sequence[LayerGeometry],
) -> Iterator[BenchRow]:
    """One test: a repetition that warms up, then so many in turns, beginning with another setting each time."""
    samples: list[list[dict[str, Any]]] = [[] for _ in sides]
    before = [side.ask(do="state").get("packed_read") or 0 for side in sides]
    when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    for repetition in range(-1, repetitions):
        for i in range(len(sides)):
            i = (i + repetition) % len(sides)
            # A few tokens warm up as well as all of them.
            tokens = generated if repetition >= 0 else generated[:4]
            answer = sides[i].ask(do="run", prompt=prompt, generated=tokens)
            if answer and repetition >= 0:
                samples[i].append(answer)
    for side, found, read in zip(sides, samples, before, strict=True):
        yield _row(side, test, found, read, when, geometry)


def _row(
    side: _Side, test: Job, samples: list[dict[str, Any]], read: int, when: str, geometry: Sequence[LayerGeometry]
) -> BenchRow:
    state = side.ask(do="state")
    row = replace(
        side.row, n_prompt=test.n_prompt, n_gen=test.n_gen, n_depth=test.n_depth, test_time=when,
        impl=side.facts.get("impl") or side.row.impl, version=state.get("version", side.row.version),
        load_s=side.facts.get("seconds"), fill_s=side.facts.get("fill_s"),
    )  # fmt: skip
    if side.error:
        return replace(row, error=side.error)
    setting = side.setting
    if setting.engine == "llama.cpp":
        sizes = llamacpp.allocation(LlamaSetting(setting.type_k, setting.type_v), geometry, state)
    else:
        sizes = {name: state[name] for name in ("kv_bytes", "bits_per_value")}
        row = replace(row, packed_read=state["packed_read"] - read)
        if setting.plan is not None and setting.plan.quantizes and not row.packed_read:
            why = "no packed token was read: sinks and window cover all there was; raise -d, -p or -n"
            return replace(row, **sizes, error=f"refused: {why}")
    ns = [sample["ns"] for sample in samples]
    n_tokens = test.n_prompt + test.n_gen
    ts = [1e9 * n_tokens / t for t in ns]
    return replace(
        row, **sizes, samples_ns=ns, avg_ns=round(statistics.fmean(ns)), stddev_ns=round(_spread(ns)), samples_ts=ts,
        avg_ts=statistics.fmean(ts), stddev_ts=_spread(ts), median_ts=statistics.median(ts),
        ttft_ms=statistics.median(sample["first_ns"] for sample in samples) / 1e6, peak_bytes=state["peak_bytes"],
    )  # fmt: skip


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def our_setting(engine: Engine, plan: CachePlan, options: dict[str, Any], *, n_ubatch: int) -> Setting:
    """A setting of ours. options: arguments of `kvrun.commands.common.load_session`, with `model`."""
    session = {**options, "type_k": plan.type_k, "type_v": plan.type_v, "engine": engine.name}
    request = {"session": session, "n_ubatch": n_ubatch}
    return Setting("kvrun", plan.type_k, plan.type_v, request, impl=engine.name, plan=plan)


def llama_setting(name: str, model: Path, *, n_threads: int, n_ubatch: int) -> Setting:
    """A setting of llama.cpp's: a type for both sides, or `keys/values`."""
    type_k, _, type_v = name.partition("/")
    type_v = type_v or type_k
    repack = llamacpp.extra_buffers_work(model, n_threads)
    both = LlamaSetting(type_k, type_v)
    request = llamacpp.request_for("bench", model, both, n_threads, n_ubatch, repack)
    return Setting("llama.cpp", type_k, type_v, request, impl="cpu+repack" if repack else "cpu")
