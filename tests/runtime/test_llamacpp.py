"""llama.cpp in a child process: its figures, what its log says, and that nothing it does takes us down."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrun import llamacpp
from kvrun.cache_types import plan_for
from kvrun.child import child_environment
from kvrun.engine import Engine
from kvrun.errors import KvError
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.perplexity import run_plans
from kvrun.evaluation.texts import default_text
from kvrun.evaluation.windows import Windows, cut
from kvrun.llamacpp import CACHE_TYPES, LlamaCppError, LlamaSetting, measure
from kvrun.models import load_model
from kvrun.plan import LayerGeometry
from kvrun.results import ResultRow
from kvrun.tokenizer import Tokenizer
from tools.make_tiny_model import make_tiny_model

GEOMETRY = [LayerGeometry(2, 64, 64)] * 2
PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def windows(tiny: Path) -> Windows:
    return cut(Tokenizer(tiny).encode(PROSE), 128, bos=None, limit=3)


def row(tiny: Path, windows: Windows, setting: LlamaSetting, **options: Any) -> ResultRow:
    return measure(tiny, windows, setting, GEOMETRY, n_threads=1, **options)


def same(name: str, *, rotate: bool = True) -> LlamaSetting:
    return LlamaSetting(name, name, rotate)


def wait_until_gone(pid: int) -> None:
    """Wait for a process of somebody else's to end, for at most a minute."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([handle], [], [], 60)
        assert ended, f"process {pid} is still there"
    finally:
        os.close(handle)


def test_f16_is_its_own_reference(tiny: Path, windows: Windows) -> None:
    found = row(tiny, windows, same("f16"))
    assert found.error == ""
    assert (found.kld_mean, found.kld_max, found.same_top) == (0.0, 0.0, 1.0)
    assert (found.bits_per_value, found.rotation) == (16.0, "off")
    assert found.n_scored == windows.n_scored == 3 * 63
    assert found.tokens_per_s is not None and found.tokens_per_s > 0
    assert found.packed_read is None


def test_both_engines_score_the_same_positions(tiny: Path, windows: Windows) -> None:
    """On F32 weights the perplexities agree, which they do not when a window or a target is off by one."""
    engine = Engine(load_model(tiny))
    (ours,) = run_plans(engine, windows, [plan_for(engine.model.config.geometry, "f16", "f16", recipe=None)])
    theirs = row(tiny, windows, same("f16"))
    assert theirs.ppl == pytest.approx(ours.scores.ppl, rel=1e-3)
    assert theirs.n_scored == len(ours.scores)


@pytest.mark.parametrize(("name", "bits"), [("q8_0", 8.5), ("q4_0", 4.5), ("iq4_nl", 4.5)])
def test_quantized_types_are_counted_and_measured(tiny: Path, windows: Windows, name: str, bits: float) -> None:
    found = row(tiny, windows, same(name))
    assert found.error == ""
    assert found.bits_per_value == bits
    # llama.cpp rounds 128 cells up to 256; two sides, two layers, two heads of 64
    assert found.kv_bytes == 256 * 2 * 2 * 2 * 64 * bits / 8
    assert found.kld_mean is not None and found.kld_mean > 1e-7
    assert found.rotation == "on"


def test_the_rotation_is_read_from_the_log_and_changes_the_figures(
    tiny: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")  # what the user has set is not what a row asks for
    on, off = row(tiny, windows, same("q4_0")), row(tiny, windows, same("q4_0", rotate=False))
    assert (on.rotation, off.rotation) == ("on", "off")
    assert on.kld_mean != off.kld_mean
    assert row(tiny, windows, LlamaSetting("q8_0", "f16")).rotation == "k"


def test_worse_types_are_worse(tiny: Path, windows: Windows) -> None:
    klds = [row(tiny, windows, same(name)).kld_mean for name in ("q8_0", "q5_1", "q4_0")]
    assert klds == sorted(klds, key=lambda kld: kld or 0.0) and klds[0] != klds[2]


def test_an_abort_becomes_a_row(tiny: Path, windows: Windows) -> None:
    """q6_K keys without flash attention: a failed assertion ends the whole process."""
    found = row(tiny, windows, LlamaSetting("q6_k", "f16", flash_attn=False))
    assert "SIGABRT" in found.error and "GGML_ASSERT" in found.error
    assert "/" not in found.error.split("GGML_ASSERT")[0]
    assert found.ppl is None and found.kld_mean is None and found.kv_bytes is None
    assert (found.engine, found.type_k) == ("llama.cpp", "q6_k")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (LlamaSetting("f16", "q8_0", flash_attn=False), "requires flash_attn"),
        (LlamaSetting("q6_k", "q6_k"), "does not divide"),
    ],
)
def test_a_refusal_becomes_a_row_with_llama_cpps_reason(
    tiny: Path, windows: Windows, setting: LlamaSetting, reason: str
) -> None:
    found = row(tiny, windows, setting)
    assert reason in found.error and "\n" not in found.error and found.ppl is None


def test_a_head_size_that_blocks_do_not_divide_becomes_a_row(tmp_path: Path) -> None:
    odd = make_tiny_model("llama", tmp_path / "odd.gguf", head_dim=80, n_head=2)
    windows = cut(Tokenizer(odd).encode(PROSE), 64, bos=None, limit=1)
    found = measure(odd, windows, same("q4_0"), [LayerGeometry(2, 80, 80)] * 2, n_threads=1)
    assert "does not divide" in found.error


def test_no_rotation_where_llama_cpp_has_none(tmp_path: Path) -> None:
    """Heads of 32 channels are not rotated, whatever is asked for."""
    small = make_tiny_model("llama", tmp_path / "small.gguf", head_dim=32)
    windows = cut(Tokenizer(small).encode(PROSE), 64, bos=None, limit=1)
    found = measure(small, windows, same("q8_0"), [LayerGeometry(2, 32, 32)] * 2, n_threads=1)
    assert (found.error, found.rotation) == ("", "off")


def test_a_file_that_is_no_model_becomes_a_row(tmp_path: Path, windows: Windows) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    found = row(path, windows, same("q8_0"), extra_buffers=False)
    assert found.error.startswith("llama.cpp: ") and found.ppl is None


def test_a_killed_child_becomes_a_row(tiny: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    run_child = llamacpp.run_child

    def with_a_murderer(request: dict[str, Any], **options: Any) -> llamacpp.Outcome:
        def kill(event: dict[str, Any]) -> None:
            if event["event"] == "started":
                os.kill(event["pid"], signal.SIGKILL)

        return run_child(request, **{**options, "on_event": kill})

    monkeypatch.setattr(llamacpp, "run_child", with_a_murderer)
    found = row(tiny, windows, same("q8_0"), extra_buffers=False)
    assert found.error == "llama.cpp ended by SIGKILL" and found.ppl is None


def test_a_silent_child_is_stopped_and_becomes_a_row(tiny: Path, windows: Windows) -> None:
    found = row(tiny, windows, same("q8_0"), extra_buffers=False, timeout_s=0.001)
    assert found.error == "llama.cpp said nothing for 0.001 s and was stopped" and found.ppl is None


def test_ctrl_c_ends_the_child_too(tiny: Path, windows: Windows) -> None:
    pids = []

    def interrupt(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise KeyboardInterrupt

    request = {**llamacpp.request_for("probe", tiny, same("f16"), 1, 64, False), "n_ctx": 64, "tokens": [5] * 64}
    with pytest.raises(KeyboardInterrupt):
        llamacpp.run_child(request, rotate=True, timeout_s=60, on_event=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_child_does_not_outlive_us(tiny: Path) -> None:
    """A parent that is killed has no chance to stop its child: the child notices by itself."""
    code = (
        "import os, sys; from pathlib import Path; from kvrun import llamacpp as l\n"
        "r = {**l.request_for('probe', Path(sys.argv[1]), l.LlamaSetting('f16', 'f16'), 1, 64, False),"
        " 'n_ctx': 64, 'tokens': [5] * 64}\n"
        "def die(event):\n"
        "    print(event['pid'], flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "l.run_child(r, rotate=True, timeout_s=60, on_event=die)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.run([sys.executable, "-c", code, str(tiny)], capture_output=True, text=True, env=environment)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    wait_until_gone(int(parent.stdout))


def test_nothing_but_json_comes_out_of_the_child(tiny: Path) -> None:
    for request in (
        {**llamacpp.request_for("probe", tiny, same("f16"), 1, 64, False), "n_ctx": 64, "tokens": [5] * 64},
        {
            **llamacpp.request_for("probe", tiny, LlamaSetting("q6_k", "f16", flash_attn=False), 1, 64, False),
            "n_ctx": 64,
        },
    ):
        child = subprocess.Popen(
            [sys.executable, "-m", "kvrun.llamacpp_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=child_environment(True),
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        lines = child.stdout.read().splitlines()
        child.stdin.close()
        child.wait()
        events = [json.loads(line)["event"] for line in lines]
        assert events[0] == "started"


def test_logits_for_parity(tiny: Path, tmp_path: Path) -> None:
    """Written batch by batch, whatever the batch; on F32 weights they are ours but for f16 rounding of the cache."""
    tokens = Tokenizer(tiny).encode(PROSE)[:100]
    whole = llamacpp.logits(tiny, tokens, tmp_path / "whole.npy")
    parts = llamacpp.logits(tiny, tokens, tmp_path / "parts.npy", n_batch=7)
    assert whole.shape == (100, load_model(tiny).config.n_vocab) and whole.dtype == np.float32
    engine = Engine(load_model(tiny))
    ours = engine.forward_bypassing_cache(tokens).numpy()
    for theirs in (whole, parts):  # llama.cpp sums values in f16, in an order that depends on the batch
        scores = TokenScores()
        scores.add(ours, np.zeros(100, np.int64), theirs)
        assert scores.kld.mean() < 1e-5


def test_logits_that_cannot_be_had_are_an_error(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LlamaCppError, match="requires flash_attn"):
        llamacpp.logits(tiny, [5, 6, 7], tmp_path / "a.npy", type_v="q8_0", flash_attn=False)
    with pytest.raises(LlamaCppError, match="No such file or directory"):
        llamacpp.logits(tiny, [5, 6, 7], tmp_path / "missing" / "a.npy")


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(KvError, match=r"no cache type kv4.*q8_0"):
        llamacpp.ggml_type("kv4")


def test_types_are_ggmls() -> None:
    """Our numbers and block sizes against gguf's tables."""
    import gguf

    for name, number in (CACHE_TYPES | llamacpp.OTHER_TYPES).items():
        kind = gguf.GGMLQuantizationType[name.upper()]
        assert kind == number
        assert gguf.GGML_QUANT_SIZES[kind] == llamacpp.BLOCKS[name]


@pytest.mark.model
def test_the_real_model_shows_what_llama_cpps_rotation_does(smollm2: Path) -> None:
    """SmolLM2 was measured before: rotation takes q4_0 from about 0.15 nats to about 0.05, and q8_0 costs 0.003."""
    model = load_model(smollm2)
    windows = cut(Tokenizer(smollm2).encode(default_text().text), 384, bos=None, limit=1)
    on, off, fine = (
        measure(smollm2, windows, setting, model.config.geometry, n_threads=2)
        for setting in (same("q4_0"), same("q4_0", rotate=False), same("q8_0"))
    )
    assert not (on.error or off.error or fine.error)
    klds = [found.kld_mean or 0.0 for found in (fine, on, off)]
    assert klds[0] < 0.012 < 0.02 < klds[1] < 0.12 and klds[2] > 1.5 * klds[1]
    assert (on.same_top or 0) > (off.same_top or 0)
    assert on.kv_bytes == off.kv_bytes == 512 * 30 * 2 * 3 * 64 * 4.5 / 8


def test_the_log_decides_what_was_allocated(tiny: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its MiB are rounded to two decimals: block sizes give the bytes, unless the log contradicts them."""
    tokens = {"nll": [math.log(2.0)] * 9}

    def logged(mib: float | None, rot: bool | None) -> ResultRow:
        context = {"n_cells": 256, "kv_mib": mib, "rot_k": rot, "rot_v": rot, "version": "1"}
        outcome = llamacpp.Outcome({"context": context, "result": {"tokens": tokens, "tokens_per_s": 5.0}})
        monkeypatch.setattr(llamacpp, "run_child", lambda *arguments, **options: outcome)
        return row(tiny, windows, same("q8_0"), extra_buffers=False)

    exact = 256 * 2 * 2 * 2 * 64 * 8.5 / 8
    assert logged(round(exact / 2**20, 2), True).kv_bytes == exact
    assert logged(0.5, True).kv_bytes == 2**19
    assert logged(0.5, True).bits_per_value == 2**19 * 8 / (256 * 2 * 2 * 2 * 64)
    silent = logged(None, None)
    assert (silent.kv_bytes, silent.bits_per_value, silent.rotation) == (None, None, "unknown")
    assert silent.ppl == pytest.approx(2.0)
