"""The comparison: our cache types and llama.cpp's on the same tokens, each against its own engine's f16 cache.

Ours advance in lock step through one engine; llama.cpp's run in a child process each. Every row says what is counted
in its bits, and a control that must fail (1-bit keys) stands among them: when it does not, the table is not to be
trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvkernels.transform import hadamard_block
from kvrun import llamacpp
from kvrun.cache_types import CONTROL_TYPE, plan_for
from kvrun.evaluation.bootstrap import paired_difference
from kvrun.evaluation.perplexity import Run, run_plans
from kvrun.evaluation.texts import MeasuredText
from kvrun.evaluation.windows import Windows
from kvrun.llamacpp import LlamaSetting
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.results import ResultRow

if TYPE_CHECKING:
    from kvrun.engine import Engine
    from kvrun.recipe import Recipe

#: llama.cpp's settings: f16, and each quantized type with its rotation on and off.
LLAMA_SETTINGS = (
    LlamaSetting("f16", "f16"),
    *(LlamaSetting(t, t, rotate) for t in ("q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl") for rotate in (True, False)),
)

#: What our rows are paired with: 4 bits, heads as they come.
BASELINE = "kv4"

#: The control must be worse than every other row of ours by this factor in mean KL divergence.
CONTROL_FACTOR = 2.0

OTHER_READS = "the recipe was made for {} sinks and a window of {}"
SAME_TEXT = "the recipe was calibrated on the measured text, so its figures flatter it"


@dataclass(frozen=True)
class Setting:
    """One row of ours. control: it must fail."""

    plan: CachePlan
    control: bool = False


def our_settings(geometry: Sequence[LayerGeometry], recipe: Recipe | None) -> list[Setting]:
    """f16, 4 bits with heads as they come, the same rotated by a Hadamard matrix, the recipe, and the control.

    What quantizes stands there twice, with and without sinks and window: llama.cpp has none, and a window alone can
    hide what a quantizer does.
    """
    f16 = plan_for(geometry, "f16", "f16", recipe=None)
    identity = [plan_for(geometry, BASELINE, BASELINE, recipe=None)]
    identity.append(plan_for(geometry, BASELINE, BASELINE, recipe=None, sinks=0, window=0))
    plans = [f16, *identity, *map(hadamard, identity)]
    if recipe is not None:
        plans.append(plan_for(geometry, "auto", "auto", recipe=recipe))
        if recipe.sinks or recipe.window:
            plans.append(plan_for(geometry, "auto", "auto", recipe=recipe, sinks=0, window=0))
    control = plan_for(geometry, CONTROL_TYPE, "f16", recipe=None, sinks=0, window=0)
    return [*(Setting(plan) for plan in plans), Setting(control, control=True)]


def hadamard(plan: CachePlan) -> CachePlan:
    """The plan with keys and values rotated by the largest Hadamard matrix that divides the head, as QuaRot does."""

    def rotated(head: HeadPlan, dim: int) -> HeadPlan:
        block = hadamard_block(dim)
        return replace(head, transform=HeadTransform(hadamard=block)) if block > 1 else head

    shapes = plan.geometry
    return replace(
        plan,
        k=tuple(tuple(rotated(h, g.head_dim_k) for h in layer) for layer, g in zip(plan.k, shapes, strict=True)),
        v=tuple(tuple(rotated(h, g.head_dim_v) for h in layer) for layer, g in zip(plan.v, shapes, strict=True)),
    )


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
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Iterator[ResultRow]:
    """Measure every setting and yield a row for each, also for those that fail: they carry the reason.

    n_threads: of both engines; torch's own setting is the caller's to make.
    llama_settings: `LLAMA_SETTINGS` for None.
    """
    geometry = engine.model.config.geometry
    path = engine.model.file.path
    settings = our_settings(geometry, recipe)
    plans = [setting.plan for setting in settings]
    what = f"kvrun, {len(plans)} settings in lock step"
    on_progress(Progress(what, 0, len(windows)))
    runs = run_plans(
        engine,
        windows,
        plans,
        reference=plans[0],
        n_ubatch=n_ubatch,
        on_window=lambda done, _: on_progress(Progress(what, done, len(windows))),
    )
    for setting, run in zip(settings, runs, strict=True):
        note = _note(setting.plan, recipe, text)
        row = run.row(model=path.name, text=text, n_threads=n_threads, note=note, control=setting.control)
        yield row if row.error or setting.control else _paired(row, run, runs)
    for llama in LLAMA_SETTINGS if llama_settings is None else llama_settings:
        yield _llama_row(engine, windows, text, llama, n_threads, on_progress)


def _paired(row: ResultRow, run: Run, runs: Sequence[Run]) -> ResultRow:
    """The row with its difference from the baseline that keeps as much in full precision, where there is one."""
    for other in runs:
        plan = other.plan
        same = (plan.type_k, plan.type_v, plan.sinks, plan.window) == (BASELINE, BASELINE, row.sinks, row.window)
        if not same or other.failure is not None:
            continue
        # The baseline is the first of its kind; what comes before it or is it has nothing to be paired with.
        found = None if other is run or not run.plan.quantizes else paired_difference(run.scores.kld, other.scores.kld)
        if found is None:
            return row
        return replace(
            row,
            baseline=BASELINE,
            kld_difference=found.mean,
            kld_difference_low=found.low,
            kld_difference_high=found.high,
        )
    return row


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


def _llama_row(
    engine: Engine,
    windows: Windows,
    text: MeasuredText,
    setting: LlamaSetting,
    n_threads: int,
    on_progress: Callable[[Progress], None],
) -> ResultRow:
    rotation = "" if setting.type_k == "f16" else f" rotation {'on' if setting.rotate else 'off'}"
    what = f"llama.cpp {setting.type_k}{rotation}"
    on_progress(Progress(what, 0, len(windows)))
    row = llamacpp.measure(
        engine.model.file.path,
        windows,
        setting,
        engine.model.config.geometry,
        n_threads=n_threads,
        on_progress=lambda done, total: on_progress(Progress(what, done, total)),
    )
    return replace(row, model=engine.model.file.path.name, text=text.name, text_sha256=text.sha256)


def control_complaint(rows: Sequence[ResultRow]) -> str:
    """Why the table is not to be trusted, empty when the control failed as it must.

    One-bit keys have to be worse than every other row of ours by a factor and by more than chance.
    """
    ours = [row for row in rows if row.engine == "kvrun" and row.kld_mean is not None]
    controls = [row for row in ours if row.control]
    if not controls:
        return "the control (1-bit keys) gave no figure: do not trust this table"
    others = [row for row in ours if not row.control]
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
