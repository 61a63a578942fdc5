"""Size against divergence: recipes of several budgets, measured on held-out text beside plain settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvrun.cache_types import EMULATED_TYPES, plan_for
from kvrun.compare_settings import hadamard
from kvrun.engine import Engine
from kvrun.errors import KvError
from kvrun.evaluation.perplexity import Run, run_plans
from kvrun.evaluation.windows import Windows
from kvrun.plan import CachePlan
from kvrun.tables import Column

from .calibrate import Offers, Sample, Settings, spread
from .report import bits_per_value

if TYPE_CHECKING:
    from kvrun.models import Model

#: Budgets in bits per value, scales and minima included; those below the narrowest storage are left out.
BUDGETS = (2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0)
PLAIN = ("kv2", "kv3", "kv4", "kv5", "kv6", "kv8")
COLUMNS = (
    Column("setting"),
    Column("bits", "bits", ".2f"),
    Column("kld_mean", "KLD mean", ".5f"),
    Column("kld_mean_se", "±", ".5f"),
    Column("kld_p99", "KLD p99", ".4f"),
    Column("same_top", "same top", ".4f"),
    Column("best", "best of its size"),
)
NOTE = (
    "bits: per packed value, with scales and minima. KLD: nats per token from the f16 cache on the held-out pieces. "
    "best of its size: nothing that is no larger diverges less. llama.cpp's types are emulated, with its rotation and "
    "without sinks and window; all else keeps those of the recipe."
)


@dataclass(frozen=True)
class Point:
    """One setting on the plane."""

    setting: str
    bits: float
    plan: CachePlan


def points(model: Model, sample: Sample, settings: Settings, offers: Offers) -> list[Point]:
    """Recipes of every budget, plain types as they come and rotated, and llama.cpp's, smallest first."""
    found = []
    for bits in BUDGETS:
        try:
            recipe = spread(model, sample, replace(settings, bits=bits, shared=True), offers)
        except KvError:
            continue  # a budget that the narrowest storage of every head exceeds
        found.append(Point(f"recipe of {bits:g} bits", bits_per_value(recipe.plan()), recipe.plan()))
    geometry, kept = model.config.geometry, {"sinks": settings.sinks, "window": settings.window}
    for name in PLAIN:
        plan = plan_for(geometry, name, name, recipe=None, **kept)
        found.append(Point(name, bits_per_value(plan), plan))
        found.append(Point(f"{name} rotated", bits_per_value(plan), hadamard(plan)))
    for name in EMULATED_TYPES:
        try:
            plan = plan_for(geometry, name, name, recipe=None)
        except KvError:
            continue  # heads that llama.cpp's blocks do not divide
        found.append(Point(f"llama.cpp {name.removeprefix('emu-')}", bits_per_value(plan), plan))
    return sorted(found, key=lambda point: point.bits)


def measure(
    model: Model, windows: Windows, tried: Sequence[Point], on_window: Callable[[int], None] | None = None
) -> list[dict[str, Any]]:
    """A row for each point: setting, bits, best, and what `kvrun.evaluation.metrics.Summary` holds; or the error.

    on_window: called with the number of windows that all points have been through.
    """
    engine = Engine(model, dtype=model.dtype)
    f16 = plan_for(model.config.geometry, "f16", "f16", recipe=None)

    def advance(done: int, runs: list[Run]) -> None:
        if on_window is not None:
            on_window(done)

    runs = run_plans(engine, windows, [point.plan for point in tried], reference=f16, on_window=advance)
    rows: list[dict[str, Any]] = []
    least = float("inf")
    for point, run in zip(tried, runs, strict=True):
        row: dict[str, Any] = {"setting": point.setting, "bits": point.bits}
        try:
            run.check()
            row |= asdict(run.scores.summary())
        except KvError as error:
            row["error"] = str(error)
        rows.append(row)
    for bits in sorted({point.bits for point in tried}):
        alike = [row for row in rows if row["bits"] == bits and "error" not in row]
        first = min(alike, key=lambda row: float(row["kld_mean"]), default=None)
        for row in alike:
            row["best"] = row is first and row["kld_mean"] < least
        least = min([least, *(float(row["kld_mean"]) for row in alike)])
    return rows
