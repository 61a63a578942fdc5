"""Which engine runs: what `auto` takes, what it says where it cannot, and what the commands report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvkernels.spec import QuantSpec
from kvrun import console
from kvrun.cache_types import plan_for
from kvrun.cli import app
from kvrun.commands import common
from kvrun.engines import ENGINE_NAMES, choose_engine
from kvrun.errors import KvError
from kvrun.ggml import GgmlError
from kvrun.models import load_model
from kvrun.plan import HeadPlan

Tiny = Callable[..., Path]
PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 8


def kvrun(capfd: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    status = console.exit_status(app, [*(str(a) for a in argv), "-t", "1"], prog="kvrun")
    out, err = capfd.readouterr()
    return status, out, err


def test_auto_takes_the_fast_engine(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    chosen = {name: choose_engine(name, model, n_threads=1) for name in ENGINE_NAMES}
    assert {name: engine.name for name, (engine, _) in chosen.items()} == {
        "auto": "cpu",
        "reference": "reference",
        "cpu": "cpu",
    }
    assert not any(reason for _, reason in chosen.values())
    assert common.ENGINES.split("|") == list(ENGINE_NAMES)
    with pytest.raises(KvError, match="unknown engine 'gpu'"):
        choose_engine("gpu", model)


def no_ggml() -> None:
    raise GgmlError("llama-cpp-python is not installed; install it, or use --engine reference")


def no_llvm() -> None:
    from kvkernels.jit import CompileError

    raise CompileError("LLVM cannot be used here: no module named llvmlite")


@pytest.mark.parametrize(
    ("place", "instead", "reason"),
    [
        ("kvrun.cpu_engine.load_library", no_ggml, "llama-cpp-python is not installed"),
        ("kvrun.cpu_engine.prepare", no_llvm, "no module named llvmlite"),
        ("kvrun.cpu_graph.LlamaGraph.arch", ("other",), "no graph for architecture 'qwen2'"),
    ],
)
def test_what_is_missing_is_said_and_an_explicit_choice_is_an_error(
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: str,
    instead: object,
    reason: str,
) -> None:
    path = tiny_model("qwen2")
    monkeypatch.setattr(place, instead)
    engine, why = choose_engine("auto", load_model(path))
    assert engine.name == "reference" and reason in why
    with pytest.raises(KvError, match="--engine reference"):
        choose_engine("cpu", load_model(path))

    status, _, err = kvrun(capfd, "generate", path, "-p", "It was", "-n", "2", "-c", "64")
    assert status == 0 and "| reference ]" in err
    assert sum(reason in line for line in err.splitlines()) == 1
    status, out, err = kvrun(capfd, "generate", path, "-p", "It was", "-n", "2", "-c", "64", "--engine", "cpu")
    assert (status, out) == (1, "") and err.splitlines()[-1].startswith("error: ") and reason in err


def test_a_plan_that_the_fast_engine_cannot_read(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"))
    plan = plan_for(model.config.geometry, "kv4", "kv4", recipe=None)
    blocks = replace(plan, k=tuple(tuple(HeadPlan(QuantSpec(8, 32, code="q8_0")) for _ in heads) for heads in plan.k))
    assert choose_engine("auto", model, plan=plan, n_threads=1)[0].name == "cpu"
    engine, why = choose_engine("auto", model, plan=blocks, n_threads=1)
    assert engine.name == "reference" and "q8_0 blocks" in why
    assert engine.forward([1, 2, 3], engine.new_cache(blocks, 8)).isfinite().all()
    with pytest.raises(KvError, match="q8_0 blocks; use --engine reference"):
        choose_engine("cpu", model, plan=blocks)


def test_head_sizes_that_the_kernels_do_not_take(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama", head_dim=12))
    engine, why = choose_engine("auto", model)
    assert engine.name == "reference" and "multiple of 8 channels" in why
    plan = plan_for(model.config.geometry, "f16", "f16", recipe=None)
    assert engine.forward([1, 2, 3], engine.new_cache(plan, 8)).isfinite().all()


def test_stats_and_rows_carry_the_engine(tiny_model: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny_model("llama")
    for option, name in (([], "cpu"), (["--engine", "reference"], "reference")):
        _, _, err = kvrun(capfd, "generate", path, "-p", "It was", "-n", "3", "-c", "64", *option)
        assert f"| {name} ]" in err
    (tmp_path / "text.txt").write_text(PROSE)
    rows = {}
    for option, name in (([], "reference"), (["--engine", "cpu"], "cpu")):
        status, out, _ = kvrun(
            capfd, "perplexity", path, "-f", tmp_path / "text.txt", "-c", "64", "--chunks", "2", "-ctk", "kv4",
            "-o", "json", *option,
        )  # fmt: skip
        assert status == 0
        rows[name] = json.loads(out)[0]
        assert rows[name]["impl"] == name
    assert rows["cpu"]["packed_read"] == rows["reference"]["packed_read"] > 0
    np.testing.assert_allclose(rows["cpu"]["ppl"], rows["reference"]["ppl"], rtol=1e-3)
    status, _, err = kvrun(capfd, "generate", path, "-p", "It was", "--engine", "gpu")
    assert status == 2 and "unknown engine gpu" in err
