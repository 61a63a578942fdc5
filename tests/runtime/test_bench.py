"""`kvrun bench`: what is timed, in which order, and what stands beside it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvrun import bench as module
from kvrun import console
from kvrun.bench import BenchRow, Job, Setting, bench, jobs_for
from kvrun.bench_worker import Ours, run, serve
from kvrun.cli import app
from kvrun.errors import KvError

Tiny = Callable[..., Path]
PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 40
BASE = BenchRow("", "", "", "", "", "m.gguf", 1, n_threads=1, n_ubatch=8, n_prompt=0, n_gen=0, n_depth=0)


def kvrun(capfd: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    status = console.exit_status(app, ["bench", *(str(a) for a in argv), "-t", "1"], prog="kvrun")
    out, err = capfd.readouterr()
    return status, out, err


def test_the_jobs_are_llama_benchs() -> None:
    assert jobs_for([512], [128], [0]) == [Job(512, 0, 0), Job(0, 128, 0)]
    assert jobs_for([0], [8, 4], [64, 0]) == [Job(0, 8, 0), Job(0, 4, 0), Job(0, 8, 64), Job(0, 4, 64)]
    with pytest.raises(KvError, match="-p and -n"):
        jobs_for([0], [0], [0, 5])


def test_rows_of_both_engines(tiny_model: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny_model("llama")
    (tmp_path / "text.txt").write_text(PROSE)
    status, out, err = kvrun(
        capfd, path, "-p", "60", "-n", "3", "-d", "0,50", "-r", "3", "-ctk", "kv4,f16", "--llamacpp", "q4_0",
        "-f", tmp_path / "text.txt", "-o", "json",
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(out)
    assert len(rows) == 3 * 4
    named = {(r["engine"], r["type_k"], r["n_prompt"], r["n_gen"], r["n_depth"]): r for r in rows}
    assert len(named) == 12
    refused = named["kvrun", "kv4", 0, 3, 0]
    assert "no packed token was read" in refused["error"] and refused["avg_ts"] is None
    for row in rows:
        if row is refused:
            continue
        assert row["error"] == "" and len(row["samples_ns"]) == len(row["samples_ts"]) == 3
        n = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * n / t for t in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(statistics.fmean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(statistics.stdev(row["samples_ts"]))
        assert row["median_ts"] == pytest.approx(statistics.median(row["samples_ts"]))
        assert 0 < row["ttft_ms"] <= max(row["samples_ns"]) / 1e6
        assert row["kv_bytes"] > 0 and row["peak_bytes"] > row["kv_bytes"] and row["n_threads"] == 1
        assert row["load_s"] > 0 and row["model_filename"] == path.name and row["test_time"].endswith("Z")
        assert row["impl"].startswith("cpu")
        if row["type_k"] == "f16":
            assert row["kld_mean"] == 0 and row["packed_read"] == 0
        else:
            assert row["kld_mean"] > 1e-7 and row["kld_text"] == "text.txt"
    # 60 tokens behind 50: each of 2 layers reads what 4 sinks and a window of 32 leave, once to warm up and three times
    read = named["kvrun", "kv4", 60, 0, 50]["packed_read"]
    assert read == 4 * 2 * sum(t - 36 for t in range(51, 111))
    assert named["llama.cpp", "q4_0", 60, 0, 50]["packed_read"] is None


def test_a_table_for_people_and_wrong_usage(tiny_model: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny_model("llama")
    status, out, _ = kvrun(capfd, path, "-p", "0", "-n", "2", "-d", "70", "-r", "1", "-ctk", "kv3", "--kld-chunks", "0")
    head, _, line = out.splitlines()
    assert status == 0 and "median t/s" in head and "KLD mean" in head and "tg2 @ d70" in line and "kv3" in line
    for argv, words in (
        (["-p", "x"], "no list of numbers"),
        (["-ctk", "kv4,q4_0"], "use kv4 here"),
        (["--engine", "cpu,gpu"], "unknown engine gpu"),
    ):
        status, out, err = kvrun(capfd, path, *argv)
        assert (status, out) == (2, "") and words in err
    status, out, err = kvrun(capfd, path, "--llamacpp", "q9")
    assert (status, out) == (1, "") and "no cache type q9" in err


class FakeChild:
    """Answers at once and notes who was asked what, in `calls`."""

    calls: ClassVar[list[tuple[str, str]]] = []
    fails: ClassVar[tuple[str, ...]] = ()

    def __init__(self, _module: str) -> None:
        self.answers: list[dict[str, Any]] = []
        self.name = ""

    def send(self, message: dict[str, Any]) -> None:
        what = message["do"]
        if what == "open":
            self.name = message["engine_name"]
        self.calls.append((self.name, what))
        answer = {"event": what, "seconds": 1.0, "packed_read": 0, "kv_bytes": 5, "bits_per_value": 4.0}
        if what == "run":
            answer |= {"ns": 1000, "first_ns": 10}
            if self.name in self.fails:
                answer = {"event": "error", "message": "it broke"}
        self.answers.append(answer | {"peak_bytes": 9})

    def receive(self, timeout_s: float) -> dict[str, Any]:
        return self.answers.pop()

    def end(self, patience_s: float) -> None:
        self.calls.append((self.name, "end"))


def test_settings_take_turns_and_one_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "calls", [])
    settings = [Setting("kvrun", name, name, {"engine_name": name}) for name in "abc"]
    rows = list(bench(settings, [Job(0, 6, 0)], base=BASE, n_vocab=9, repetitions=3, geometry=()))
    assert [name for name, what in FakeChild.calls if what == "run"] == [*"cab", *"abc", *"bca", *"cab"]
    assert [row.samples_ts for row in rows] == [[6e6] * 3] * 3
    assert [call for call in FakeChild.calls if call[1] == "end"] == [(name, "end") for name in "abc"]

    monkeypatch.setattr(FakeChild, "fails", ("b",))
    rows = list(bench(settings, [Job(4, 0, 0)], base=BASE, n_vocab=9, repetitions=2, geometry=()))
    assert [row.error for row in rows] == ["", "it broke", ""] and rows[2].avg_ts == 4e6 and rows[1].avg_ts is None


def test_a_repetition_leaves_the_cache_as_it_was(tiny_model: Tiny) -> None:
    session = {"model": str(tiny_model("llama")), "type_k": "kv4", "type_v": "kv4", "engine": "cpu", "threads": 1}
    player = Ours({"session": session, "n_ubatch": 16})
    player.fill(list(range(3, 53)), 80)
    assert player.cache is not None and player.cache.n_tokens == 50
    sample = run(player, list(range(20)), [1, 2, 3])
    assert player.cache.n_tokens == 50 and 0 < sample["first_ns"] <= sample["ns"]


def test_the_protocol_of_the_child(tiny_model: Tiny) -> None:
    session = {"model": str(tiny_model("llama")), "type_k": "kv4", "type_v": "kv4", "engine": "reference", "threads": 1}
    messages: list[dict[str, Any] | None] = [
        {"do": "open", "engine": "kvrun", "session": session, "n_ubatch": 16},
        {"do": "depth", "tokens": [5] * 40, "n_ctx": 60},
        {"do": "run", "prompt": [1, 2], "generated": [3]},
        {"do": "state"},
        None,
    ]
    sent: list[tuple[str, dict[str, Any]]] = []
    serve(lambda: messages.pop(0), lambda event, **values: sent.append((event, values)))
    assert [event for event, _ in sent] == ["opened", "filled", "sample", "state"]
    assert sent[0][1]["impl"] == "reference" and sent[3][1]["peak_bytes"] > 10 << 20
    with pytest.raises(ValueError, match="open"):
        serve(lambda: {"do": "state"}, lambda event, **values: None)
