"""The systems that the field compares with, as caches of ours: one small file per system, found by itself.

Each file's docstring names the paper and its settings, and says where ours departs. All of them obey our visibility
rule (`kvrun.visibility`) and our transforms act after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from ..errors import KvError
from ..plan import CachePlan, LayerGeometry
from .base import Preset

if TYPE_CHECKING:
    from ..recipe import Recipe

__all__ = ["Preset", "preset_names", "preset_plan", "presets"]


@cache
def presets() -> dict[str, Preset]:
    """Every preset in this folder, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [module.PRESET for module in modules if hasattr(module, "PRESET")]
    return {preset.name: preset for preset in found}


def preset_names() -> tuple[str, ...]:
    """Names of all presets, in alphabetical order."""
    return tuple(sorted(presets()))


def preset_plan(name: str, geometry: Sequence[LayerGeometry], recipe: Recipe | None = None) -> CachePlan:
    """The cache of the preset `name` for a model of this geometry.

    recipe: what `skvq` and `skvq-safe` take their channel orders from; the others need none and ignore it.
    Raises KvError for an unknown name, for a missing recipe or one of another method, and for a model whose heads
    cannot be stored this way.
    """
    preset = presets().get(name)
    if preset is None:
        raise KvError(f"unknown preset {name!r}; choose one of {', '.join(preset_names())}")
    try:
        return preset.plan(tuple(geometry), recipe)
    except ValueError as error:
        raise KvError(f"preset {name} does not fit this model: {error}") from error
