"""Every command on a tiny model of every architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvconv.cli import app as kvconv_app
from kvrun.cli import app as kvrun_app
from kvrun.console import exit_status
from kvrun.gguf_file import GGUFFile
from kvrun.models import load_model, supported_architectures
from tools.make_tiny_model import make_tiny_model

#: Where the tiny model of the default shape would lack something: layers that differ, experts.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm3": {"n_layer": 4},
    "gemma2": {"n_layer": 2},
    "gemma3": {"n_layer": 6, "rope_theta": 1e6},
}

PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. "
TEXT = "".join(f"{i}. {PROSE[i % 40 :]}" for i in range(40))


def kvconv(*argv: str | Path) -> int:
    return exit_status(kvconv_app, [str(word) for word in argv], prog="kvconv")


def kvrun(*argv: str | Path) -> int:
    return exit_status(kvrun_app, [str(word) for word in argv], prog="kvrun")


@pytest.mark.slow
@pytest.mark.parametrize("arch", supported_architectures())
def test_all_commands_run(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    path = make_tiny_model(arch, tmp_path / "tiny.gguf", **SHAPES.get(arch, {}))
    config = load_model(path).config

    calibrated = ("--chunks", "3", "--chunk-tokens", "128", "-f", "text.txt", "-t", "1")
    assert kvconv("calibrate", path, *calibrated, "-o", "recipe.gguf") == 0, capsys.readouterr().err
    model = Path("recipe.gguf")
    capsys.readouterr()
    assert kvconv("inspect", model, "-o", "json") == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == config.n_layer

    assert kvconv("diagnose", model, "-f", "text.txt", "-c", "128", "-t", "1", "-o", "json") == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["kld_all"] > 0

    rows = []
    for how in ("parallel", "decode"):
        common = ("-f", "text.txt", "-c", "128", "--chunks", "1", "-t", "1", "-o", "json", "--kl-divergence")
        assert kvrun("perplexity", model, *common, "--path", how) == 0, capsys.readouterr().err
        rows += json.loads(capsys.readouterr().out)
    assert all(row["error"] == "" and row["packed_read"] > 0 for row in rows)
    assert rows[0]["packed_read"] == rows[1]["packed_read"]
    assert rows[0]["ppl"] == pytest.approx(rows[1]["ppl"], rel=1e-2)
    verified = ("--dtype", "float64", "--verify", "100", "-c", "128", "--chunks", "1", "-t", "1", "-f", "text.txt")
    assert kvrun("perplexity", model, *verified) == 0, capsys.readouterr().err

    assert kvrun("chat", model, "-p", "hello", "-st", "-n", "6", "--temp", "0", "-t", "1") == 0
    assert "auto" in capsys.readouterr().err

    compared = ("-f", "text.txt", "-c", "128", "--chunks", "1", "-t", "1", "-o", "json")
    status = kvrun("compare", model, *compared)
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert status == 0, printed.err
    assert {row["engine"] for row in rows} == {"kvrun", "llama.cpp"}
    assert not [row["error"] for row in rows if row["error"] and row["engine"] == "kvrun" and not row["control"]]
    assert [row for row in rows if row["engine"] == "llama.cpp" and not row["error"]]

    assert kvconv("strip", model, "-o", "stripped.gguf") == 0
    assert Path("stripped.gguf").read_bytes() == path.read_bytes()
    assert GGUFFile(model).arch == arch
