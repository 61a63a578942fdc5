"""llama.cpp beside us: the same tokens through its own KV cache types, in a child process for every row.

Some type combinations abort the interpreter that llama.cpp runs in, so it runs in a child (`kvrun.llamacpp_worker`) and
whatever happens to the child becomes a row that says so. The child measures its setting against llama.cpp's own f16
cache, with our metrics code, and reports what llama.cpp's log says about the allocation and the rotation.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvrun.child import Child
from kvrun.errors import KvError
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.windows import Windows
from kvrun.plan import LayerGeometry
from kvrun.results import ResultRow, rotation_name

#: llama.cpp's cache types that a comparison offers, with ggml's numbers.
CACHE_TYPES = {"f16": 1, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}

#: Other ggml types the child can be asked for: `q6_k` aborts without flash attention, which a test needs.
OTHER_TYPES = {"f32": 0, "bf16": 30, "q6_k": 14}

#: (values, bytes) of a block of each type.
BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
    "q6_k": (256, 210),
}

#: Seconds without a word from the child after which it is stopped.
TIMEOUT_S = 900.0

_MIB = 1024 * 1024


class LlamaCppError(KvError):
    """The child process that runs llama.cpp gave no result."""


@dataclass(frozen=True)
class LlamaSetting:
    """How llama.cpp keeps its cache. rotate: leave its rotation of quantized caches as it is (on), or switch it off."""

    type_k: str
    type_v: str
    rotate: bool = True
    flash_attn: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a child said. events: by name, the last of each.  error: why there is no result; empty when there is one."""

    events: dict[str, dict[str, Any]]
    error: str = ""


def measure(
    model: Path, windows: Windows, setting: LlamaSetting, geometry: Sequence[LayerGeometry], **options: Any
) -> ResultRow:
    """The row of `measure_tokens`, which takes the same options."""
    return measure_tokens(model, windows, setting, geometry, **options)[0]


def measure_tokens(
    model: Path,
    windows: Windows,
    setting: LlamaSetting,
    geometry: Sequence[LayerGeometry],
    *,
    n_threads: int,
    n_ubatch: int = 512,
    extra_buffers: bool | None = None,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[int, int], None] | None = None,
    stored: Path | None = None,
    record: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[ResultRow, TokenScores]:
    """Measure one setting of llama.cpp's on `windows`, against its own f16 cache. Never raises for what the child does.

    Returns the row, and its scores token by token: empty where the row has none.

    geometry: of the model's cache, to turn llama.cpp's rounded MiB into bytes and bits per value.
    n_ubatch: at most 512, llama.cpp's default: a larger one changes nothing but memory.
    extra_buffers: weight repacking; None asks `extra_buffers_work`.
    timeout_s: seconds without progress after which the child is stopped.
    on_progress: called with (windows done, windows in all).
    stored, record: files of `kvrun.evaluation.stored`: f16's reference from an earlier row, and where to keep it.
    say: told in one line what the child could not do but does not need.
    """
    row = ResultRow(
        engine="llama.cpp", type_k=setting.type_k, type_v=setting.type_v, n_ctx=windows.n_ctx, n_threads=n_threads
    )
    if extra_buffers is None:
        extra_buffers = extra_buffers_work(model, n_threads)
    request = {
        **request_for("compare", model, setting, n_threads, min(n_ubatch, 512), extra_buffers),
        "base_types": [CACHE_TYPES["f16"], CACHE_TYPES["f16"]],
        "n_ctx": windows.n_ctx,
        "windows": windows.tokens.tolist(),
        "stored": None if stored is None else str(stored),
        "record": None if record is None else str(record),
    }

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "progress" and on_progress is not None:
            on_progress(event["window"], event["n_windows"])
        elif event["event"] == "remark":
            say(event["text"])

    outcome = run_child(request, rotate=setting.rotate, timeout_s=timeout_s, on_event=watch)
    context, result = outcome.events.get("context", {}), outcome.events.get("result")
    row = replace(
        row,
        rotation=_rotation(setting, context),
        impl="cpu+repack" if extra_buffers else "cpu",
        version=context.get("version", ""),
        **allocation(setting, geometry, context),
    )
    if outcome.error or result is None:
        return replace(row, error=outcome.error or "the llama.cpp child ended without a result"), TokenScores()
    scores = TokenScores.from_dict(result["tokens"])
    summary = asdict(scores.summary())
    return replace(row, n_scored=summary.pop("n"), tokens_per_s=result["tokens_per_s"], **summary), scores


def logits(
    model: Path,
    tokens: Sequence[int],
    out: Path,
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    rotate: bool = True,
    flash_attn: bool = True,
    n_threads: int = 1,
    n_batch: int = 512,
    extra_buffers: bool | None = None,
    timeout_s: float = TIMEOUT_S,
) -> np.ndarray:
    """llama.cpp's logits for all `tokens`, written to `out` (.npy) a batch at a time: float32 [n, n_vocab], mapped.

    Raises LlamaCppError with the reason when the child fails.
    """
    if extra_buffers is None:
        extra_buffers = extra_buffers_work(model, n_threads)
    setting = LlamaSetting(type_k, type_v, rotate, flash_attn)
    request = {
        **request_for("logits", model, setting, n_threads, n_batch, extra_buffers),
        "n_ctx": len(tokens),
        "tokens": [int(token) for token in tokens],
        "out": str(out),
    }
    outcome = run_child(request, rotate=rotate, timeout_s=timeout_s)
    if outcome.error:
        raise LlamaCppError(outcome.error)
    array: np.ndarray = np.load(out, mmap_mode="r")
    return array


@lru_cache(maxsize=8)
def extra_buffers_work(model: Path, n_threads: int) -> bool:
    """Whether llama.cpp survives its own weight repacking here, tried once per model in a child of its own.

    With it, processes die in `ggml_backend_amx_mul_mat` on some machines that announce AMX (llama.cpp issue 20824);
    rows say in `impl` which of the two ran.
    """
    request = {
        **request_for("probe", model, LlamaSetting("f16", "f16"), n_threads, 64, True),
        "n_ctx": 64,
        "tokens": [0] * 64,
    }
    return not run_child(request, rotate=True, timeout_s=TIMEOUT_S).error


def request_for(
    mode: str, model: Path, setting: LlamaSetting, n_threads: int, n_ubatch: int, extra_buffers: bool
) -> dict[str, Any]:
    """The message that starts a child of `kvrun.llamacpp_worker`, without its tokens."""
    return {
        "mode": mode,
        "model": str(model),
        "types": [ggml_type(setting.type_k), ggml_type(setting.type_v)],
        "flash_attn": setting.flash_attn,
        "n_threads": n_threads,
        "n_ubatch": n_ubatch,
        "extra_buffers": extra_buffers,
    }


def ggml_type(name: str) -> int:
    """ggml's number of a cache type."""
    known = CACHE_TYPES | OTHER_TYPES
    if name not in known:
        raise KvError(f"llama.cpp has no cache type {name}; use one of {', '.join(CACHE_TYPES)}")
    return known[name]


def _rotation(setting: LlamaSetting, context: dict[str, Any]) -> str:
    """What llama.cpp's log says; what was asked for where the child did not live to say it."""
    if not context:
        return rotation_name(setting.rotate and setting.type_k != "f16", setting.rotate and setting.type_v != "f16")
    if context["rot_k"] is None or context["rot_v"] is None:
        return "unknown"
    return rotation_name(context["rot_k"], context["rot_v"])


def allocation(setting: LlamaSetting, geometry: Sequence[LayerGeometry], context: dict[str, Any]) -> dict[str, Any]:
    """Bytes and bits per value from what llama.cpp's log says it allocated.

    The log gives the number of cells (tokens, rounded up by llama.cpp) and MiB to two decimals. Cells times the blocks
    of each type gives the same to the byte; where the two disagree, as with sliding windows, the log is right.
    """
    if context.get("kv_mib") is None:
        return {"kv_bytes": None, "bits_per_value": None}
    exact, n_values = 0, 0
    for layer in geometry:
        for name, head_dim in ((setting.type_k, layer.head_dim_k), (setting.type_v, layer.head_dim_v)):
            values, n_bytes = BLOCKS[name]
            row = layer.n_head_kv * head_dim
            exact += context["n_cells"] * (row // values) * n_bytes
            n_values += min(context["n_cells"], layer.sliding or context["n_cells"]) * row
    logged = context["kv_mib"] * _MIB
    n_bytes = exact if abs(exact - logged) <= 0.02 * _MIB else round(logged)
    return {"kv_bytes": n_bytes, "bits_per_value": n_bytes * 8 / n_values}


def run_child(
    request: dict[str, Any],
    *,
    rotate: bool,
    timeout_s: float,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Outcome:
    """Run one request in a child and collect what it says. The child is gone when this returns or raises."""
    child = Child("kvrun.llamacpp_worker", rotate=rotate)
    events: dict[str, dict[str, Any]] = {}
    finished = False
    try:
        child.send(request)
        while (event := child.receive(timeout_s)) is not None:
            events[event["event"]] = event
            if on_event is not None:
                on_event(event)
        finished = True
    except queue.Empty:
        events.pop("result", None)
    finally:
        child.end(patience_s=30.0 if finished else 0.0)
    if not finished:
        return Outcome(events, f"llama.cpp said nothing for {timeout_s:g} s and was stopped")
    return Outcome(events, _why(child, events))


def _why(child: Child, events: dict[str, dict[str, Any]]) -> str:
    """One line for a child that did not deliver: its own words, its last words, or how it died. Empty when it did."""
    if child.status == 0 and "result" in events:
        return ""
    if "error" in events:
        return f"llama.cpp: {events['error']['message']}"
    return f"llama.cpp {child.how_it_ended()}"
