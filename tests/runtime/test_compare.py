"""The comparison from the command line to the table, on a tiny model, and its control."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvrun.compare
from kvkernels.spec import QuantSpec
from kvrun.cache_types import plan_for
from kvrun.cli import app
from kvrun.compare import control_complaint
from kvrun.compare_settings import LLAMA_SETTINGS, observed_channels, offset_only, order_only, our_settings
from kvrun.compare_table import footnote, report
from kvrun.console import exit_status
from kvrun.engine import Engine
from kvrun.evaluation.windows import Windows
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import write_metadata_file
from kvrun.llamacpp import LlamaSetting
from kvrun.models import load_model
from kvrun.plan import HeadPlan, HeadTransform
from kvrun.recipe import Provenance, Recipe
from kvrun.results import ResultRow
from tools.make_tiny_model import make_tiny_model

FIELDS = [
    "engine", "type_k", "type_v", "recipe", "rotation", "n_ctx", "n_scored", "ppl", "kld_mean", "kld_p99", "same_top",
    "bits_per_value", "kv_bytes", "tokens_per_s", "packed_read", "error",
]  # fmt: skip
#: Rows of ours without a recipe.
KINDS = ["f16", *["kv4"] * 4, "kv4+offset", "kv4-g32", "kv4-g32+order", "kv1"]
PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 20


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a recipe beside it (4-bit, values rotated), and a text in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(PROSE)
    model = make_tiny_model("llama", tmp_path / "tiny.gguf")
    write_metadata_file(tmp_path / "kvconv-tiny.gguf", make_recipe(model, b"another text").to_metadata())
    return model


def make_recipe(model: Path, text: bytes) -> Recipe:
    geometry = load_model(model).config.geometry
    plain = tuple(tuple(HeadPlan(QuantSpec(4, 64)) for _ in range(g.n_head_kv)) for g in geometry)
    rotated = tuple(
        tuple(HeadPlan(QuantSpec(4, 64), HeadTransform(hadamard=64)) for _ in range(g.n_head_kv)) for g in geometry
    )
    scores = tuple(tuple(0.1 for _ in range(g.n_head_kv)) for g in geometry)
    made = Provenance(
        tool_version="0", text_name="t", text_sha256=hashlib.sha256(text).hexdigest(), n_chunks=1, chunk_tokens=8,
        n_ctx=8, seed=0, objective="roundtrip", k_before=scores, k_after=scores, v_before=scores, v_after=scores,
    )  # fmt: skip
    file = GGUFFile(model)
    return Recipe(file.fingerprint(), file.arch, tuple(geometry), plain, rotated, 4, 32, made)


def few(monkeypatch: pytest.MonkeyPatch, *settings: LlamaSetting) -> None:
    """Keep llama.cpp's part short where the test is about something else."""
    monkeypatch.setattr(kvrun.compare, "LLAMA_SETTINGS", settings)


def kvrun_command(*argv: str | Path) -> int:
    return exit_status(app, [str(a) for a in argv], prog="kvrun")


def compare(*argv: str | Path) -> int:
    return kvrun_command("compare", *argv, "-t", "1")


def test_the_whole_table_as_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tiny, "-f", "text.txt", "-c", "128", "--chunks", "2", "-o", "json") == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert all(list(row)[: len(FIELDS)] == FIELDS for row in rows)
    assert all(row["error"] == "" for row in rows), rows
    names = [(r["engine"], r["type_k"], r["rotation"], r["sinks"], r["window"]) for r in rows if r["engine"] == "kvrun"]
    assert names == [
        ("kvrun", "f16", "off", 0, 0),
        ("kvrun", "kv4", "off", 4, 32),
        ("kvrun", "kv4", "off", 0, 0),
        ("kvrun", "kv4", "on", 4, 32),
        ("kvrun", "kv4", "on", 0, 0),
        ("kvrun", "kv4+offset", "off", 0, 0),
        ("kvrun", "kv4-g32", "off", 0, 0),
        ("kvrun", "kv4-g32+order", "off", 0, 0),
        ("kvrun", "auto", "v", 4, 32),
        ("kvrun", "auto", "v", 0, 0),
        ("kvrun", "kv1", "off", 0, 0),
        ("kvrun", "f16", "off", 0, 0),
    ]
    assert rows[-1]["reference"] == "llama.cpp f16" and not any(row["reference"] for row in rows[:-1])
    assert 1e-9 < rows.pop()["kld_mean"] < 1e-3, "the engines' noise floor"
    theirs = [(r["type_k"], r["type_v"], r["rotation"]) for r in rows if r["engine"] == "llama.cpp"]
    assert theirs == [("f16", "f16", "off")] + [
        (t, t, rotation) for t in ("q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl") for rotation in ("on", "off")
    ]
    assert {row["n_scored"] for row in rows} == {2 * 63} and {row["n_ctx"] for row in rows} == {128}
    by_hand = {"f16": 16.0, "kv4": 4.5, "kv1": (16 + 1.5) / 2, "q8_0": 8.5, "q5_1": 6.0, "q4_1": 5.0, "q4_0": 4.5}
    for row in rows:
        if row["type_k"] in by_hand and not row["window"]:
            assert row["bits_per_value"] == by_hand[row["type_k"]], row["type_k"]
        quantizes = row["type_k"] != "f16"
        if row["engine"] == "kvrun":
            assert (row["packed_read"] > 0) == quantizes
            assert (row["kld_mean"] > 1e-9) == quantizes
        assert row["text_sha256"] == hashlib.sha256(PROSE.encode()).hexdigest() and row["model"] == "tiny.gguf"
        assert bool(row["recipe"]) == (row["type_k"] == "auto")
    assert [row["type_k"] for row in rows if row["control"]] == ["kv1"]
    ours = {(r["type_k"], r["rotation"], r["window"]): r for r in rows if r["engine"] == "kvrun"}
    paired = {key: row for key, row in ours.items() if row["baseline"]}
    beside = {row["type_k"] for row in rows if row["engine"] == "llama.cpp" and row["baseline"]}
    assert beside == {"q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl"}
    twice = {(t, rotation, w) for t, rotation in (("kv4", "on"), ("auto", "v")) for w in (0, 32)}
    assert set(paired) == twice | {(t, "off", 0) for t in ("kv4+offset", "kv4-g32", "kv4-g32+order")}
    for (name, _, window), row in paired.items():
        assert row["baseline"] == ("kv4-g32" if name == "kv4-g32+order" else "kv4")
        difference = row["kld_mean"] - ours[row["baseline"], "off", window]["kld_mean"]
        assert row["kld_difference"] == pytest.approx(difference)
        assert row["kld_difference_low"] <= difference <= row["kld_difference_high"]
    assert all((row["rms_dp"] > 0) == (row["type_k"] != "f16") for row in rows)
    assert "q4_0" in printed.err and "Traceback" not in printed.err


def test_the_table_for_people(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few(monkeypatch, LlamaSetting("q6_k", "f16", flash_attn=False), LlamaSetting("f16", "f16"))
    assert compare("-m", tiny, "-f", "text.txt", "-c", "64", "--chunks", "1") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 11 + 2 + 1 and len({len(line) for line in table}) == 1
    assert any("SIGABRT" in line for line in table), "the row that could not run says why"
    assert any("4 sinks + last 32" in line for line in table)
    assert "31 scored" in out and "f16 cache of the same engine" in out and "allocated" in out
    assert "The control failed, as it must." in out
    assert "no window and no sinks" in out and "multiple of 256" in out


def test_csv_and_jsonl_hold_the_same_rows(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    common = (tiny, "-f", "text.txt", "-c", "64", "--chunks", "1", "--no-recipe")
    assert compare(*common, "-o", "csv") == 0
    as_csv = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert compare(*common, "-o", "jsonl") == 0
    as_jsonl = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["type_k"] for row in as_csv] == [row["type_k"] for row in as_jsonl] == KINDS
    for one, other in zip(as_csv, as_jsonl, strict=True):
        assert float(one["ppl"]) == pytest.approx(other["ppl"])
        assert ResultRow.from_dict({**other, "a field of tomorrow": 1}).as_dict() == other


def test_measuring_on_the_calibration_text_is_said_loudly(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    write_metadata_file(Path("same.gguf"), make_recipe(tiny, PROSE.encode()).to_metadata())
    common = (tiny, "-f", "text.txt", "-c", "64", "--chunks", "1", "-o", "json")
    assert compare(*common, "--recipe", "same.gguf") == 0
    printed = capsys.readouterr()
    assert "WARNING: the recipe was calibrated on the measured text" in printed.err
    noted = {row["type_k"] for row in json.loads(printed.out) if "calibrated on the measured text" in row["note"]}
    assert noted == {"auto"}
    assert compare(*common) == 0
    printed = capsys.readouterr()
    assert "WARNING" not in printed.err
    rows = json.loads(printed.out)
    assert not any("calibrated on the measured text" in row["note"] for row in rows)


def test_a_recipe_that_is_read_without_its_window_is_named_as_such(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    recipe = make_recipe(tiny, b"another text")
    assert recipe.sinks or recipe.window
    write_metadata_file(Path("same.gguf"), recipe.to_metadata())
    argv = (tiny, "-f", "text.txt", "-c", "64", "--chunks", "1", "-o", "json")
    assert compare(*argv, "--recipe", "same.gguf") == 0
    notes = {(row["type_k"], row["sinks"], row["window"]): row["note"] for row in json.loads(capsys.readouterr().out)}
    assert notes["auto", recipe.sinks, recipe.window] == "" == notes["kv4", 0, 0]
    assert f"made for {recipe.sinks} sinks and a window of {recipe.window}" in notes["auto", 0, 0]


def test_without_a_recipe_its_rows_are_missing_and_that_is_said(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    Path("kvconv-tiny.gguf").unlink()
    assert compare(tiny, "-f", "text.txt", "-c", "64", "--chunks", "1", "-o", "json") == 0
    printed = capsys.readouterr()
    assert [row["type_k"] for row in json.loads(printed.out)] == KINDS
    assert "kvconv calibrate" in printed.err


def test_rows_that_measure_nothing_say_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a context of 32, sinks and window cover everything: those rows are refused, the others stand."""
    few(monkeypatch)
    assert compare(tiny, "-f", "text.txt", "-c", "32", "--chunks", "2", "-o", "json") == 0
    for row in json.loads(capsys.readouterr().out):
        covered = row["window"] == 32
        assert ("cover the context" in row["error"]) == covered
        assert (row["ppl"] is None) == (row["kld_mean"] is None) == covered


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["-f", "text.txt", "-c", "4000"], 1, "less than one window of 4000"),
        (["-f", "missing.txt"], 1, "missing.txt"),
        (["-f", "text.txt", "--recipe", "missing.gguf"], 1, "missing.gguf"),
        (["-f", "text.txt", "-o", "xml"], 2, "xml"),
        (["-f", "text.txt", "--chunks", "0"], 1, "--chunks"),
    ],
)
def test_bad_input_is_one_line(
    tiny: Path, capsys: pytest.CaptureFixture[str], argv: list[str], status: int, says: str
) -> None:
    assert compare(tiny, *argv) == status
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0] and printed.out == ""


def test_ctrl_c_is_130(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few(monkeypatch, LlamaSetting("f16", "f16"))

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvrun.llamacpp.measure_tokens", interrupted)
    assert compare(tiny, "-f", "text.txt", "-c", "64", "--chunks", "1") == 130
    assert capsys.readouterr().out == ""


def ours(type_k: str, kld: float | None, *, control: bool = False, se: float = 0.0) -> ResultRow:
    return ResultRow("kvrun", type_k, "f16", kld_mean=kld, kld_mean_se=se, control=control, n_scored=9)


def test_a_control_that_does_not_fail_condemns_the_table() -> None:
    good = [ours("f16", 0.0), ours("kv4", 0.1), ours("kv1", 5.0, control=True, se=0.1)]
    assert control_complaint(good) == ""
    for kld in (0.0, 0.1, 0.19):
        complaint = control_complaint([*good[:2], ours("kv1", kld, control=True)])
        assert "control did not fail" in complaint and "do not trust this table" in complaint
    assert "control did not fail" in control_complaint([*good[:2], ours("kv1", 0.5, control=True, se=0.2)])
    assert "no figure" in control_complaint([*good[:2], ours("kv1", None, control=True)])
    assert "no figure" in control_complaint(good[:2])
    assert control_complaint([*good, ours("kv2", 4.9)]) == "", "a row that somebody asked for may be bad"
    assert control_complaint([*good, replace(ours("kv4", 4.9), type_v="kv2")]) == "", "nor do 4-bit keys alone count"
    theirs = replace(ours("q4_0", 7.0), engine="llama.cpp")
    assert control_complaint([*good, theirs]) == ""
    assert "Control did not fail" in footnote([*good[:2], ours("kv1", 0.1, control=True)])


def test_a_control_that_does_not_fail_is_an_error_after_the_table(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    monkeypatch.setattr(kvrun.compare, "CONTROL_FACTOR", 1e9)
    assert compare(tiny, "-f", "text.txt", "-c", "64", "--chunks", "1", "-o", "json", "--report", "out") == 1
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "control did not fail" in errors[0] and "Traceback" not in printed.err
    assert [row["type_k"] for row in json.loads(printed.out) if row["control"]] == ["kv1"], "the table is still there"
    assert (Path("out") / "report.html").is_file()


def test_a_table_of_failures_has_no_figures() -> None:
    failed = [ResultRow("llama.cpp", "q8_0", "q8_0", error="no | such model")]
    assert "no \\| such model" in report(failed) and "No row has figures" in report(failed)


def test_settings(tiny: Path) -> None:
    """Every row of the issue is there, and what quantizes also without sinks and window."""
    geometry = load_model(tiny).config.geometry
    plans = [s.plan for s in our_settings(geometry, make_recipe(tiny, b""))]
    assert [(p.type_k, p.type_v, p.sinks, p.window) for p in plans] == [
        ("f16", "f16", 0, 0),
        ("kv4", "kv4", 4, 32),
        ("kv4", "kv4", 0, 0),
        ("kv4", "kv4", 4, 32),
        ("kv4", "kv4", 0, 0),
        ("auto", "auto", 4, 32),
        ("auto", "auto", 0, 0),
        ("kv1", "f16", 0, 0),
    ]
    transforms = [{head.transform.name for side in (p.k, p.v) for layer in side for head in layer} for p in plans[1:5]]
    assert transforms == [{"identity"}, {"identity"}, {"hadamard64"}, {"hadamard64"}]
    assert len(LLAMA_SETTINGS) == 11 and len(set(LLAMA_SETTINGS)) == 11


def test_rows_of_one_part_of_a_recipe_alone(tiny: Path) -> None:
    """From the recipe where it has the part, on the heads that have it; else from the text."""
    engine = Engine(load_model(tiny))
    geometry, windows = engine.model.config.geometry, Windows(np.arange(128, dtype=np.int64).reshape(2, 64))
    channels = observed_channels(engine, windows)
    keys: list[torch.Tensor] = []
    engine.observe(windows.tokens[0, :32].tolist(), 64, lambda il, k, v: keys.append(k))
    identity = plan_for(geometry, "kv4", "kv4", recipe=None, sinks=0, window=0)

    offset = offset_only(identity, make_recipe(tiny, b""), channels)
    assert offset.note == "offset of the first window's half that is not scored"
    for il, layer in enumerate(offset.plan.k):
        for ih, head in enumerate(layer):
            assert head.transform.name == "offset" and head.spec == QuantSpec(4, 64)
            assert head.transform.offset == pytest.approx(keys[il][ih].mean(0).numpy(), abs=1e-6)
    assert offset.plan.v == identity.v

    plain, ordered = order_only(identity, None, channels)
    assert (plain.baseline, ordered.baseline) == ("kv4", plain.plan.type_k) == ("kv4", "kv4-g32")
    spread = keys[1][0].amax(0) - keys[1][0].amin(0)
    order = ordered.plan.k[1][0].transform.order
    assert order is not None and (np.diff(spread.numpy()[order]) >= 0).all() and order.dtype == np.uint16
    assert {h.transform.name for layer in ordered.plan.v for h in layer} == {"order"}
    assert {h.spec for p in (plain.plan, ordered.plan) for layer in (*p.k, *p.v) for h in layer} == {QuantSpec(4, 32)}

    mine = HeadTransform(np.arange(64, dtype=np.uint16)[::-1].copy(), 64, None, np.ones(64, np.float32), True)
    recipe = make_recipe(tiny, b"")
    recipe = replace(recipe, k=((HeadPlan(QuantSpec(4, 64), mine), *recipe.k[0][1:]), *recipe.k[1:]))
    offset, (_, ordered) = offset_only(identity, recipe, channels), order_only(identity, recipe, channels)
    names = [[head.transform.name for head in layer] for layer in offset.plan.k]
    assert names == [["rotating offset", "identity"], ["identity", "identity"]] and "recipe" in offset.note
    assert [head.transform.name for head in ordered.plan.k[0]] == ["order", "identity"]
    assert {head.transform.name for layer in ordered.plan.v for head in layer} == {"identity"}


def test_presets_are_rows_and_those_that_cannot_be_had_say_why(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    assert compare(tiny, "-f", "text.txt", "-c", "256", "--chunks", "1", "-o", "json", "--presets") == 0
    rows = {row["type_k"]: row for row in json.loads(capsys.readouterr().out)}
    for name in ("kivi2", "kivi4", "had-v2-kivi4", "quarot"):
        assert rows[name]["error"] == "" and rows[name]["kld_mean"] > 1e-6, name
    for name in ("skvq", "skvq-safe"):
        assert "kvconv skvq" in rows[name]["error"] and rows[name]["model"] == "tiny.gguf"


def test_the_footnote_says_what_cannot_be_told_apart() -> None:
    row = replace(ours("kv4", 0.1), type_v="kv4", rotation="on", sinks=0, window=0, baseline="kv4")
    row = replace(row, kld_difference=-0.01, kld_difference_low=-0.02, kld_difference_high=0.001)
    assert "kv4 rotated against kv4, nothing in full precision: not distinguishable, KLD -0.0100" in footnote([row])
    assert ": better, " in footnote([replace(row, kld_difference_high=-0.001)])
    assert ": worse, " in footnote([replace(row, kld_difference_low=0.001, kld_difference_high=0.02)])
