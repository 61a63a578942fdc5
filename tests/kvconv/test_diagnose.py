"""`kvconv diagnose` on tiny models, one of them with a layer that is broken on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconv.cli import app
from kvconv.diagnose import Damage, Part, diagnose, in_full, with_part, with_transform
from kvconv.standout import find, key_means, offers, stand_outs
from kvkernels.spec import QuantSpec
from kvrun.cache_types import plan_for
from kvrun.console import exit_status
from kvrun.engine import Engine
from kvrun.errors import KvError
from kvrun.evaluation.perplexity import run_plans
from kvrun.evaluation.windows import Windows
from kvrun.gguf_file import GGUFFile
from kvrun.models import load_model
from kvrun.plan import CachePlan, HeadPlan, HeadTransform
from kvrun.report import read_diagnosis
from tools.make_tiny_model import make_tiny_model

BROKEN = 3
ARGUMENTS = ("-c", "64", "--window", "8", "-t", "1")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of like weight; the keys of layer 3 have a constant in a channel that RoPE hardly turns."""
    path = make_tiny_model("qwen2", tmp_path_factory.mktemp("broken") / "broken.gguf", n_layer=6, tied=False)
    file = GGUFFile(path)
    dim = load_model(path).config.head_dim_k
    info, embedding = file.tensors[f"blk.{BROKEN}.attn_k.bias"], file.tensors["token_embd.weight"]
    bias = np.zeros(info.shape, np.float32).reshape(-1, dim)
    bias[:, dim // 2 - 1] = 150.0
    # Beside a large embedding no layer changes much of what the next ones see: an error weighs the same anywhere.
    large = 10 * file.dequantize("token_embd.weight")
    del file
    with path.open("r+b") as raw:
        for place, values in ((info, bias), (embedding, large)):
            raw.seek(place.offset)
            raw.write(values.tobytes())
    return path


def tokens(n_windows: int, n_ctx: int = 64) -> np.ndarray:
    return np.random.default_rng(5).integers(3, 250, (n_windows, n_ctx))


def plan_of(path: Path, type_k: str = "kv4", type_v: str = "kv4") -> CachePlan:
    return plan_for(load_model(path).config.geometry, type_k, type_v, recipe=None, sinks=2, window=8)


def test_starting_at_a_layer_changes_nothing(tiny_model: Callable[..., Path]) -> None:
    """Every figure equals that of whole passes through the evaluator that `kvrun perplexity` uses."""
    path = tiny_model("llama", n_layer=3, seed=7)
    model, windows = load_model(path, dtype=torch.float64), Windows(tokens(2))
    plan = plan_of(path)
    result = diagnose(model, windows, plan, heads=True)
    assert len(result.damages) == 3 * 2 * 2
    f16 = plan_for(plan.geometry, "f16", "f16", recipe=None)
    for damage in (result.damages[1], result.damages[6], result.damages[-1]):
        part = damage.part
        heads = (plan.k if part.side == "k" else plan.v)[part.layer][part.head or 0]
        full = in_full(plan).k[0][0]
        only = with_part(in_full(plan), part, [heads])
        rest = with_part(plan, part, [full])
        runs = run_plans(Engine(model, dtype=torch.float64), windows, [only, rest, plan], reference=f16)
        expected = [float(run.scores.kld.mean()) for run in runs]
        np.testing.assert_allclose([damage.kld_only, damage.kld_rest, result.kld_all], expected, rtol=1e-8)
        assert damage.kld_only > 0


def test_more_bits_do_less_damage(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", n_layer=3, seed=7)
    model, windows = load_model(path), Windows(tokens(1))
    few, many = (diagnose(model, windows, plan_of(path, t, t)) for t in ("kv2", "kv6"))
    for coarse, fine in zip(few.damages, many.damages, strict=True):
        assert coarse.part == fine.part
        assert coarse.kld_only > 4 * fine.kld_only
        # Four bits more divide a uniform quantizer's step by 63 / 3.
        assert 12 < coarse.error / fine.error < 40


def test_the_broken_layer_is_found_and_repaired(broken: Path) -> None:
    model, windows = load_model(broken), Windows(tokens(1))
    result = diagnose(model, windows, plan_of(broken))
    (finding,) = find(model, windows, result, means=lambda: key_means(model, tokens(2)[1:], 2))
    damage = finding.what.damage
    assert damage.part == Part(BROKEN, "k")
    assert damage.kld_rest < 0.5 * result.kld_all
    advice = finding.advice
    assert advice is not None and advice.setting.startswith("offset") and advice.extra_bits == 0
    assert advice.kld_only < 0.2 * damage.kld_only and advice.kld_all < 0.5 * result.kld_all
    assert f"Keys of layer {BROKEN} stand out" in finding.sentence and advice.setting in finding.sentence
    tried = {repair.setting: repair for repair in finding.tried}
    assert tried["f16"].kld_only < 1e-9 and tried["f16"].kld_all == pytest.approx(damage.kld_rest, rel=1e-6)
    assert tried["8 bits"].kld_only < tried["5 bits"].kld_only < damage.kld_only


def test_a_rotating_offset_counts_as_no_error(broken: Path) -> None:
    """The keys' bias as a rotating offset takes away what it does, in the divergence and in the round-trip error."""
    model, windows, plan = load_model(broken), Windows(tokens(1)), plan_of(broken)
    bias = model.weights.get(f"blk.{BROKEN}.attn_k.bias").float().numpy().reshape(len(plan.k[BROKEN]), -1)
    heads = [
        replace(head, transform=HeadTransform(offset=bias[i], rotating=True)) for i, head in enumerate(plan.k[BROKEN])
    ]
    part = Part(BROKEN, "k")
    before, after = (
        next(d for d in diagnose(model, windows, p).damages if d.part == part)
        for p in (plan, with_part(plan, part, heads))
    )
    assert before.error > 1 and after.error < 0.2
    assert after.kld_only < 0.1 * before.kld_only


def test_the_advice_holds_for_the_whole_plan(broken: Path) -> None:
    """With offsets everywhere nothing stands out."""
    model, windows = load_model(broken), Windows(tokens(1))
    means = key_means(model, tokens(2)[1:], 2)
    result = diagnose(model, windows, with_transform(plan_of(broken), hadamard=False, means=means))
    assert [s.damage.part for s in stand_outs(result.damages, result.kld_all) if s.damage.part.layer == BROKEN] == []


def _damages(values: list[float]) -> list[Damage]:
    return [Damage(Part(i, "k"), v, 0.0, 100.0, 0.0, 0.1) for i, v in enumerate(values)]


def test_what_stands_out() -> None:
    even = [0.01, 0.012, 0.009, 0.011, 0.013, 0.008]
    assert stand_outs(_damages(even), 0.06) == []
    (found,) = stand_outs(_damages([*even, 0.5]), 0.6)
    assert found.damage.part.layer == 6 and found.factor == pytest.approx(0.5 / 0.011)
    # An outlier that does not matter beside the rest of the cache is not worth a sentence.
    assert stand_outs(_damages([*even, 0.5]), 50.0) == []
    # The rule is robust: a third of the layers broken does not hide them.
    assert len(stand_outs(_damages([*even, 0.5, 0.6, 0.7]), 2.0)) == 3
    # Layers that are the same but for rounding have no outliers.
    assert stand_outs(_damages([0.01] * 8 + [0.011]), 0.1) == []
    assert stand_outs(_damages([0.01, 0.01, 5.0]), 5.0) == []
    # Whatever the spread: what takes more than half of the damage away when it is left out stands out.
    wide = [replace(d, kld_rest=0.3 if d.part.layer == 2 else 0.9) for d in _damages([1e-5, 1e-3, 0.1, 1e-4, 1e-2])]
    assert [s.damage.part.layer for s in stand_outs(wide, 1.0)] == [2]


def test_a_cache_that_quantizes_nothing_is_refused(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", n_layer=3, seed=7)
    with pytest.raises(KvError, match="quantizes nothing"):
        diagnose(load_model(path), Windows(tokens(1)), plan_of(path, "f16", "f16"))


def test_a_window_that_hides_the_quantizer_is_refused(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", n_layer=3, seed=7)
    with pytest.raises(KvError, match="cover the context"):
        diagnose(load_model(path), Windows(tokens(1)), replace(plan_of(path), window=64))


def run(*arguments: object) -> int:
    return exit_status(app, [str(a) for a in arguments], prog="kvconv")


def test_the_command_names_the_layer(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", broken, *ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + 6
    assert f"Keys of layer {BROKEN} stand out" in out and "offset" in out


def test_json_is_what_a_report_reads(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", broken, "--heads", "-ctk", "kv3", "-ctv", "kv4", "-o", "json", *ARGUMENTS) == 0
    text = capsys.readouterr().out
    content = json.loads(text)
    assert content["cache"] == "kv3/kv4" and len(content["parts"]) == 6 * 2 * 2
    assert {p["head"] for p in content["parts"]} == {0, 1}
    (tmp_path / "d.json").write_text(text)
    report = read_diagnosis(tmp_path / "d.json")
    assert len(report.sentences) == len(content["findings"]) >= 1
    assert all(drawing.count('class="heat"') == 24 + 6 for drawing in report.heat_maps())


def test_png(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "map.png"
    assert run("diagnose", broken, "--png", out, *ARGUMENTS) == 0, capsys.readouterr().err
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["map.png"]


def test_without_matplotlib_the_run_does_not_begin(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run("diagnose", broken, "--png", tmp_path / "map.png", *ARGUMENTS) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: --png needs matplotlib; install it with `pip install 'kvconv[report]'`"
    ]


@pytest.mark.parametrize("arguments", [("-ctk", "f16", "-ctv", "f16"), ("--window", "64")])
def test_bad_input_is_one_line(
    broken: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(broken, tmp_path / "m.gguf")
    assert run("diagnose", tmp_path / "m.gguf", "-c", "64", "-t", "1", *arguments) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1


def test_heads_of_cubic_codes_are_offered_every_width() -> None:
    """The cubic code has no 8 bits; what is offered there is uniform."""
    heads = [HeadPlan(QuantSpec(4, 32, code="cubic")), HeadPlan(QuantSpec(3, 32))]
    offered = {new[0].spec.bits: [head.spec.code for head in new] for new in offers(heads, "v", None, 64)}
    assert offered[6] == ["cubic", "uniform"] and offered[8] == ["uniform", "uniform"] and 16 in offered
