"""What a cache type costs in quality, to stand beside its speed: KL divergence from f16 on a few windows of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvrun import llamacpp
from kvrun.cache_types import plan_for
from kvrun.engines import choose_engine
from kvrun.evaluation.perplexity import run_plans
from kvrun.llamacpp import LlamaSetting

if TYPE_CHECKING:
    from kvrun.bench import BenchRow, Setting
    from kvrun.commands.common import Session
    from kvrun.evaluation.texts import MeasuredText
    from kvrun.evaluation.windows import Windows
    from kvrun.results import ResultRow

_Key = tuple[str, str, str, str]


def with_quality(
    rows: Sequence[BenchRow],
    settings: Sequence[Setting],
    session: Session,
    windows: Windows,
    text: MeasuredText,
    *,
    n_threads: int,
) -> list[BenchRow]:
    """The rows with the KL divergence of their cache type, measured on the engine that was timed against its own f16.

    Where it cannot be measured the row has none and keeps its speed; the reason stands in `kld_text`.
    """
    found: dict[_Key, ResultRow] = {}
    geometry, path = session.plan.geometry, session.model.file.path
    f16 = plan_for(geometry, "f16", "f16", recipe=None)
    for impl in dict.fromkeys(s.impl for s in settings if s.plan is not None):
        ours = [s for s in settings if s.plan is not None and s.impl == impl]
        engine, _ = choose_engine(impl, session.model, n_threads=n_threads)
        runs = run_plans(engine, windows, [s.plan for s in ours if s.plan is not None], reference=f16)
        for setting, run in zip(ours, runs, strict=True):
            found[_key(setting)] = run.row(model=path.name, text=text, n_threads=n_threads)
    for setting in settings:
        if setting.plan is None and _key(setting) not in found:
            llama = LlamaSetting(setting.type_k, setting.type_v)
            found[_key(setting)] = llamacpp.measure(path, windows, llama, geometry, n_threads=n_threads)

    def add(row: BenchRow) -> BenchRow:
        measured = found[_key(row)]
        if measured.error:
            return replace(row, kld_text=f"none: {measured.error}")
        return replace(row, kld_mean=measured.kld_mean, kld_mean_se=measured.kld_mean_se, kld_text=text.name)

    return [add(row) for row in rows]


def _key(x: Setting | BenchRow) -> _Key:
    return x.engine, x.impl, x.type_k, x.type_v
