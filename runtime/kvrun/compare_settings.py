"""What a comparison measures: the rows of ours and llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvkernels.spec import QuantSpec, default_group
from kvkernels.transform import hadamard_block
from kvrun.cache_types import CONTROL_TYPE, plan_for
from kvrun.errors import KvError
from kvrun.llamacpp import BLOCKS, LlamaSetting, ggml_type
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.presets import preset_names, preset_plan
from kvrun.results import ResultRow

if TYPE_CHECKING:
    from torch import Tensor

    from kvrun.engine import Engine
    from kvrun.evaluation.windows import Windows
    from kvrun.recipe import Recipe

#: llama.cpp's settings: f16, and each quantized type with its rotation on and off.
LLAMA_SETTINGS = (
    LlamaSetting("f16", "f16"),
    *(LlamaSetting(t, t, rotate) for t in ("q8_0", "q5_1", "q4_1", "q4_0", "iq4_nl") for rotate in (True, False)),
)

#: What our rows are paired with: 4 bits, heads as they come.
BASELINE = "kv4"

FROM_RECIPE = "{} of the recipe"
FROM_TEXT = "{} of the first window's half that is not scored"


@dataclass(frozen=True)
class Setting:
    """One row of ours.

    control: it must fail.  baseline: type of the row with the same sinks and window that it is paired with.
    note: what has to be known to read it.
    """

    plan: CachePlan
    control: bool = False
    baseline: str = BASELINE
    note: str = ""


@dataclass(frozen=True)
class Channels:
    """What plain rows are made of: mean of the keys and range of keys and values, float32 [layer][head, channel]."""

    k_mean: list[np.ndarray]
    k_range: list[np.ndarray]
    v_range: list[np.ndarray]


def observed_channels(engine: Engine, windows: Windows) -> Channels:
    """Of the first half of the first window: none of its positions is scored, and no other text is needed."""
    found = Channels([], [], [])

    def see(il: int, k: Tensor, v: Tensor) -> None:
        found.k_mean.append(k.double().mean(1).float().numpy())
        for ranges, x in ((found.k_range, k), (found.v_range, v)):
            ranges.append((x.amax(1) - x.amin(1)).float().numpy())

    engine.observe(windows.tokens[0, : windows.first].tolist(), windows.n_ctx, see)
    return found


def our_settings(
    geometry: Sequence[LayerGeometry], recipe: Recipe | None, channels: Channels | None = None
) -> list[Setting]:
    """f16, 4 bits with heads as they come, the same rotated by a Hadamard matrix, the recipe, and the control.

    What quantizes stands there twice, with and without sinks and window: llama.cpp has none, and a window alone can
    hide what a quantizer does. With `channels` also what each part of a recipe does alone, without sinks and window.
    """
    f16 = plan_for(geometry, "f16", "f16", recipe=None)
    identity = [plan_for(geometry, BASELINE, BASELINE, recipe=None)]
    identity.append(plan_for(geometry, BASELINE, BASELINE, recipe=None, sinks=0, window=0))
    settings = [Setting(plan) for plan in (f16, *identity, *map(hadamard, identity))]
    if channels is not None:
        settings += [offset_only(identity[1], recipe, channels), *order_only(identity[1], recipe, channels)]
    if recipe is not None:
        settings.append(Setting(plan_for(geometry, "auto", "auto", recipe=recipe)))
        if recipe.sinks or recipe.window:
            settings.append(Setting(plan_for(geometry, "auto", "auto", recipe=recipe, sinks=0, window=0)))
    control = plan_for(geometry, CONTROL_TYPE, "f16", recipe=None, sinks=0, window=0)
    return [*settings, Setting(control, control=True)]


def preset_settings(
    geometry: Sequence[LayerGeometry], recipe: Recipe | None
) -> tuple[list[Setting], list[tuple[str, str]]]:
    """Every preset that quantizes, and (name, reason) of those that cannot be had for this model or recipe."""
    settings, refused = [], []
    for name in preset_names():
        try:
            plan = preset_plan(name, geometry, recipe)
        except KvError as error:
            refused.append((name, str(error)))
            continue
        if plan.quantizes:
            settings.append(Setting(plan))
    return settings, refused


def llama_baseline(name: str) -> str:
    """What rows are paired with that take as many bytes as llama.cpp's type `name`, rotated as by its default."""
    return f"llama.cpp {name}"


def settings_at_bytes(
    engine: Engine, n_ctx: int, name: str, recipe: Recipe | None
) -> tuple[list[Setting], list[tuple[str, str]]]:
    """Our types with the widest window that fits in what llama.cpp's type `name` takes for `n_ctx` tokens.

    Cells that llama.cpp adds to round its context up, or to a sliding window, are not counted.  Sinks are the type's
    own, or none where they do not fit.  Returns the settings, and (type, reason) for those that do not fit at all;
    widths above the wanted one are left out.  Raises KvError for a type that llama.cpp does not have.
    """
    geometry = engine.model.config.geometry
    ggml_type(name)
    values, block_bytes = BLOCKS[name]
    n_values = sum(min(n_ctx, g.sliding or n_ctx) * g.n_head_kv * (g.head_dim_k + g.head_dim_v) for g in geometry)
    limit = n_values // values * block_bytes
    found: list[Setting] = []
    refused: list[tuple[str, str]] = []
    for ours in ("auto", "kv8", "kv6", "kv5", "kv4", "kv3", "kv2"):
        if ours == "auto" and recipe is None:
            continue

        def sized(sinks: int | None, window: int, ours: str = ours) -> tuple[int, CachePlan]:
            plan = plan_for(geometry, ours, ours, recipe=recipe, sinks=sinks, window=window)
            return engine.new_cache(plan, n_ctx).n_bytes, plan

        sinks = next((s for s in (None, 0) if sized(s, 0)[0] <= limit), -1)
        if sinks == -1:
            if ours == "auto":
                refused.append((ours, f"the recipe takes more than the {limit} bytes of {name} without any window"))
            continue
        low, high = 0, n_ctx
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sized(sinks, middle)[0] <= limit else (low, middle)
        note = f"the widest window within the {limit} bytes of {name}"
        found.append(Setting(sized(sinks, low)[1], baseline=llama_baseline(name), note=note))
    return found, refused


def refused_row(name: str, why: str, **facts: object) -> ResultRow:
    """The row of a preset that cannot be had."""
    return ResultRow("kvrun", name, name, error=why, **facts)  # type: ignore[arg-type]


def offset_only(plan: CachePlan, recipe: Recipe | None, channels: Channels) -> Setting:
    """The plan with an offset of the keys and nothing else.

    The recipe's offsets where it has any, on the heads that have one; else each channel's mean after RoPE.
    """
    ours = _from_recipe(recipe, lambda t: t.offset is not None)
    source = (FROM_TEXT if ours is None else FROM_RECIPE).format("offset")

    def with_offset(head: HeadPlan, il: int, ih: int) -> HeadPlan:
        if ours is None:
            return replace(head, transform=HeadTransform(offset=channels.k_mean[il][ih]))
        theirs = ours.k[il][ih].transform
        return replace(head, transform=HeadTransform(offset=theirs.offset, rotating=theirs.rotating))

    k = _each(plan.k, with_offset)
    return Setting(replace(plan, k=k, type_k=f"{plan.type_k}+offset"), note=source)


def order_only(plan: CachePlan, recipe: Recipe | None, channels: Channels) -> list[Setting]:
    """The plan in groups of half a head, as it comes and with channels in an order; nothing where that is no group.

    Where a group is the whole head an order changes nothing, so this has a baseline of its own. The recipe's orders
    where it has any, on the heads that have one; else channels by their range, the narrowest first.
    """
    ours = _from_recipe(recipe, lambda t: t.order is not None)
    source = (FROM_TEXT if ours is None else FROM_RECIPE).format("order")
    groups = {default_group(d, d // 2) for g in plan.geometry for d in (g.head_dim_k, g.head_dim_v)}
    if any(group >= min(g.head_dim_k, g.head_dim_v) for group in groups for g in plan.geometry):
        return []

    def halved(dims: Sequence[int]) -> Callable[[HeadPlan, int, int], HeadPlan]:
        return lambda head, il, ih: replace(
            head, spec=QuantSpec(head.spec.bits, default_group(dims[il], dims[il] // 2))
        )

    def ordered(heads: tuple[tuple[HeadPlan, ...], ...] | None, ranges: list[np.ndarray]) -> Callable[..., HeadPlan]:
        def order(head: HeadPlan, il: int, ih: int) -> HeadPlan:
            found = np.argsort(ranges[il][ih], kind="stable").astype(np.uint16)
            return replace(
                head, transform=HeadTransform(order=found if heads is None else heads[il][ih].transform.order)
            )

        return order

    name = f"{plan.type_k}-g" + "+".join(map(str, sorted(groups)))
    k = _each(plan.k, halved([g.head_dim_k for g in plan.geometry]))
    v = _each(plan.v, halved([g.head_dim_v for g in plan.geometry]))
    plain = replace(plan, k=k, v=v, type_k=name, type_v=name)
    k = _each(k, ordered(None if ours is None else ours.k, channels.k_range))
    v = _each(v, ordered(None if ours is None else ours.v, channels.v_range))
    both = replace(plain, k=k, v=v, type_k=f"{name}+order", type_v=f"{name}+order")
    return [Setting(plain), Setting(both, baseline=name, note=source)]


def _from_recipe(recipe: Recipe | None, has: Callable[[HeadTransform], bool]) -> Recipe | None:
    """The recipe if any of its heads has such a transform."""
    if recipe is None:
        return None
    return recipe if any(has(h.transform) for side in (recipe.k, recipe.v) for layer in side for h in layer) else None


def _each(
    heads: tuple[tuple[HeadPlan, ...], ...], change: Callable[[HeadPlan, int, int], HeadPlan]
) -> tuple[tuple[HeadPlan, ...], ...]:
    return tuple(tuple(change(h, il, ih) for ih, h in enumerate(layer)) for il, layer in enumerate(heads))


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
