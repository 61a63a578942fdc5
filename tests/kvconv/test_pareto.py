"""`kvconv calibrate --pareto`: size against divergence, and what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconv import pareto
from kvconv.calibrate import Settings, draw, offer, read
from kvconv.cli import app
from kvconv.text import language_reference
from kvrun.console import exit_status
from kvrun.evaluation.windows import Windows
from kvrun.models import load_model
from kvrun.tokenizer import Tokenizer
from tools.make_tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("pareto") / "tiny.gguf")


def test_more_bits_diverge_less_and_the_best_of_each_size_is_marked(path: Path) -> None:
    model = load_model(path)
    settings = Settings(n_chunks=4, chunk_tokens=160)
    sample = draw(language_reference(), Tokenizer(path).encode, settings, 4096, None)
    tried = pareto.points(model, sample, settings, offer(model, settings, read(model, sample, settings)))
    windows: list[int] = []
    rows = pareto.measure(model, Windows(sample.held), tried, windows.append)
    assert windows == [1] and [row["setting"] for row in rows] == [point.setting for point in tried]
    recipes = [row for row in rows if row["setting"].startswith("recipe")]
    assert [row["setting"] for row in recipes] == [f"recipe of {bits:g} bits" for bits in pareto.BUDGETS]
    for row, budget in zip(recipes, pareto.BUDGETS, strict=True):
        assert budget - 0.2 < row["bits"] <= budget + 1e-6
    klds = [row["kld_mean"] for row in recipes]
    assert klds == sorted(klds, reverse=True) and klds[-1] < 0.01 * klds[0]
    by_name = {row["setting"]: row for row in rows}
    assert by_name["llama.cpp q4_0"]["bits"] == 4.5 and by_name["llama.cpp q8_0"]["bits"] == 8.5
    assert by_name["kv4 rotated"]["kld_mean"] != by_name["kv4"]["kld_mean"]
    for row in rows:
        no_larger = [other["kld_mean"] for other in rows if other["bits"] <= row["bits"]]
        assert row["best"] == (row["kld_mean"] == min(no_larger))


def test_a_setting_that_fails_keeps_its_reason_and_the_others_their_figures(path: Path) -> None:
    model = load_model(path)
    settings = Settings(n_chunks=4, chunk_tokens=160, sinks=0, window=0)
    sample = draw(language_reference(), Tokenizer(path).encode, settings, 4096, None)
    tried = pareto.points(model, sample, settings, offer(model, settings, read(model, sample, settings)))[-3:]
    broken = tried[0].plan
    object.__setattr__(broken, "sinks", 2**31)  # nothing is ever packed: its figures would be those of f16
    rows = pareto.measure(model, Windows(sample.held), tried)
    assert "error" in rows[0] and "best" not in rows[0] and all("error" not in row for row in rows[1:])


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["calibrate", str(path), "-o", str(tmp_path / "o.gguf"), "--chunk-tokens", "160", "-t", "1", "--pareto"]
    assert exit_status(app, [*options, "--chunks", "4"], prog="kvconv") == 0
    out = capsys.readouterr().out
    assert "| recipe of 3 bits " in out and "| llama.cpp q8_0 " in out and "best of its size: nothing" in out
    (tmp_path / "short.txt").write_text("Two pieces are too few to hold one out. " * 40)
    for wrong, status, why in (
        (["--k-bits", "4"], 2, "leave out --k-bits"),
        (["--no-guard"], 2, "leave one of them out"),
        (["--chunks", "2"], 1, "no piece of the text is held out: it takes 4 pieces"),
        (["--chunks", "4", "--window", "90"], 1, "give more with --chunk-tokens"),
    ):
        assert exit_status(app, [*options, "--force", *wrong], prog="kvconv") == status
        assert why in capsys.readouterr().err
