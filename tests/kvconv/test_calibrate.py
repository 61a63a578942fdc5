"""`kvconv calibrate` and `kvconv inspect`, from the command line to the file, on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from kvconv.calibrate import Settings, draw
from kvconv.calibrate import calibrate as calibrate_model
from kvconv.cli import app
from kvconv.gather import budget_bytes
from kvconv.text import language_reference
from kvrun.console import exit_status
from kvrun.gguf_file import GGUFFile
from kvrun.models import load_model
from kvrun.recipe import Recipe, find_recipe
from kvrun.tokenizer import Tokenizer
from tools.make_tiny_model import make_tiny_model

FEW = ["--chunks", "2", "--chunk-tokens", "96", "-t", "1"]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return make_tiny_model("llama", tmp_path / "models" / "tiny.gguf", n_layer=3, n_head_kv=[2, 1, 4])


def kvconv(*argv: str | Path) -> int:
    return exit_status(app, [str(a) for a in argv], prog="kvconv")


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr that is an error, and there is nothing like a traceback."""
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def test_the_written_model_is_the_model_with_a_recipe(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tiny.read_bytes()
    assert kvconv("calibrate", tiny, *FEW) == 0
    out = capsys.readouterr().out
    assert "tiny-kvconv.gguf" in out
    assert out.count("| layer") == 1 and out.count("\n| ") == 1 + 3 + 1  # rule, layers, total

    source, result = GGUFFile(tiny), GGUFFile(Path("tiny-kvconv.gguf"))
    assert tiny.read_bytes() == before
    assert list(result.tensors) == list(source.tensors)
    for name in source.tensors:
        np.testing.assert_array_equal(result.tensor_bytes(name), source.tensor_bytes(name))
    for key in source.keys():  # noqa: SIM118 - not a dict
        assert result.raw_kv(key) == source.raw_kv(key)
    assert result.fingerprint() == source.fingerprint()

    recipe = find_recipe(result, geometry=load_model(tiny).config.geometry)
    assert recipe is not None and (recipe.sinks, recipe.window) == (4, 32)
    assert [len(layer) for layer in recipe.k] == [2, 1, 4]
    sizes = [head.spec.bits_per_value(64) for side in (recipe.k, recipe.v) for layer in side for head in layer]
    assert 4.3 < np.mean(sizes) <= 4.5
    assert recipe.provenance.text_name.startswith("pydoc_data.topics")
    for before_, after in (("k_before", "k_after"), ("v_before", "v_after")):
        for b, a in zip(
            np.concatenate(getattr(recipe.provenance, before_)),
            np.concatenate(getattr(recipe.provenance, after)),
            strict=True,
        ):
            assert 0 < a <= b


LOGITS = """
import sys
import llama_cpp
import numpy as np

def logits(path):
    model = llama_cpp.Llama(path, n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    model.eval(list(range(3, 51)))
    return np.array(model.scores[:48])

a, b = logits(sys.argv[1]), logits(sys.argv[2])
assert np.isfinite(a).all() and a.std() > 0
print(np.array_equal(a, b))
"""


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_llama_cpp_computes_the_same_with_the_recipe_in_the_file(arch: str, tiny: Path) -> None:
    model = make_tiny_model(arch, tiny.parent / "even.gguf")
    assert kvconv("calibrate", model, *FEW) == 0
    command = [sys.executable, "-c", LOGITS, str(model), "even-kvconv.gguf"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "True"


def test_calibrating_again_replaces_the_recipe(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvconv("calibrate", tiny, *FEW, "-o", "one.gguf") == 0
    assert kvconv("calibrate", "one.gguf", *FEW, "-o", "two.gguf", "--k-bits", "2", "--window", "8") == 0
    two = GGUFFile(Path("two.gguf"))
    recipe = Recipe.from_metadata(two)
    assert {head.spec.bits for layer in recipe.k for head in layer} == {2} and recipe.window == 8
    assert np.mean([head.spec.bits_per_value(64) for layer in recipe.v for head in layer]) <= 4.5
    assert len([key for key in two.keys() if key == "kvconv.version"]) == 1  # noqa: SIM118
    # Dropping the recipe gives the model back: the same result from the bare model.
    assert kvconv("calibrate", tiny, *FEW, "-o", "three.gguf", "--k-bits", "2", "--window", "8") == 0
    assert Path("two.gguf").read_bytes() == Path("three.gguf").read_bytes()


def test_a_sidecar_is_found_beside_the_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvconv("calibrate", tiny, *FEW, "--sidecar", "--k-bits", "3", "--v-bits", "3", "--group", "32") == 0
    assert files_in(tiny.parent) == ["kvconv-tiny.gguf", "tiny.gguf"] and files_in(Path.cwd()) == []
    assert "kvconv-tiny.gguf" in capsys.readouterr().out
    recipe = find_recipe(GGUFFile(tiny))
    assert recipe is not None and recipe.v[2][3].spec.bits == 3 and recipe.k[0][0].spec.group == 32
    sidecar = GGUFFile(tiny.parent / "kvconv-tiny.gguf")
    assert sidecar.get("general.type") == "kvconv" and not sidecar.tensors
    assert kvconv("calibrate", sidecar.path, *FEW) == 1
    assert "is a recipe alone" in error_line(capsys)


def test_inspect_shows_what_is_stored(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("notes.txt")
    text.write_text("It was a bright cold day in April, and the clocks were striking. " * 20)
    assert kvconv("calibrate", tiny, *FEW, "-f", text, "--seed", "7", "-o", "m.gguf") == 0
    capsys.readouterr()
    assert kvconv("inspect", "m.gguf", "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    recipe = Recipe.from_metadata(GGUFFile(Path("m.gguf")))
    assert shown["recipe"] == recipe.digest() and shown["fingerprint"] == GGUFFile(tiny).fingerprint()
    assert 4.3 < shown["bits_per_value"] <= 4.5
    calibration = shown["calibration"]
    assert (calibration["text_name"], calibration["seed"]) == ("notes.txt", 7)
    assert (calibration["n_chunks"], calibration["chunk_tokens"], calibration["n_ctx"]) == (2, 96, 4096)
    assert [len(layer["k"]) for layer in shown["layers"]] == [2, 1, 4]
    head = shown["layers"][2]["v"][3]
    assert head["transform"] == recipe.v[2][3].transform.name
    assert head["score_after"] == pytest.approx(recipe.provenance.v_after[2][3])

    assert kvconv("inspect", "m.gguf") == 0
    table = capsys.readouterr().out
    assert recipe.digest() in table and "notes.txt" in table and table.count("\n| ") == 3 + 2 + 1
    assert kvconv("inspect", tiny) == 1
    assert "holds no recipe" in error_line(capsys)


def test_the_same_seed_gives_the_same_recipe(tiny: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert kvconv("calibrate", tiny, *FEW, "--seed", seed, "-o", f"{name}.gguf") == 0
    assert Path("a.gguf").read_bytes() == Path("b.gguf").read_bytes()
    a, c = (Recipe.from_metadata(GGUFFile(Path(f"{name}.gguf"))) for name in "ac")
    assert a.provenance.k_before != c.provenance.k_before  # other positions


# Refusals


def must_not_run(*args: object, **kwargs: object) -> None:
    raise AssertionError("the long pass began")


@pytest.mark.parametrize("sidecar", [False, True])
def test_an_output_that_exists_is_found_before_the_pass(
    sidecar: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvconv.calibrate.calibrate", must_not_run)
    target = tiny.parent / "kvconv-tiny.gguf" if sidecar else Path("tiny-kvconv.gguf")
    target.write_text("precious")
    assert kvconv("calibrate", tiny, *FEW, *(["--sidecar"] if sidecar else [])) == 1
    line = error_line(capsys)
    assert target.name in line and "--force" in line
    assert target.read_text() == "precious"


def test_force_overwrites_but_never_the_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.gguf").write_text("old")
    assert kvconv("calibrate", tiny, *FEW, "-o", "out.gguf", "--force") == 0
    assert Recipe.from_metadata(GGUFFile(Path("out.gguf"))).geometry
    before = tiny.read_bytes()
    os.symlink(tiny, "link.gguf")
    for name in (str(tiny), "link.gguf"):
        assert kvconv("calibrate", tiny, *FEW, "-o", name, "--force") == 1
        assert "is the model itself" in error_line(capsys)
    assert tiny.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_found_before_the_pass(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvconv.calibrate.calibrate", must_not_run)
    assert kvconv("calibrate", tiny, *FEW, "-o", "nowhere/out.gguf") == 1
    assert "the folder nowhere does not exist" in error_line(capsys)
    assert kvconv("calibrate", tiny, *FEW, "-o", ".") == 1
    assert "is a folder" in error_line(capsys)
    assert kvconv("calibrate", tiny, *FEW, "-o", os.devnull, "--force") == 1
    assert "is not a file" in error_line(capsys)
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10, 9, 1 << 20))
    assert kvconv("calibrate", tiny, *FEW) == 1
    assert "1 MiB are free" in error_line(capsys)

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    assert kvconv("calibrate", tiny, *FEW) == 1
    assert "cannot be written to (Permission denied)" in error_line(capsys)
    assert files_in(Path.cwd()) == []


def test_a_disk_that_fills_up_leaves_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert kvconv("calibrate", tiny, *FEW) == 1
    assert "disk is full" in error_line(capsys)
    assert files_in(Path.cwd()) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-f", "short.txt"], "tokens, and one chunk is 96"),
        (["-f", "none.txt"], "none.txt"),
        (["-f", "binary"], "is not UTF-8 text"),
        (["--group", "48"], "group 48 does not divide the head size 64"),
        (["-c", "64"], "exceed the context of 64"),
        (["--bits", "2.2"], "2.2 bits are less than the narrowest storage takes, 2.25"),
        (["--bits", "4", "--k-bits", "6"], "less than the narrowest storage takes"),
    ],
)
def test_bad_input_is_one_line(options: list[str], why: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.txt").write_text("Too short.")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    assert kvconv("calibrate", tiny, *FEW, *options) == 1
    assert why in error_line(capsys)
    assert files_in(Path.cwd()) == ["binary", "short.txt"]


def test_models_that_cannot_be_calibrated(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvconv("calibrate", "missing.gguf") == 1
    assert "missing.gguf" in error_line(capsys)
    Path("cut.gguf").write_bytes(tiny.read_bytes()[:5000])
    assert kvconv("calibrate", "cut.gguf") == 1
    assert "cut.gguf" in error_line(capsys)
    assert kvconv("inspect", "cut.gguf") == 1
    assert "cut.gguf" in error_line(capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ["calibrate"],
        ["calibrate", "m.gguf", "--bits", "1.5"],
        ["calibrate", "m.gguf", "--v-bits", "7"],
        ["calibrate", "m.gguf", "--objective", "luck"],
        ["calibrate", "m.gguf", "--k-bits", "1"],
        ["calibrate", "m.gguf", "--chunks", "0"],
        ["calibrate", "m.gguf", "--sinks", "-1"],
        ["calibrate", "m.gguf", "--sinks", "512"],
        ["calibrate", "m.gguf", "--no-such"],
        ["inspect"],
        ["inspect", "m.gguf", "-o", "yaml"],
        ["nonsense"],
        [],
    ],
)
def test_wrong_usage_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kvconv(*argv) == 2
    assert error_line(capsys)


def test_weights_that_are_no_numbers_are_named(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = GGUFFile(tiny).tensors["blk.1.attn_k.weight"]
    data = bytearray(tiny.read_bytes())
    data[info.offset : info.offset + 4] = np.float32("nan").tobytes()
    Path("nan.gguf").write_bytes(data)
    assert kvconv("calibrate", "nan.gguf", *FEW) == 1
    assert "blk.1.attn_k.weight" in error_line(capsys)
    assert files_in(Path.cwd()) == ["nan.gguf"]


def test_keys_that_overflow_are_named_by_layer_and_head(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = GGUFFile(tiny).tensors["blk.1.attn_k.weight"]
    data = bytearray(tiny.read_bytes())
    data[info.offset : info.offset + info.n_bytes] = np.full(info.n_bytes // 4, 1e37, np.float32).tobytes()
    Path("huge.gguf").write_bytes(data)
    assert kvconv("calibrate", "huge.gguf", *FEW) == 1
    assert "keys of layer 1, KV head 0" in error_line(capsys)


def test_constant_keys_are_calibrated_as_they_come(tiny: Path) -> None:
    info = GGUFFile(tiny).tensors["blk.1.attn_k.weight"]
    data = bytearray(tiny.read_bytes())
    data[info.offset : info.offset + info.n_bytes] = bytes(info.n_bytes)
    Path("zero.gguf").write_bytes(data)
    assert kvconv("calibrate", "zero.gguf", *FEW, "--bits", "4.5") == 0
    recipe = Recipe.from_metadata(GGUFFile(Path("zero-kvconv.gguf")))
    assert all(head.transform.is_identity for head in recipe.k[1])
    assert recipe.provenance.k_after[1] == (0.0,)
    assert recipe.k[1][0].spec.bits == 2  # bits that buy nothing go elsewhere


def test_an_interrupt_during_the_pass_leaves_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvconv import calibrate as module

    real = module.choose_layer

    def interrupted(il: int, side: str, *rest: object) -> object:
        if il == 1:
            raise KeyboardInterrupt
        return real(il, side, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "choose_layer", interrupted)
    assert kvconv("calibrate", tiny, *FEW) == 130
    assert files_in(Path.cwd()) == [] and files_in(tiny.parent) == ["tiny.gguf"]


def test_ctrl_c_ends_with_130_and_leaves_nothing(tiny: Path) -> None:
    """The real thing: a signal while hundreds of chunks go through the model."""
    command = [sys.executable, "-m", "kvconv", "calibrate", str(tiny), "--chunks", "400", "-t", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("text: "):  # said when everything is ready, right before the pass
                child.send_signal(signal.SIGINT)
                break
        rest = child.stderr.read()
    assert child.returncode == 130, rest
    assert "Traceback" not in rest
    assert files_in(Path.cwd()) == [] and files_in(tiny.parent) == ["tiny.gguf"]


def test_help_and_version_do_not_load_torch() -> None:
    script = (
        "import sys\n"
        "from kvrun.console import exit_status\n"
        "from kvconv.cli import app\n"
        "status = [exit_status(app, argv, prog='kvconv') for argv in"
        " (['-h'], ['calibrate', '-h'], ['inspect', '--help'], ['--version'])]\n"
        "heavy = [m for m in ('torch', 'gguf', 'llama_cpp', 'scipy', 'numpy') if m in sys.modules]\n"
        "print('RESULT', status, heavy)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert "RESULT [0, 0, 0, 0] []" in child.stdout, child.stdout + child.stderr
    assert "calibrate" in child.stdout and "kvconv 0." in child.stdout


@pytest.mark.model
def test_keys_of_a_real_model_need_an_offset(smollm2: Path) -> None:
    """SmolLM2's keys lie far from zero in some channels: every head gains by an offset, none gets worse."""
    model = load_model(smollm2, budget_bytes=budget_bytes(GGUFFile(smollm2)))
    settings = Settings(n_chunks=2, chunk_tokens=64, bits_k=4, bits_v=4, objective="roundtrip")
    sample = draw(language_reference(), Tokenizer(smollm2).encode, settings, model.config.n_ctx_train, None)
    recipe = calibrate_model(model, sample, settings)
    assert all(head.transform.offset is not None for layer in recipe.k for head in layer)
    before, after = (np.concatenate(getattr(recipe.provenance, name)) for name in ("k_before", "k_after"))
    assert (after <= before).all() and after.mean() < 0.5 * before.mean()
    v_before, v_after = (np.concatenate(getattr(recipe.provenance, name)) for name in ("v_before", "v_after"))
    assert (v_after <= v_before).all() and v_after.mean() < v_before.mean()


@pytest.mark.slow
@pytest.mark.model
def test_layer_0_of_qwen_needs_an_offset(qwen: Path) -> None:
    """Its keys there are so far from zero that four bits without an offset keep a third of the signal at most."""
    model = load_model(qwen, budget_bytes=budget_bytes(GGUFFile(qwen)))
    settings = Settings(n_chunks=2, chunk_tokens=128, bits_k=4, bits_v=4, objective="roundtrip")
    sample = draw(language_reference(), Tokenizer(qwen).encode, settings, model.config.n_ctx_train, None)
    recipe = calibrate_model(model, sample, settings)
    assert all(head.transform.offset is not None for head in recipe.k[0])
    assert np.mean(recipe.provenance.k_after[0]) < 0.1 * np.mean(recipe.provenance.k_before[0])
