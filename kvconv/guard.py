"""The guard: a finished recipe is measured on text that no choice has seen, and what makes it worse goes back.

Costs are predicted one head at a time; what all heads do together is measured, through the cache as decoding uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvkernels.spec import CUBIC_WIDTHS, QuantSpec, default_group
from kvkernels.transform import hadamard_block
from kvrun.cache_types import plan_for
from kvrun.compare_settings import hadamard
from kvrun.engine import Engine
from kvrun.evaluation.bootstrap import paired_difference
from kvrun.evaluation.perplexity import Run, run_plans
from kvrun.evaluation.windows import Windows
from kvrun.plan import CachePlan, HeadPlan, HeadTransform
from kvrun.recipe import Recipe

from .report import bits_per_value

if TYPE_CHECKING:
    from kvrun.models import Model

#: Parts into which the layers are cut, for keys and for values, before a part that hurts is cut further.
N_PARTS = 4
WIDTHS = (2, 3, 4, 5, 6, 8)

#: One side ("k" or "v") of one layer.
Unit = tuple[str, int]


@dataclass(frozen=True)
class Verdict:
    """What the guard found.  Divergences are means in nats per token over `n_scored` held-out positions.

    kld: of the recipe as it is handed back.  kld_before: as it came.
    uniform: the best setting of the same size with one storage for all heads, and its divergence; "" where none fits.
    reverted: sides of layers whose heads lost their transforms.  replaced: whether the uniform setting took its place.
    """

    n_scored: int
    kld: float
    kld_before: float
    uniform: str
    kld_uniform: float
    reverted: tuple[Unit, ...] = ()
    replaced: bool = False


def guard(
    model: Model,
    recipe: Recipe,
    windows: Windows,
    *,
    fixed: bool,
    on_progress: Callable[[float, int], None] | None = None,
) -> tuple[Recipe, Verdict]:
    """The recipe, or what is better on `windows`: with some sides of layers reverted, or the best uniform setting.

    fixed: whether widths were given for a side; a uniform setting then keeps to the size of each side by itself.
    on_progress: called with how many settings are measured and how many are to be, as far as is known.
    A part of the layers goes back to a plain rotation at the same widths where the recipe diverges less without its
    transforms, by more than a paired bootstrap leaves to chance; then the half of it that does as well, and so on.
    """
    measure = _Meter(model, recipe, windows, on_progress)
    rivals = uniform_settings(recipe, fixed=fixed)
    parts = [[(side, int(il)) for il in layers] for side in "kv" for layers in _parts(len(recipe.geometry))]
    candidates = [revert(recipe, part) for part in parts]
    first, *others = measure([recipe.plan(), *rivals.values(), *(r.plan() for r in candidates)])
    beside, after = others[: len(rivals)], others[len(rivals) :]
    best, best_kld = recipe, first
    reverted: list[Unit] = []
    # The part that does the most harm first: beside it, others may only seem to do some.
    for part, kld in sorted(zip(parts, after, strict=True), key=lambda pair: float(pair[1].mean())):
        if _better(kld, first):
            found = _narrow(measure, best, part)
            tried = revert(best, found)
            (kld,) = measure([tried.plan()])
            if _better(kld, best_kld):
                best, best_kld, reverted = tried, kld, [*reverted, *found]
    name, rival = min(
        zip(rivals, beside, strict=True), key=lambda pair: pair[1].mean(), default=("", np.array([np.nan]))
    )
    replaced = bool(rival.mean() < best_kld.mean())
    if replaced:
        best, best_kld = _as_recipe(recipe, rivals[name]), rival
    verdict = Verdict(
        n_scored=len(first),
        kld=float(best_kld.mean()),
        kld_before=float(first.mean()),
        uniform=name,
        kld_uniform=float(rival.mean()),
        reverted=() if replaced else tuple(reverted),
        replaced=replaced,
    )
    return best, verdict


def _parts(n_layer: int) -> list[np.ndarray]:
    return [part for part in np.array_split(np.arange(n_layer), N_PARTS) if len(part)]


class _Meter:
    """Divergence of plans, token by token, from the f16 cache on the held-out windows."""

    def __init__(
        self, model: Model, recipe: Recipe, windows: Windows, on_progress: Callable[[float, int], None] | None
    ) -> None:
        self.engine, self.windows, self.on_progress = Engine(model, dtype=model.dtype), windows, on_progress
        self.f16 = plan_for(recipe.geometry, "f16", "f16", recipe=None)
        self.done = 0

    def __call__(self, plans: Sequence[CachePlan]) -> list[np.ndarray]:
        total, n = self.done + len(plans), len(self.windows)

        def advance(window: int, runs: list[Run]) -> None:
            if self.on_progress is not None:
                self.on_progress(self.done + len(plans) * window / n, total)

        runs = run_plans(self.engine, self.windows, plans, reference=self.f16, on_window=advance)
        self.done = total
        for run in runs:
            run.check()
        return [np.asarray(run.scores.kld) for run in runs]


def _better(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether divergences `a` are smaller than `b` beyond chance."""
    difference = paired_difference(a, b)
    return difference is not None and difference.high < 0


def _narrow(measure: _Meter, recipe: Recipe, part: list[Unit]) -> list[Unit]:
    """The smallest part of `part`, by halves, whose reverting does as well as that of the whole."""
    (whole,) = measure([revert(recipe, part).plan()])
    while len(part) > 1:
        halves = part[: len(part) // 2], part[len(part) // 2 :]
        klds = measure([revert(recipe, half).plan() for half in halves])
        half, kld = min(zip(halves, klds, strict=True), key=lambda pair: pair[1].mean())
        if kld.mean() > whole.mean():
            break
        part, whole = half, kld
    return part


def revert(recipe: Recipe, units: Sequence[Unit]) -> Recipe:
    """The recipe with the heads of some sides of layers at their widths, rotated by a plain Hadamard matrix."""
    made = recipe.provenance
    sides, after = {"k": list(recipe.k), "v": list(recipe.v)}, {"k": list(made.k_after), "v": list(made.v_after)}
    for side, il in units:
        shape = recipe.geometry[il]
        dim = shape.head_dim_k if side == "k" else shape.head_dim_v
        sides[side][il] = tuple(HeadPlan(head.spec, _rotation(head.spec, dim)) for head in sides[side][il])
        # What it is expected to cost now was never asked; no more than without any transform, says the record.
        after[side][il] = getattr(made, f"{side}_before")[il]
    provenance = replace(made, k_after=tuple(after["k"]), v_after=tuple(after["v"]))
    return replace(recipe, k=tuple(sides["k"]), v=tuple(sides["v"]), provenance=provenance, version=0)


def _rotation(spec: QuantSpec, dim: int) -> HeadTransform:
    block = hadamard_block(dim) if spec.quantized else 0
    return HeadTransform(hadamard=block if block > 1 else 0)


def uniform_settings(recipe: Recipe, *, fixed: bool) -> dict[str, CachePlan]:
    """Settings no larger than the recipe in which all heads of a side are stored alike, by name.

    Uniform and cubic codes, the widest that fit, as they come and rotated.
    """
    bits = {side: bits_per_value(recipe, side if fixed else None) for side in "kv"}
    found: dict[str, CachePlan] = {}
    for code in ("uniform", "cubic"):
        dims = {"k": [g.head_dim_k for g in recipe.geometry], "v": [g.head_dim_v for g in recipe.geometry]}
        specs = {side: [_widest(code, dim, bits[side]) for dim in dims[side]] for side in "kv"}
        if None in specs["k"] or None in specs["v"]:
            continue
        k, v = (
            tuple((HeadPlan(spec),) * g.n_head_kv for spec, g in zip(specs[side], recipe.geometry, strict=True) if spec)
            for side in "kv"
        )
        plan = CachePlan(recipe.geometry, k, v, recipe.sinks, recipe.window)
        widths = dict.fromkeys(str(side[0][0].spec.bits) for side in (k, v))
        name = f"{'/'.join(widths)} bits {code}"
        found |= {name: plan, f"{name} rotated": hadamard(plan)}
    return found


def _widest(code: str, dim: int, bits: float) -> QuantSpec | None:
    if bits >= 16:
        return QuantSpec(16)
    group = default_group(dim) if code == "uniform" else dim
    widths = WIDTHS if code == "uniform" else CUBIC_WIDTHS
    specs = [QuantSpec(width, group, code=code) for width in widths]  # type: ignore[arg-type]
    return max((s for s in specs if s.bits_per_value(dim) <= bits + 1e-6), key=lambda s: s.bits, default=None)


def _as_recipe(recipe: Recipe, plan: CachePlan) -> Recipe:
    made = recipe.provenance
    provenance = replace(made, k_after=made.k_before, v_after=made.v_before)
    return replace(recipe, k=plan.k, v=plan.v, provenance=provenance, version=0)


def verdict_line(verdict: Verdict, n_pieces: int) -> str:
    """The verdict in a few sentences."""
    pieces = f"{n_pieces} held-out piece{'s' * (n_pieces != 1)} ({verdict.n_scored} positions)"
    parts = [f"guard: on {pieces} the recipe diverges by {verdict.kld_before:.4f} nats per token from the f16 cache"]
    if verdict.uniform:
        parts[0] += f"; the best plain setting of its size, {verdict.uniform}, by {verdict.kld_uniform:.4f}"
    if verdict.replaced:
        parts.append("The plain setting took its place")
    elif verdict.reverted:
        names = {"k": "keys", "v": "values"}
        listed = ", ".join(f"{names[side]} of layer {il}" for side, il in verdict.reverted)
        parts.append(f"Taken back to a plain rotation, which leaves {verdict.kld:.4f}: {listed}")
    else:
        parts.append("Nothing was taken back")
    return ". ".join(parts) + "."
