"""The child process that runs llama.cpp: `python -m kvrun.llamacpp_worker`, started by `kvrun.llamacpp` alone.

llama.cpp aborts the whole process for some type combinations, so it never runs in ours. One line of JSON comes in on
stdin, lines of JSON go out on stdout, and whatever else is printed goes to stderr. When stdin closes, the parent has
gone and the child leaves. The rotation of quantized caches is switched off from outside (`LLAMA_ATTN_ROT_DISABLE=1`).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from kvrun.child import dump_no_core, take_stdout
from kvrun.errors import KvError
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.stored import Recorder, StoredReference
from kvrun.evaluation.windows import Windows

#: Exit status when the parent has gone; nobody reads it.
_ORPHANED = 3

_FLASH_ATTN = {True: 1, False: 0}

#: GGML_LOG_LEVEL_ERROR
_LOG_LEVEL_ERROR = 4


class Log:
    """llama.cpp's own log, line by line, kept in memory: it says what was allocated and whether caches are rotated."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._pending = ""
        # The callback must outlive every call into the library.
        self._callback = llama_cpp.llama_log_callback(self._receive)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _receive(self, level: int, text: bytes, user_data: Any) -> None:
        *whole, self._pending = (self._pending + text.decode("utf-8", "replace")).split("\n")
        # Debug lines about graph inputs number in the thousands for each context; none of them is needed.
        self.lines += [line for line in whole if "llama_graph_n_input_tensors" not in line]
        if level == _LOG_LEVEL_ERROR:
            self.errors += whole

    def take_reason(self, otherwise: str) -> str:
        """The first error since the last call: what follows it only says that something failed."""
        reason = next((" ".join(line.split()) for line in self.errors if line.strip()), otherwise)
        self.errors.clear()
        return reason


class LlamaModel:
    """A model of llama.cpp's on the CPU. extra_buffers: let llama.cpp repack weights for this CPU (AMX and others)."""

    def __init__(self, path: str, log: Log, *, extra_buffers: bool) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = extra_buffers
        self.log = log
        self.handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self.handle:
            raise KvError(log.take_reason(f"llama.cpp cannot load {path}"))
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))


class LlamaContext:
    """One context: a KV cache of given types (keys, values), fed a chunk at a time.

    n_cells: tokens the cache has room for (llama.cpp rounds the context up).  kv_mib: what its log says it allocated,
    MiB to two decimals.  rot_k, rot_v: whether cached keys and values are rotated, None when the log does not say.
    seconds, n_tokens: spent in and fed through `feed`.
    """

    def __init__(self, model: LlamaModel, types: Sequence[int], request: dict[str, Any]) -> None:
        self.model = model
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = request["n_ctx"]
        parameters.n_batch = parameters.n_ubatch = request["n_ubatch"]
        parameters.n_threads = parameters.n_threads_batch = request["n_threads"]
        parameters.flash_attn_type = _FLASH_ATTN[request["flash_attn"]]
        parameters.type_k, parameters.type_v = types
        parameters.offload_kqv = parameters.op_offload = False
        parameters.swa_full = (
            False  # as llama.cpp's own tools: layers with a sliding window keep no more than they need
        )
        begin = len(model.log.lines)
        self.handle = llama_cpp.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            raise KvError(model.log.take_reason("llama.cpp made no context"))
        self._read_log(model.log.lines[begin:])
        self._batch = llama_cpp.llama_batch_init(request["n_ubatch"], 0, 1)
        self.seconds = 0.0
        self.n_tokens = 0

    def _read_log(self, lines: Sequence[str]) -> None:
        text = "\n".join(lines)
        sizes = re.findall(r"size\s*=\s*([\d.]+) MiB \(\s*(\d+) cells,", text)
        self.kv_mib = sum(float(size) for size, _ in sizes) if sizes else None
        self.n_cells = max((int(cells) for _, cells in sizes), default=llama_cpp.llama_n_ctx(self.handle))
        rotations = {side: re.findall(rf"attn_rot_{side} = (\d)", text) for side in "kv"}
        self.rot_k, self.rot_v = ((found[-1] == "1") if found else None for found in rotations.values())

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), True)

    def feed(self, tokens: np.ndarray, position: int, *, scored: bool) -> np.ndarray | None:
        """Append tokens. Returns their logits, float32 [n, n_vocab], when `scored`: a view until the next call."""
        batch, n = self._batch, len(tokens)
        batch.n_tokens = n
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, scored
        begin = time.perf_counter()
        status = llama_cpp.llama_decode(self.handle, batch)
        llama_cpp.llama_synchronize(self.handle)
        self.seconds += time.perf_counter() - begin
        self.n_tokens += n
        if status != 0:
            raise KvError(self.model.log.take_reason(f"llama_decode failed with status {status}"))
        if not scored:
            return None
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.handle), shape=(n, self.model.n_vocab))


def compare(request: dict[str, Any], model: LlamaModel, send: Any) -> None:
    """The setting against f16: its own logits where it is f16, a file of an earlier row, or a second context beside it.

    In lock step, so that one chunk of logits of each is alive at a time. `stored` of the request names that file,
    `record` where it may be written.
    """
    windows = Windows(np.array(request["windows"], dtype=np.int64))
    setting = LlamaContext(model, request["types"], request)
    send(
        "context",
        n_cells=setting.n_cells,
        kv_mib=setting.kv_mib,
        rot_k=setting.rot_k,
        rot_v=setting.rot_v,
        version=llama_cpp.__version__,
    )
    stored = _stored_reference(request, windows.n_scored, model.n_vocab)
    base: LlamaContext | None = None
    if stored is None:
        is_base = request["types"] == request["base_types"] and request["flash_attn"]
        base = setting if is_base else LlamaContext(model, request["base_types"], request | {"flash_attn": True})
    recorder = None
    if base is not None and request.get("record"):
        recorder = Recorder(
            Path(request["record"]), windows.n_scored, model.n_vocab, lambda text: send("remark", text=text)
        )
    contexts = {id(context): context for context in (base, setting) if context is not None}.values()
    # Weights are mapped from the file: the first pass reads them from the disk, so it must not be the timed one.
    for context in contexts:
        context.feed(windows.tokens[0, :1], 0, scored=False)
    setting.seconds, setting.n_tokens = 0.0, 0
    scores = TokenScores()
    try:
        for index in range(len(windows)):
            for context in contexts:
                context.clear()
            for chunk in windows.chunks(request["n_ubatch"], model.n_vocab):
                tokens, targets = windows.tokens[index, chunk.start : chunk.stop], windows.targets(index, chunk)
                known = base.feed(tokens, chunk.start, scored=chunk.scored) if base is not None else None
                logits = known if base is setting else setting.feed(tokens, chunk.start, scored=chunk.scored)
                if logits is None:
                    continue
                if recorder is not None and known is not None:
                    recorder.add(known[: len(targets)], targets)
                rows = stored.rows(windows.row_of(index, chunk), len(targets)) if stored is not None else None
                scores.add(logits[: len(targets)], targets, rows if known is None else known[: len(targets)])
            send("progress", window=index + 1, n_windows=len(windows), ppl=scores.ppl)
        if recorder is not None:
            recorder.finish()
    finally:
        if recorder is not None:
            recorder.discard()
    tokens_per_s = setting.n_tokens / setting.seconds if setting.seconds > 0 else None
    send("result", tokens=scores.as_dict(), tokens_per_s=tokens_per_s)


def _stored_reference(request: dict[str, Any], n_rows: int, n_vocab: int) -> StoredReference | None:
    """The reference of an earlier row, None where there is none that fits."""
    try:
        return StoredReference(Path(request["stored"]), n_rows, n_vocab) if request.get("stored") else None
    except (KvError, OSError):
        return None


def write_logits(request: dict[str, Any], model: LlamaModel, send: Any) -> None:
    """Feed tokens and write all their logits to a .npy file, float32 [n, n_vocab], a batch at a time."""
    tokens = np.array(request["tokens"], dtype=np.int64)
    context = LlamaContext(model, request["types"], request)
    step = request["n_ubatch"]
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), model.n_vocab)}
    with open(request["out"], "wb") as out:  # written in order: a full disk is an error here, in a mapped file a crash
        np.lib.format.write_array_header_1_0(out, header)
        for start in range(0, len(tokens), step):
            stop = min(start + step, len(tokens))
            logits = context.feed(tokens[start:stop], start, scored=True)
            out.write(np.ascontiguousarray(logits, dtype="<f4").data)
            send("progress", window=stop, n_windows=len(tokens))
    send("result", rot_k=context.rot_k, rot_v=context.rot_v)


def probe(request: dict[str, Any], model: LlamaModel, send: Any) -> None:
    """Feed tokens and say that it went well: whether this build of llama.cpp survives its own kernels here."""
    LlamaContext(model, request["types"], request).feed(np.array(request["tokens"]), 0, scored=True)
    send("result")


MODES = {"compare": compare, "logits": write_logits, "probe": probe}


def main() -> int:
    """Serve one request. Reasons for failing go out as an `error` line with exit status 1."""
    channel = take_stdout()

    def send(event: str, **values: Any) -> None:
        channel.write(json.dumps({"event": event, **values}) + "\n")
        channel.flush()

    dump_no_core()
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    send("started", pid=os.getpid())
    try:
        model = LlamaModel(request["model"], Log(), extra_buffers=request["extra_buffers"])
        MODES[request["mode"]](request, model, send)
    except (KvError, OSError, MemoryError) as error:
        send("error", message=str(error) or type(error).__name__)
        return 1
    return 0


def _leave_with_parent() -> None:
    """Block until stdin closes: the parent holds its end for as long as it lives."""
    sys.stdin.buffer.read()
    os._exit(_ORPHANED)


if __name__ == "__main__":
    # Past the interpreter's clean-up: freeing llama.cpp's globals in the wrong order can crash after all is done.
    status = main()
    sys.stderr.flush()
    os._exit(status)
