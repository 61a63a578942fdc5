"""Rows that outlive the run, and f16 caches that run once: what is measured again, and what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrun.compare
from kvrun.cli import app
from kvrun.console import exit_status
from kvrun.engine import Engine
from kvrun.evaluation.perplexity import run_plans
from kvrun.llamacpp import LlamaSetting
from kvrun.result_file import Measured, ResultFile
from kvrun.results import ResultRow
from tools.make_tiny_model import make_tiny_model

PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 20
ARGV = ("-f", "text.txt", "-c", "128", "--chunks", "2", "-o", "json", "-t", "1")
#: Rows of ours, by the type of their keys.
KINDS = ["f16", *["kv4"] * 4, "kv4+offset", "kv4-g32", "kv4-g32+order", "kv1"]
NO_TIMES = ("tokens_per_s",)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(PROSE)
    monkeypatch.setattr(kvrun.compare, "LLAMA_SETTINGS", ())
    return make_tiny_model("llama", tmp_path / "tiny.gguf")


@pytest.fixture
def plans_run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The cache types of each call of `run_plans`."""
    calls: list[list[str]] = []

    def spy(engine: Engine, windows: Any, plans: Any, **options: Any) -> Any:
        calls.append([plan.type_k for plan in plans])
        return run_plans(engine, windows, plans, **options)

    monkeypatch.setattr(kvrun.compare, "run_plans", spy)
    return calls


@pytest.fixture
def compare(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    def run(*argv: str, status: int = 0) -> tuple[list[dict[str, Any]], str]:
        assert exit_status(app, ["compare", str(tiny), *ARGV, *argv], prog="kvrun") == status
        printed = capsys.readouterr()
        return (json.loads(printed.out) if printed.out else []), printed.err

    return run


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in NO_TIMES} for row in rows]


def close(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    for one, other in zip(a, b, strict=True):
        assert one["kld_mean"] == pytest.approx(other["kld_mean"], abs=1e-5)
        assert one["ppl"] == other["ppl"] and one["same_top"] == other["same_top"]
        assert one["rms_dp"] == pytest.approx(other["rms_dp"], abs=1e-9)


def test_the_reference_runs_once_and_gives_the_figures_of_the_lock_step(
    compare: Callable[..., Any], plans_run: list[list[str]], references: Path
) -> None:
    together, _ = compare("--references", "0")
    assert plans_run == [KINDS] and not references.exists()
    plans_run.clear()
    one_by_one, _ = compare()
    assert plans_run == [[kind] for kind in KINDS]
    close(one_by_one, together)
    assert one_by_one[0]["kld_mean"] == 0.0
    assert len(list(references.iterdir())) == 1
    again, _ = compare()
    assert figures(again) == figures(one_by_one)


def test_finished_rows_are_not_run_again(compare: Callable[..., Any], plans_run: list[list[str]]) -> None:
    first, _ = compare("--results", "rows.jsonl")
    assert len(plans_run) == 9
    again, said = compare("--results", "rows.jsonl")
    assert again == first and len(plans_run) == 9 and "holds 9 rows" in said
    lines = Path("rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["type_k"] for line in lines] == KINDS
    compare("--results", "rows.jsonl", "-c", "64")
    assert len(plans_run) == 18, "another cut is another figure"
    Path("text.txt").write_text(PROSE.replace("best", "last"))
    compare("--results", "rows.jsonl")
    assert len(plans_run) == 27, "so is another text"


def test_a_row_that_is_missing_is_paired_with_one_that_was_kept(
    compare: Callable[..., Any], plans_run: list[list[str]]
) -> None:
    first, _ = compare("--results", "rows.jsonl")
    lines = Path("rows.jsonl").read_text().splitlines(keepends=True)
    assert json.loads(lines[3])["baseline"] == "kv4"
    Path("rows.jsonl").write_text("".join(lines[:3] + lines[4:]))
    plans_run.clear()
    again, _ = compare("--results", "rows.jsonl")
    assert plans_run == [["kv4"]]
    for name, value in figures(again)[3].items():
        assert value == (pytest.approx(first[3][name], rel=1e-5) if isinstance(value, float) else first[3][name]), name


def test_ctrl_c_loses_the_row_in_work_alone(
    compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, references: Path
) -> None:
    calls = []

    def interrupted(engine: Engine, windows: Any, plans: Any, **options: Any) -> Any:
        calls.append(plans)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_plans(engine, windows, plans, **options)

    monkeypatch.setattr(kvrun.compare, "run_plans", interrupted)
    rows, _ = compare("--results", "rows.jsonl", status=130)
    assert rows == [] and len(Path("rows.jsonl").read_text().splitlines()) == 2
    rows, _ = compare("--results", "rows.jsonl")
    assert len(calls) == 3 + 7 and len(rows) == 9 and not any(row["error"] for row in rows)
    assert [path.suffix for path in references.iterdir()] == [".reference"]


def test_ctrl_c_leaves_no_half_reference(
    compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, references: Path
) -> None:
    forward, n = Engine.forward, []

    def interrupted(self: Engine, *arguments: Any, **options: Any) -> Any:
        n.append(1)
        if len(n) == 4:
            raise KeyboardInterrupt
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Engine, "forward", interrupted)
    compare(status=130)
    assert list(references.iterdir()) == []


def test_damaged_lines_are_numbered_and_the_rest_is_used(
    compare: Callable[..., Any], plans_run: list[list[str]]
) -> None:
    first, _ = compare("--results", "rows.jsonl")
    lines = Path("rows.jsonl").read_text().splitlines()
    short = json.loads(lines[4]) | {"kld_tokens": "AAAA"}
    wrong = json.loads(lines[8]) | {"ppl": "many"}
    damaged = [
        lines[0],
        "{not json",
        lines[1],
        "[1, 2]",
        *lines[2:4],
        json.dumps(short),
        *lines[5:8],
        json.dumps(wrong),
        "\udcff",
    ]
    Path("rows.jsonl").write_bytes(
        "\n".join(damaged).encode("utf-8", "surrogateescape") + b'\n{"type_k": "kv4"}\n{"cut'
    )
    plans_run.clear()
    again, said = compare("--results", "rows.jsonl")
    assert [row["kld_mean"] for row in again] == pytest.approx([row["kld_mean"] for row in first], rel=1e-6)
    assert plans_run == [["kv4"], ["kv1"]]
    numbers = [line.split("line ")[1].split()[0] for line in said.splitlines() if "is damaged" in line]
    assert numbers == ["2", "4", "7", "11", "12", "13", "14"] and "ppl is no float" in said
    _, said = compare("--results", "rows.jsonl")
    assert len(plans_run) == 2 and said.count("is damaged") == 7, "a line that was cut short stays one damaged line"


def test_a_row_that_failed_is_tried_again(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "rows.jsonl", print)
    file.add("a", Measured(ResultRow("kvrun", "kv4", "kv4", error="no memory"), np.zeros(0)))
    file.add("b", Measured(ResultRow("kvrun", "kv4", "kv4", n_scored=2, kld_mean=0.25), np.array([0.125, 0.375])))
    again = ResultFile(tmp_path / "rows.jsonl", print)
    assert again.find("a") is None and again.find("c") is None and len(again) == 2
    found = again.find("b")
    assert found is not None and found.row.kld_mean == 0.25 and found.kld.tolist() == [0.125, 0.375]


def test_a_full_disk_costs_the_file_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    file = ResultFile(tmp_path / "rows.jsonl", said.append)
    good = Measured(ResultRow("kvrun", "kv4", "kv4"), np.zeros(0))
    file.add("a", good)
    before = (tmp_path / "rows.jsonl").read_bytes()
    file.path = Path("/dev/full")
    file.add("b", good)
    file.add("c", good)
    assert len(said) == 1 and "No space left" in said[0]
    assert (tmp_path / "rows.jsonl").read_bytes() == before and file.find("b") is not None


@pytest.mark.parametrize("where", ["missing/rows.jsonl", "."])
def test_a_place_that_cannot_be_written_is_known_before_the_run(
    compare: Callable[..., Any], plans_run: list[list[str]], where: str
) -> None:
    _, said = compare("--results", where, status=1)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and not plans_run


@pytest.mark.parametrize("name", ["tiny.gguf", "text.txt", "report.json"])
def test_a_file_that_holds_something_else_is_not_appended_to(
    compare: Callable[..., Any], plans_run: list[list[str]], name: str
) -> None:
    Path("report.json").write_text(json.dumps({"rows": [1, 2]}, indent=2))
    before = Path(name).read_bytes()
    _, said = compare("--results", name, status=1)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "holds no rows" in errors[0] and "damaged" not in said
    assert Path(name).read_bytes() == before and not plans_run


def test_llama_cpp_rows_share_their_reference_and_are_kept(
    compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, references: Path
) -> None:
    settings = (LlamaSetting("f16", "f16"), LlamaSetting("q8_0", "q8_0"), LlamaSetting("q4_0", "q4_0"))
    monkeypatch.setattr(kvrun.compare, "LLAMA_SETTINGS", settings)
    alone, _ = compare("--references", "0")
    kept, _ = compare("--results", "rows.jsonl")
    assert len(list(references.iterdir())) == 2
    close(kept[:12], alone[:12])
    assert "no reference" in alone[12]["error"] and 0 < kept[12]["kld_mean"] < 1e-3
    again, _ = compare("--results", "rows.jsonl")
    assert again == kept


def test_divergences_by_position_and_confidence_add_up(compare: Callable[..., Any]) -> None:
    rows, _ = compare()
    for row in rows:
        for bins in (row["kld_by_position"], row["kld_by_confidence"]):
            assert sum(b["n"] for b in bins) == row["n_scored"]
            assert sum(b["n"] * b["kld_mean"] for b in bins) / row["n_scored"] == pytest.approx(row["kld_mean"])
        ends = [(b["low"], b["high"]) for b in row["kld_by_position"]]
        assert len(ends) == 8 and (ends[0][0], ends[-1][1]) == (64, 127)
