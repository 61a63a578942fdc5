"""What a comparison measures: the rows of ours and llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvkernels.transform import hadamard_block
from kvrun.cache_types import CONTROL_TYPE, plan_for
from kvrun.llamacpp import LlamaSetting
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry

if TYPE_CHECKING:
    from kvrun.recipe import Recipe

#: llama.cpp's settings: f16, and each quantized type with its rotation on and off.
LLAMA_SETTINGS = (
    LlamaSetting("f16", "f16"),
    *(LlamaSetting(t, t, rotate) for t in ("q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl") for rotate in (True, False)),
)

#: What our rows are paired with: 4 bits, heads as they come.
BASELINE = "kv4"


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
