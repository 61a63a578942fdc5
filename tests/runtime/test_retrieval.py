"""Facts hidden in a text, and greedy continuations beside the f16 cache's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrun.cache_types import plan_for
from kvrun.cli import app
from kvrun.console import exit_status
from kvrun.engine import Engine
from kvrun.errors import KvError, MeasurementError
from kvrun.evaluation.metrics import log_softmax
from kvrun.evaluation.retrieval import greedy, greedy_continuation, hide, needles
from kvrun.models import load_model
from kvrun.plan import CachePlan

PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 40


def encode(text: str) -> list[int]:
    return [3 + byte % 200 for byte in text.encode()]


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Engine:
    return Engine(load_model(tiny_model("llama", n_layer=2), dtype=torch.float64), dtype=torch.float64)


def plan(engine: Engine, name: str, sinks: int | None = None, window: int | None = None) -> CachePlan:
    return plan_for(engine.model.config.geometry, name, name, recipe=None, sinks=sinks, window=window)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_fact_stands_where_it_is_said_to_be(depth: float) -> None:
    filler = encode(PROSE)
    needle = hide(filler, encode, depth, 300, index=2)
    fact = encode(f"\n\nThe secret number of the workshop is {needle.answer_text}.\n\n")
    assert needle.prompt[needle.position : needle.position + len(fact)] == fact
    assert [*needle.prompt[: needle.position], *needle.prompt[needle.position + len(fact) :]] == filler[
        : len(needle.prompt) - len(fact)
    ]
    assert len(needle.prompt) + len(needle.question) + len(needle.answer) == 300
    assert needle.position == 1 + round(depth * (300 - len(fact) - len(needle.question) - len(needle.answer) - 1))
    assert needle.answer == encode(" " + needle.answer_text)
    assert hide(filler, encode, depth, 300, index=3).answer_text != needle.answer_text


def test_the_answers_score_is_that_of_one_pass_over_it(engine: Engine) -> None:
    needle = hide(encode(PROSE), encode, 0.5, 200)
    kv3, f16 = plan(engine, "kv3", 2, 8), plan(engine, "f16")
    (row,) = needles(engine, kv3, f16, [needle], n_ubatch=50)
    whole = [*needle.prompt, *needle.question, *needle.answer]
    first = len(whole) - len(needle.answer)
    for chosen, log_prob, found in ((kv3, row.log_prob, row.found), (f16, row.log_prob_f16, row.found_f16)):
        scores = log_softmax(engine.forward(whole, engine.new_cache(chosen, len(whole)), logits="all").numpy())
        expected = sum(scores[first + i - 1, token] for i, token in enumerate(needle.answer))
        assert log_prob == pytest.approx(expected, abs=1e-9)
        likeliest = scores[first - 1 : -1].argmax(1).tolist()
        assert found == (likeliest == needle.answer)
    assert row.log_prob != row.log_prob_f16


def test_f16_continues_as_itself_and_one_bit_does_not(engine: Engine) -> None:
    prompts = np.random.default_rng(0).integers(3, engine.model.config.n_vocab, (3, 60)).tolist()
    f16 = plan(engine, "f16")
    assert all(row.identical and row.n_generated == 12 for row in greedy(engine, f16, f16, prompts, 12))
    rough = list(greedy(engine, plan(engine, "kv1", 0, 0), f16, prompts, 12))
    assert not all(row.identical for row in rough)
    for row, prompt in zip(rough, prompts, strict=True):
        ours = greedy_continuation(engine, plan(engine, "kv1", 0, 0), prompt, 12, frozenset())
        theirs = greedy_continuation(engine, f16, prompt, 12, frozenset())
        assert ours[: row.n_same] == theirs[: row.n_same]
        assert row.identical or ours[row.n_same] != theirs[row.n_same]


def test_a_continuation_ends_where_the_model_ends_it(engine: Engine) -> None:
    prompt = np.random.default_rng(0).integers(3, engine.model.config.n_vocab, 40).tolist()
    whole = greedy_continuation(engine, plan(engine, "f16"), prompt, 8, frozenset())
    stop = whole[3]
    assert (
        greedy_continuation(engine, plan(engine, "f16"), prompt, 8, frozenset({stop})) == whole[: whole.index(stop) + 1]
    )


def test_what_would_measure_nothing_is_refused(engine: Engine) -> None:
    f16, covered = plan(engine, "f16"), plan(engine, "kv4", 4, 500)
    with pytest.raises(MeasurementError, match="cover these prompts"):
        list(greedy(engine, covered, f16, [[3] * 50], 4))
    with pytest.raises(KvError, match="give a longer text"):
        hide(encode("short"), encode, 0.5, 300)
    with pytest.raises(KvError, match="larger -c"):
        hide(encode(PROSE), encode, 0.5, 60)


def test_from_the_command_line(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROSE)
    common = ["retrieval", str(tiny_model("qwen2")), "-f", str(text), "-t", "1", "-c", "192"]
    common += ["--prompts", "2", "--prompt-tokens", "80", "-n", "4"]
    assert exit_status(app, [*common, "-ctk", "kv4", "-ctv", "kv4"], prog="kvrun") == 0
    printed = capsys.readouterr()
    assert "log-prob f16" in printed.out and "same tokens" in printed.out
    assert (
        exit_status(app, [*common, "--needle", "--depths", "0.2,0.9", "--preset", "quarot", "-o", "json"], prog="kvrun")
        == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert [row["depth"] for row in rows] == [0.2, 0.9] and rows[0]["type_k"] == "quarot"
    assert all(row["log_prob"] < 0 and isinstance(row["found"], bool) for row in rows)
    assert exit_status(app, [*common, "--greedy", "-ctk", "kv4", "-ctv", "kv4", "-o", "csv"], prog="kvrun") == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 3
    for wrong in (["--depths", "2"], ["--preset", "kivi2", "--sinks", "3"], ["-o", "csv"]):
        assert exit_status(app, [*common, *wrong], prog="kvrun") == 2
