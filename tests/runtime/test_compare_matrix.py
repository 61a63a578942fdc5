"""Comparisons from a file, and at equal bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvrun.compare
import kvrun.compare_settings
from kvrun.cli import app
from kvrun.compare_settings import LLAMA_SETTINGS, settings_at_bytes
from kvrun.console import exit_status
from kvrun.engine import Engine
from kvrun.errors import KvError
from kvrun.llamacpp import LlamaSetting
from kvrun.matrix import Matrix, read_matrix
from kvrun.models import load_model
from tools.make_tiny_model import make_tiny_model

PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 20
MATRIX: dict[str, Any] = {
    "texts": ["one.txt", "two.txt"],
    "contexts": [64, 96],
    "chunks": 1,
    "llama": [],
    "settings": [
        {"keys": "kv4", "values": "kv3", "sinks": 1, "window": 7},
        {"keys": "kv3", "rotate": True},
        {"preset": "quarot"},
    ],
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(PROSE)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text(PROSE)
    (tmp_path / "texts" / "two.txt").write_text(PROSE.replace("best", "last"))
    monkeypatch.setattr(kvrun.compare, "LLAMA_SETTINGS", ())
    return make_tiny_model("llama", tmp_path / "tiny.gguf")


@pytest.fixture
def compare(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def run(*argv: str, status: int = 0) -> tuple[str, str]:
        assert exit_status(app, ["compare", str(tiny), "-t", "1", *argv], prog="kvrun") == status
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_every_text_at_every_context(compare: Callable[..., tuple[str, str]]) -> None:
    Path("texts/matrix.json").write_text(json.dumps(MATRIX))
    argv = ("--matrix", "texts/matrix.json", "--results", "rows.jsonl")
    out, _ = compare(*argv, "-o", "json", "--report", "out")
    rows = json.loads(out)
    cases = list(dict.fromkeys((row["text"], row["n_ctx"]) for row in rows))
    assert cases == [("one.txt", 64), ("one.txt", 96), ("two.txt", 64), ("two.txt", 96)]
    names = [(row["type_k"], row["type_v"], row["rotation"], row["sinks"], row["window"]) for row in rows[:7]]
    assert names == [
        ("f16", "f16", "off", 0, 0),
        ("kv4", "kv4", "off", 4, 32),
        ("kv4", "kv4", "off", 0, 0),
        ("kv4", "kv3", "off", 1, 7),
        ("kv3", "kv3", "on", 4, 32),
        ("quarot", "quarot", "on", 0, 0),
        ("kv1", "f16", "off", 0, 0),
    ]
    assert len(rows) == 4 * 7 and not any(row["error"] for row in rows)
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "1-context-64", "2-context-96", "3-context-64", "4-context-96",
    ]  # fmt: skip
    assert len(Path("rows.jsonl").read_text().splitlines()) == len(rows)
    out, _ = compare(*argv)
    assert [line for line in out.splitlines() if line.startswith("## ")] == [
        f"## {text}, context {n_ctx}" for text, n_ctx in cases
    ]
    assert out.count("The control failed, as it must.") == 4
    assert len(Path("rows.jsonl").read_text().splitlines()) == len(rows), "nothing was measured again"


def test_what_a_file_leaves_out_is_what_the_options_say(compare: Callable[..., tuple[str, str]]) -> None:
    Path("matrix.json").write_text(json.dumps({"contexts": [96]}))
    out, _ = compare("--matrix", "matrix.json", "-f", "text.txt", "--chunks", "2", "-o", "json")
    rows = json.loads(out)
    assert {(row["text"], row["n_ctx"], row["n_scored"]) for row in rows} == {("text.txt", 96, 2 * 47)}
    assert "kv4+offset" in {row["type_k"] for row in rows}


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_toml_and_json_are_the_same(tmp_path: Path, kind: str) -> None:
    if kind == "toml" and sys.version_info < (3, 11):
        (tmp_path / "m.toml").write_text("chunks = 1")
        with pytest.raises(KvError, match=r"Python 3\.11"):
            read_matrix(tmp_path / "m.toml")
        return
    text = (
        'texts = ["one.txt", "two.txt"]\ncontexts = [64, 96]\nchunks = 1\nllama = []\n'
        '[[settings]]\nkeys = "kv4"\nvalues = "kv3"\nsinks = 1\nwindow = 7\n'
        '[[settings]]\nkeys = "kv3"\nrotate = true\n[[settings]]\npreset = "quarot"\n'
    )
    path = tmp_path / f"m.{kind}"
    path.write_text(text if kind == "toml" else json.dumps(MATRIX))
    found = read_matrix(path)
    settings = tuple(MATRIX["settings"])
    assert found == Matrix((tmp_path / "one.txt", tmp_path / "two.txt"), (64, 96), 1, (), settings)


def test_llama_cpps_types_come_with_f16_and_both_rotations(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"llama": ["q4_0"]}')
    on, off = LlamaSetting("q4_0", "q4_0"), LlamaSetting("q4_0", "q4_0", rotate=False)
    assert read_matrix(tmp_path / "m.json").llama == (LLAMA_SETTINGS[0], on, off)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "a matrix has keys"),
        ('{"text": ["a"]}', "unknown key text; use texts, contexts"),
        ('{"texts": "a"}', "texts must be a list of files"),
        ('{"texts": []}', "texts must be a list of files"),
        ('{"contexts": [64, 2]}', "4 or more"),
        ('{"contexts": [true]}', "contexts must be a list"),
        ('{"chunks": 0}', "chunks must be"),
        ('{"llama": ["q9"]}', "unknown type of llama.cpp's q9; use f16, q8_0"),
        ('{"settings": [{"keys": "kv4", "widnow": 1}]}', "unknown key widnow of a setting"),
        ('{"settings": [{"keys": "kv4", "window": -1}]}', "window of a setting must be 0 or more"),
        ('{"settings": [{"keys": "kv4", "rotate": 1}]}', "rotate of a setting must be true or false"),
        ('{"settings": [{"values": "kv4"}]}', "a setting has keys"),
        ('{"settings": [{"preset": "kivi2", "window": 3}]}', "a setting has keys"),
        ('{"settings": [{"keys": "q4_0"}]}', "format of llama.cpp"),
        ('{"settings": [{"preset": "kivi9"}]}', "unknown preset"),
        ('{"settings": [{"keys": "auto"}]}', "needs a recipe"),
        ('{"texts": ["missing.txt"]}', "missing.txt"),
        ('{"contexts": [64, 900000]}', "less than one window of 900000"),
    ],
)
def test_a_bad_file_is_one_line(compare: Callable[..., tuple[str, str]], content: str, says: str) -> None:
    Path("matrix.json").write_text(content)
    out, err = compare("--matrix", "matrix.json", status=1)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0] and out == "" and "Traceback" not in err


def test_a_text_that_is_named_twice_is_wrong_usage(compare: Callable[..., tuple[str, str]]) -> None:
    Path("matrix.json").write_text('{"texts": ["text.txt"]}')
    compare("--matrix", "matrix.json", "-f", "text.txt", status=2)
    _, err = compare("--matrix", "missing.toml", status=1)
    assert "missing.toml" in err
    _, err = compare("--at-bytes", "kv4", status=1)
    assert "no cache type kv4" in err


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_windows_fill_the_bytes_and_no_more(tiny: Path, name: str) -> None:
    engine = Engine(load_model(tiny))
    found, refused = settings_at_bytes(engine, 256, name, None)
    limit = 256 * 2 * 2 * 2 * 64 * {"q8_0": 34, "q4_0": 18}[name] // 32
    assert refused == [] and {s.plan.type_k for s in found} >= {"kv4", "kv3", "kv2"}
    assert ("kv8" in {s.plan.type_k for s in found}) == (name == "q8_0")
    for setting in found:
        plan = setting.plan
        assert engine.new_cache(plan, 256).n_bytes <= limit and str(limit) in setting.note
        wider = kvrun.compare_settings.plan_for(
            plan.geometry, plan.type_k, plan.type_v, recipe=None, sinks=plan.sinks, window=plan.window + 1
        )
        assert engine.new_cache(wider, 256).n_bytes > limit
    windows = [s.plan.window for s in found]
    assert windows == sorted(windows) and windows[0] < windows[-1], "fewer bits leave room for a wider window"


def test_a_sliding_window_counts_for_what_it_holds(tmp_path: Path) -> None:
    engine = Engine(load_model(make_tiny_model("gemma2", tmp_path / "tiny.gguf")))
    geometry = engine.model.config.geometry
    tokens = sum(min(256, g.sliding or 256) for g in geometry)
    assert tokens < 256 * len(geometry)
    found, _ = settings_at_bytes(engine, 256, "q4_0", None)
    limit = tokens * geometry[0].n_head_kv * 2 * geometry[0].head_dim_k * 18 // 32
    assert found
    for setting in found:
        assert engine.new_cache(setting.plan, 256).n_bytes <= limit and f"the {limit} bytes" in setting.note


def test_rows_at_equal_bytes_are_paired_with_llama_cpps(
    compare: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (LlamaSetting("f16", "f16"), LlamaSetting("q5_1", "q5_1"))
    monkeypatch.setattr(kvrun.compare, "LLAMA_SETTINGS", settings)
    out, _ = compare("-f", "text.txt", "-c", "256", "--chunks", "1", "--at-bytes", "q5_1", "-o", "json")
    rows = json.loads(out)
    equal = [row for row in rows if row["baseline"] == "llama.cpp q5_1"]
    assert [row["type_k"] for row in equal] == ["kv5", "kv4", "kv3", "kv2"]
    theirs = next(row for row in rows if row["type_k"] == "q5_1")
    for row in equal:
        assert row["kv_bytes"] <= theirs["kv_bytes"] and row["bits_per_value"] > 5.8
        assert row["kld_difference"] == pytest.approx(row["kld_mean"] - theirs["kld_mean"])


def test_rows_that_were_kept_without_their_baseline_are_paired_later(
    compare: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-f", "text.txt", "-c", "256", "--chunks", "1", "--at-bytes", "q5_1", "--results", "rows.jsonl")
    compare(*options)
    kept = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert not any(row["baseline"] == "llama.cpp q5_1" for row in kept)
    monkeypatch.setattr(kvrun.compare, "LLAMA_SETTINGS", (LlamaSetting("q5_1", "q5_1"),))
    rows = json.loads(compare(*options, "-o", "json")[0])
    equal = [row for row in rows if row["baseline"] == "llama.cpp q5_1"]
    theirs = next(row for row in rows if row["type_k"] == "q5_1")
    assert [row["type_k"] for row in equal] == ["kv5", "kv4", "kv3", "kv2"]
    for row in equal:
        assert row["kld_difference"] == pytest.approx(row["kld_mean"] - theirs["kld_mean"], rel=1e-4)
