"""Runs through the cache: the same numbers however the text is fed, and no number without a cache that was read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkernels.spec import QuantSpec
from kvrun.cache_types import plan_for
from kvrun.engine import Engine
from kvrun.errors import KvError, MeasurementError
from kvrun.evaluation.guard import check_cache_was_read, expected_packed_reads
from kvrun.evaluation.metrics import TokenScores, log_softmax
from kvrun.evaluation.perplexity import Run, run_plans
from kvrun.evaluation.texts import MeasuredText
from kvrun.evaluation.windows import Windows
from kvrun.models import load_model
from kvrun.plan import CachePlan, HeadPlan
from tools.make_tiny_model import make_tiny_model

TEXT = MeasuredText("some.txt", "text")
N_CTX = 61


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = make_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layer=2)
    return Engine(load_model(path, dtype=torch.float64), dtype=torch.float64)


@pytest.fixture(scope="module")
def windows(engine: Engine) -> Windows:
    return Windows(np.random.default_rng(3).integers(3, engine.model.config.n_vocab, (2, N_CTX)))


def plan(engine: Engine, name: str, sinks: int | None = None, window: int | None = None) -> CachePlan:
    return plan_for(engine.model.config.geometry, name, name, recipe=None, sinks=sinks, window=window)


def one(engine: Engine, windows: Windows, plan: CachePlan, **options: object) -> Run:
    (run,) = run_plans(engine, windows, [plan], **options)  # type: ignore[arg-type]
    return run


def test_the_figures_are_those_of_the_logits_that_the_cache_gives(engine: Engine, windows: Windows) -> None:
    """Token by token through a cache of the test's own, scored by the formula."""
    chosen = plan(engine, "kv4", 2, 5)
    nll = []
    for window in windows.tokens.tolist():
        cache = engine.new_cache(chosen, N_CTX)
        for i, token in enumerate(window[:-1]):
            log_p = log_softmax(engine.forward([token], cache).numpy())[0]
            if i >= N_CTX // 2:
                nll.append(-log_p[window[i + 1]])
    run = one(engine, windows, chosen)
    assert run.scores.nll == pytest.approx(np.array(nll), abs=1e-9)
    row = run.row(model="m", text=TEXT, n_threads=1)
    assert row.ppl == pytest.approx(np.exp(np.mean(nll)))
    assert row.n_scored == len(nll) == windows.n_scored
    assert (row.engine, row.type_k, row.n_ctx, row.sinks, row.window) == ("kvrun", "kv4", N_CTX, 2, 5)
    assert row.kv_bytes == engine.new_cache(chosen, N_CTX).n_bytes
    assert row.tokens_per_s is not None and row.tokens_per_s > 0


@pytest.mark.parametrize("name", ["f16", "kv4", "kv2"])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 32), (3, 7)])
def test_token_by_token_and_chunks_give_the_same_figures(
    engine: Engine, windows: Windows, name: str, sinks: int, window: int
) -> None:
    chosen, base = plan(engine, name, sinks, window), plan(engine, "f16")
    alone = one(engine, windows, chosen, reference=base, n_ubatch=1)
    for n_ubatch in (7, 512):
        run = one(engine, windows, chosen, reference=base, n_ubatch=n_ubatch)
        assert run.scores.nll == pytest.approx(alone.scores.nll, abs=1e-9)
        assert run.scores.kld == pytest.approx(alone.scores.kld, abs=1e-9)
        assert run.cache.packed_read == alone.cache.packed_read


def test_plans_in_lock_step_do_not_disturb_one_another(engine: Engine, windows: Windows) -> None:
    base, plans = plan(engine, "f16"), [plan(engine, "kv4"), plan(engine, "kv2", 0, 0), plan(engine, "kv3", 1, 9)]
    together = run_plans(engine, windows, [base, *plans], reference=base)
    for run, chosen in zip(together[1:], plans, strict=True):
        alone = one(engine, windows, chosen, reference=base)
        assert np.array_equal(run.scores.kld, alone.scores.kld)
        assert run.cache.packed_read == alone.cache.packed_read > 0
    assert together[0].scores.kld == pytest.approx(0, abs=1e-12) and together[0].scores.same_top.all()
    means = [run.scores.kld.mean() for run in together]
    assert means[2] > means[1] > means[0]


def test_one_chunk_of_logits_per_setting_is_alive(
    engine: Engine, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scored chunks are no longer than asked, so that n_ctx x n_vocab never exists."""
    sizes = []
    add = TokenScores.add

    def spy(self: TokenScores, logits: np.ndarray, targets: np.ndarray, reference: np.ndarray | None = None) -> None:
        sizes.append(len(logits))
        add(self, logits, targets, reference)

    monkeypatch.setattr(TokenScores, "add", spy)
    run = one(engine, windows, plan(engine, "kv4"), n_ubatch=8)
    assert max(sizes) == 8 and sum(sizes) == len(run.scores)


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 32), (1, 0), (0, 59)])
def test_what_was_read_is_what_the_rule_says(engine: Engine, windows: Windows, sinks: int, window: int) -> None:
    """Counted by hand: the query at position t sees max(t + 1 - sinks - window, 0) packed tokens in each layer."""
    by_hand = 2 * sum(max(t + 1 - sinks - window, 0) for t in range(N_CTX))
    run = one(engine, windows, plan(engine, "kv4", sinks, window))
    assert expected_packed_reads(run.plan, N_CTX) == by_hand
    assert run.cache.packed_read == len(windows) * by_hand > 0
    run.check()


def test_keys_by_channel_are_counted_in_blocks(engine: Engine, windows: Windows) -> None:
    shapes = engine.model.config.geometry
    k = tuple(tuple(HeadPlan(QuantSpec(4, 16, "channel")) for _ in range(g.n_head_kv)) for g in shapes)
    v = tuple(tuple(HeadPlan(QuantSpec(16)) for _ in range(g.n_head_kv)) for g in shapes)
    run = one(engine, windows, CachePlan(shapes, k, v, type_k="k", type_v="f16"))
    assert run.cache.packed_read == len(windows) * 2 * sum(16 * ((t + 1) // 16) for t in range(N_CTX))
    run.check()


def test_a_forward_that_bypasses_the_cache_gives_one_figure_for_all_types_and_is_refused(
    engine: Engine, windows: Windows
) -> None:
    """The blind spot of many published figures: the quantizer never ran, and nobody noticed."""
    names = ("f16", "kv4", "kv2")
    bypassed = [one(engine, windows, plan(engine, name), bypass=True) for name in names]
    assert len({run.scores.ppl for run in bypassed}) == 1
    honest = [one(engine, windows, plan(engine, name)) for name in names]
    assert len({round(run.scores.ppl, 6) for run in honest}) == 3
    assert honest[0].scores.ppl == pytest.approx(bypassed[0].scores.ppl, rel=1e-2)
    for run in bypassed:
        with pytest.raises(MeasurementError, match="bypassed"):
            run.check()
        row = run.row(model="m", text=TEXT, n_threads=1)
        assert row.ppl is None and row.tokens_per_s is None and "bypassed" in row.error


def test_a_window_that_covers_the_context_is_refused(engine: Engine, windows: Windows) -> None:
    run = one(engine, windows, plan(engine, "kv2", 4, N_CTX - 4))
    with pytest.raises(MeasurementError, match=r"cover the context of 61.*-c.*--window") as caught:
        run.check()
    assert "\n" not in str(caught.value)
    assert run.row(model="m", text=TEXT, n_threads=1).ppl is None


def test_a_cache_that_was_read_in_part_is_refused(engine: Engine) -> None:
    chosen = plan(engine, "kv4", 0, 0)
    full = 3 * expected_packed_reads(chosen, N_CTX)
    check_cache_was_read(chosen, N_CTX, 3, full, 1)
    for read in (0, full - 1, full // 2, full + 1):
        with pytest.raises(MeasurementError, match="visibility rule"):
            check_cache_was_read(chosen, N_CTX, 3, read, 1)
    check_cache_was_read(plan(engine, "f16"), N_CTX, 3, 0, 1)


def test_a_plan_that_fails_does_not_stop_the_others(
    engine: Engine, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, good, bad = plan(engine, "f16"), plan(engine, "kv4"), plan(engine, "kv2")
    forward, calls = engine.forward, []

    def failing(tokens: list[int], cache: object, **options: object) -> torch.Tensor:
        if getattr(cache, "plan", None) is bad:
            calls.append(len(tokens))
            if len(calls) == 4:
                raise KvError("a key or value does not fit f16;\nthe model is damaged")
        return forward(tokens, cache, **options)  # type: ignore[arg-type]

    expected = one(engine, windows, good, reference=base).scores.kld
    monkeypatch.setattr(engine, "forward", failing)
    runs = run_plans(engine, windows, [base, bad, good], reference=base, n_ubatch=16)
    rows = [run.row(model="m", text=TEXT, n_threads=1) for run in runs]
    assert rows[1].error == "a key or value does not fit f16; the model is damaged" and rows[1].ppl is None
    assert len(calls) == 4
    assert not rows[0].error and not rows[2].error
    assert runs[2].scores.kld == pytest.approx(expected, abs=1e-9)


def test_a_reference_that_fails_is_the_end(engine: Engine, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.forward

    def damaged(*arguments: object, **options: object) -> torch.Tensor:
        return forward(*arguments, **options) * float("nan")  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "forward", damaged)
    base = plan(engine, "f16")
    with pytest.raises(MeasurementError, match="not finite"), np.errstate(invalid="ignore"):
        run_plans(engine, windows, [base, plan(engine, "kv4")], reference=base)


def test_progress_after_each_window(engine: Engine, windows: Windows) -> None:
    seen: list[tuple[int, int]] = []
    one(engine, windows, plan(engine, "kv4"), on_window=lambda done, runs: seen.append((done, len(runs[0].scores))))
    assert seen == [(1, windows.n_scored // 2), (2, windows.n_scored)]
