"""The comparison: our cache types and llama.cpp's on the same tokens, each against its own engine's f16 cache.

The f16 cache of each engine runs once and its distributions are kept on disk (`kvrun.evaluation.stored`); every other
row is measured against them, one after the other, llama.cpp's in a child process each. Where they cannot be kept, our
rows advance in lock step with f16. Every row says what is counted in its bits, and a control that must fail (1-bit
keys) stands among them: when it does not, the table is not to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrun import llamacpp
from kvrun.compare_settings import (
    BASELINE,
    LLAMA_SETTINGS,
    Setting,
    llama_baseline,
    observed_channels,
    our_settings,
    preset_settings,
    refused_row,
    settings_at_bytes,
)
from kvrun.evaluation.bootstrap import paired_difference
from kvrun.evaluation.breakdown import by_confidence, by_position
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.perplexity import Run, run_plans
from kvrun.evaluation.reference_cache import ReferenceCache
from kvrun.evaluation.stored import Recorder, StoredReference
from kvrun.evaluation.texts import MeasuredText
from kvrun.evaluation.windows import Windows
from kvrun.identity import code_digest, digest_of, model_digest, plan_digest, windows_digest
from kvrun.llamacpp import LlamaSetting
from kvrun.plan import CachePlan
from kvrun.result_file import Measured, ResultFile
from kvrun.results import ResultRow

if TYPE_CHECKING:
    from kvrun.engine import Engine
    from kvrun.recipe import Recipe

#: The control must be worse than f16 and kv4 by this factor in mean KL divergence.
CONTROL_FACTOR = 2.0

#: What the row of the engines' noise floor is measured against.
OTHER_ENGINE = "llama.cpp f16"

OTHER_READS = "the recipe was made for {} sinks and a window of {}"
SAME_TEXT = "the recipe was calibrated on the measured text, so its figures flatter it"


@dataclass(frozen=True)
class Progress:
    """Where a comparison is. what: the row in work.  done, total: windows of it."""

    what: str
    done: int
    total: int


def compare(
    engine: Engine,
    windows: Windows,
    text: MeasuredText,
    *,
    recipe: Recipe | None,
    n_threads: int,
    n_ubatch: int = 512,
    llama_settings: Sequence[LlamaSetting] | None = None,
    presets: bool = False,
    wanted: Sequence[Setting] | None = None,
    at_bytes: str | None = None,
    results: ResultFile | None = None,
    references: ReferenceCache | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[ResultRow]:
    """Measure every setting and yield a row for each as it is done, also for those that fail: they carry the reason.

    n_threads: of both engines; torch's own setting is the caller's to make.
    llama_settings: `LLAMA_SETTINGS` for None.
    presets: also the systems of `kvrun.presets`.
    wanted: rows of ours between f16 and kv4, with and without sinks and window, and the control; None for the usual.
    at_bytes: a type of llama.cpp's; also our types with the widest window that fits in the bytes it takes.
    results: rows that it holds are not measured again, others are added to it.
    references: where the distributions of f16 are kept; None keeps none.
    """
    geometry = engine.model.config.geometry
    if wanted is None:
        *settings, control = our_settings(geometry, recipe, observed_channels(engine, windows))
    else:
        f16, kept, bare, *_, control = our_settings(geometry, None)
        settings = [f16, kept, bare, *wanted]
    others, refused = preset_settings(geometry, recipe) if presets else ([], [])
    references = references or ReferenceCache(lambda text: None, limit_bytes=0)
    what = _Comparison(engine, windows, text, recipe, n_threads, n_ubatch, results, references, on_progress)
    reference = settings[0].plan
    yield from what.ours([*settings, *others, control], reference)
    facts = {"n_ctx": windows.n_ctx, "model": engine.model.file.path.name}
    for name, why in refused:
        yield refused_row(name, why, text=text.name, text_sha256=text.sha256, **facts)
    yield from what.llama_cpps(LLAMA_SETTINGS if llama_settings is None else llama_settings)
    if at_bytes is not None:
        fitted, too_large = settings_at_bytes(engine, windows.n_ctx, at_bytes, recipe)
        yield from what.ours(fitted, reference)
        for name, why in too_large:
            yield refused_row(name, why, text=text.name, text_sha256=text.sha256, **facts)


class _Comparison:
    """One text, one cut and both engines."""

    def __init__(
        self,
        engine: Engine,
        windows: Windows,
        text: MeasuredText,
        recipe: Recipe | None,
        n_threads: int,
        n_ubatch: int,
        results: ResultFile | None,
        references: ReferenceCache,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.engine, self.windows, self.text, self.recipe = engine, windows, text, recipe
        self.n_threads, self.n_ubatch = n_threads, n_ubatch
        self.results, self.references, self.on_progress = results, references, on_progress
        self._runs: dict[str, Run] = {}
        self._baselines: dict[tuple[str, int, int], np.ndarray] = {}
        self._others: dict[str, np.ndarray] = {}

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What all figures here depend on."""
        return {
            "model": model_digest(self.engine.model),
            "windows": windows_digest(self.windows),
            "n_threads": self.n_threads,
            "code": code_digest(),
        }

    @cached_property
    def _our_facts(self) -> dict[str, Any]:
        engine = self.engine
        rows = engine.model.weights.block_rows
        return self._facts | {
            "engine": engine.name,
            "dtype": str(engine.dtype),
            "rows": rows,
            "n_ubatch": self.n_ubatch,
        }

    def ours(self, settings: Sequence[Setting], f16: CachePlan) -> Iterator[ResultRow]:
        """A row for each setting, against `f16`."""
        prints = [
            self._fingerprint(self._our_facts | {"plan": plan_digest(s.plan), "row": [s.control, s.baseline, s.note]})
            for s in settings
        ]
        missing = [s.plan for s, p in zip(settings, prints, strict=True) if self._kept(p) is None]
        for setting, fingerprint in zip(settings, prints, strict=True):
            kept, baseline = self._kept(fingerprint), _baseline_of(setting)
            measured = self._measure(setting, f16, missing) if kept is None else self._paired(kept, baseline)
            row, plan = measured.row, setting.plan
            # The baseline is the first of its kind; what comes before it or is it has nothing to be paired with.
            if plan.type_k == plan.type_v and not row.error:
                self._baselines.setdefault((plan.type_k, plan.sinks, plan.window), measured.kld)
            yield self._done(fingerprint, measured)

    def _measure(self, setting: Setting, f16: CachePlan, missing: Sequence[CachePlan]) -> Measured:
        plan = setting.plan
        run = self._run(plan, f16, missing)
        row = run.row(
            model=self.engine.model.file.path.name,
            text=self.text,
            n_threads=self.n_threads,
            note="; ".join(filter(None, (setting.note, _note(plan, self.recipe, self.text)))),
            control=setting.control,
        )
        if row.error:
            return Measured(row, np.zeros(0))
        return self._complete(row, run.scores, _baseline_of(setting))

    def _run(self, plan: CachePlan, f16: CachePlan, missing: Sequence[CachePlan]) -> Run:
        """One plan against the reference on disk; against f16 beside it where that is not there yet.

        When it cannot be kept, all that is missing advances together, so that f16 runs once nevertheless.
        """
        name = plan_digest(plan)
        if name not in self._runs:
            key = digest_of(self._our_facts | {"reference": plan_digest(f16)})
            shape = self.windows.n_scored, self.engine.model.config.n_vocab
            stored = self.references.find(key, *shape)
            if stored is not None:
                self._keep([plan], f16 if plan is f16 else stored, None)
            else:
                recorder = self.references.recorder(key, *shape)
                self._keep([plan] if recorder is not None and not recorder.failed else missing, f16, recorder)
        return self._runs.pop(name)

    def _keep(
        self, plans: Sequence[CachePlan], reference: CachePlan | StoredReference, recorder: Recorder | None
    ) -> None:
        """Run plans, keep the runs until they are asked for, and write the reference if a recorder is given."""
        what = _name_of(plans[0]) if len(plans) == 1 else f"kvrun, {len(plans)} settings in lock step"
        n = len(self.windows)
        self.on_progress(Progress(what, 0, n))
        try:
            runs = run_plans(
                self.engine,
                self.windows,
                plans,
                reference=reference,
                n_ubatch=self.n_ubatch,
                on_window=lambda done, _: self.on_progress(Progress(what, done, n)),
                record=recorder,
            )
            if recorder is not None:
                recorder.finish()
        finally:
            if recorder is not None:
                recorder.discard()
        if recorder is not None and recorder.failed:
            self.references.limit_bytes = 0  # it was said; the rest goes on without
        self._runs.update({plan_digest(run.plan): run for run in runs})

    def llama_cpps(self, settings: Sequence[LlamaSetting]) -> Iterator[ResultRow]:
        """A row for each setting of llama.cpp's, and the noise floor where its f16 is among them."""
        for setting in settings:
            fingerprint = self._fingerprint({**self._facts, "engine": "llama.cpp", "setting": asdict(setting)})
            kept, is_f16 = self._kept(fingerprint), setting.type_k == setting.type_v == "f16"
            measured = self._measure_llama(setting) if kept is None else self._paired(kept, "" if is_f16 else BASELINE)
            if setting.rotate and not measured.row.error:
                self._others[llama_baseline(setting.type_k)] = measured.kld
            yield self._done(fingerprint, measured)
        if any(setting.type_k == setting.type_v == "f16" for setting in settings):
            yield self._noise_floor()

    def _llama_key(self) -> str:
        repack = llamacpp.extra_buffers_work(self.engine.model.file.path, self.n_threads)
        return digest_of({**self._facts, "reference": OTHER_ENGINE, "repack": repack})

    def _measure_llama(self, setting: LlamaSetting) -> Measured:
        is_f16 = setting.type_k == setting.type_v == "f16"
        rotation = "" if is_f16 else f" rotation {'on' if setting.rotate else 'off'}"
        what = f"llama.cpp {setting.type_k}{rotation}"
        self.on_progress(Progress(what, 0, len(self.windows)))
        model = self.engine.model
        key, shape = self._llama_key(), (self.windows.n_scored, model.config.n_vocab)
        stored = self.references.find(key, *shape)
        row, scores = llamacpp.measure_tokens(
            model.file.path,
            self.windows,
            setting,
            model.config.geometry,
            n_threads=self.n_threads,
            on_progress=lambda done, total: self.on_progress(Progress(what, done, total)),
            stored=None if stored is None or is_f16 else stored.path,
            record=None if stored is not None else self.references.reserve(key, *shape),
            say=self.references.say,
        )
        row = replace(row, model=model.file.path.name, text=self.text.name, text_sha256=self.text.sha256)
        return Measured(row, np.zeros(0)) if row.error else self._complete(row, scores, "" if is_f16 else BASELINE)

    def _noise_floor(self) -> ResultRow:
        """Our f16 against llama.cpp's: below it, differences between rows of the two engines mean nothing."""
        model = self.engine.model
        plan = our_settings(model.config.geometry, None)[0].plan
        fingerprint = self._fingerprint(self._our_facts | {"plan": plan_digest(plan), "against": OTHER_ENGINE})
        measured = self._kept(fingerprint)
        if measured is None:
            stored = self.references.find(self._llama_key(), self.windows.n_scored, model.config.n_vocab)
            run = None
            if stored is not None:
                self._keep([plan], stored, None)
                run = self._runs.pop(plan_digest(plan))
            facts: dict[str, Any] = {"model": model.file.path.name, "text": self.text, "n_threads": self.n_threads}
            run = run or Run(self.engine, plan, self.windows.n_ctx)
            row = replace(run.row(**facts), reference=OTHER_ENGINE)
            if stored is None:
                row = replace(row, error=f"not measured: there is no reference of {OTHER_ENGINE} on disk")
            measured = Measured(row, np.zeros(0)) if row.error else self._complete(row, run.scores, "")
        return self._done(fingerprint, measured)

    def _fingerprint(self, facts: dict[str, Any]) -> str:
        return digest_of(facts | {"text": self.text.sha256}) if self.results is not None else ""

    def _kept(self, fingerprint: str) -> Measured | None:
        return None if self.results is None else self.results.find(fingerprint)

    def _done(self, fingerprint: str, measured: Measured) -> ResultRow:
        if self.results is not None and self._kept(fingerprint) is None:
            self.results.add(fingerprint, measured)
        return measured.row

    def _complete(self, row: ResultRow, scores: TokenScores, baseline: str) -> Measured:
        """The row with its breakdowns and its difference from the baseline that keeps as much in full precision."""
        windows, kld = self.windows, scores.kld
        row = replace(
            row,
            kld_by_position=by_position(kld, windows.first, windows.n_scored // len(windows)),
            kld_by_confidence=by_confidence(kld, scores.confidence),
        )
        return self._paired(Measured(row, kld), baseline)

    def _paired(self, measured: Measured, baseline: str) -> Measured:
        """The row with its difference, also one that was kept when its baseline was not among the rows."""
        row, kld = measured.row, measured.kld
        other = self._baselines.get((baseline, row.sinks or 0, row.window or 0), self._others.get(baseline))
        found = None if row.baseline or other is None else paired_difference(kld, other)
        if found is None:
            return measured
        row = replace(
            row,
            baseline=baseline,
            kld_difference=found.mean,
            kld_difference_low=found.low,
            kld_difference_high=found.high,
        )
        return Measured(row, kld)


def _baseline_of(setting: Setting) -> str:
    """What a row is paired with; nothing for f16 and the control."""
    return setting.baseline if setting.plan.quantizes and not setting.control else ""


def _name_of(plan: CachePlan) -> str:
    kept = f", {plan.sinks} sinks, window {plan.window}" if plan.quantizes else ""
    return f"kvrun {plan.type_k}/{plan.type_v}{kept}"


def _note(plan: CachePlan, recipe: Recipe | None, text: MeasuredText) -> str:
    """What has to be known to read a recipe's row; empty for the others.

    Gradients are those of packed reads: a recipe that was made for a window knows nothing of what errors in the latest
    tokens do.
    """
    if recipe is None or not plan.recipe:
        return ""
    notes = [SAME_TEXT] if text.was_used_by(recipe) else []
    if (plan.sinks, plan.window) != (recipe.sinks, recipe.window):
        notes.append(OTHER_READS.format(recipe.sinks, recipe.window))
    return "; ".join(notes)


def control_complaint(rows: Sequence[ResultRow]) -> str:
    """Why the table is not to be trusted, empty when the control failed as it must.

    One-bit keys have to be worse than f16 and every row of 4 bits, by a factor and by more than chance. Rows that
    somebody asked for, of 2 bits for example, may be as bad: that says nothing about the measurement.
    """
    ours = [row for row in rows if row.engine == "kvrun" and row.kld_mean is not None and not row.reference]
    controls = [row for row in ours if row.control]
    if not controls:
        return "the control (1-bit keys) gave no figure: do not trust this table"
    others = [row for row in ours if not row.control and {row.type_k, row.type_v} <= {"f16", BASELINE}]
    for control in controls:
        for row in others:
            assert control.kld_mean is not None and row.kld_mean is not None
            margin = 3 * ((control.kld_mean_se or 0.0) ** 2 + (row.kld_mean_se or 0.0) ** 2) ** 0.5
            if control.kld_mean < max(CONTROL_FACTOR * row.kld_mean, row.kld_mean + margin):
                return (
                    f"control did not fail: 1-bit keys have a KL divergence of {control.kld_mean:.4f}, "
                    f"{row.type_k}/{row.type_v} has {row.kld_mean:.4f}: do not trust this table"
                )
    return ""
