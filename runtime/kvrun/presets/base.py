"""What a preset is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkernels.spec import QuantSpec

from ..errors import KvError
from ..plan import CachePlan, HeadPlan, LayerGeometry

if TYPE_CHECKING:
    from ..recipe import Recipe

#: Storage of a head of so many channels.
MakeHead = Callable[[int], HeadPlan]


@dataclass(frozen=True)
class Preset:
    """A system under its name, with keys and values that are stored alike in all heads.

    k, v: the plan of a head, from its size in channels.  sinks, window: in tokens.
    recipe_method: the objective of the recipe whose heads stand in for `k` and `v`; such
        a preset cannot do without.  recipe_command: what makes such a recipe.
    """

    name: str
    k: MakeHead
    v: MakeHead
    sinks: int = 0
    window: int = 0
    recipe_method: str = ""
    recipe_command: str = ""

    def plan(self, geometry: tuple[LayerGeometry, ...], recipe: Recipe | None) -> CachePlan:
        """The cache for a model; KvError where a head cannot be stored this way, and without its recipe."""
        k = tuple((self.k(shape.head_dim_k),) * shape.n_head_kv for shape in geometry)
        v = tuple((self.v(shape.head_dim_v),) * shape.n_head_kv for shape in geometry)
        digest = ""
        if self.recipe_method:
            made = None if recipe is None else recipe.provenance.objective
            if recipe is None or made != self.recipe_method:
                found = "there is no recipe" if recipe is None else f"this one was made for {made}"
                raise KvError(
                    f"preset {self.name} needs a recipe made by `{self.recipe_command}`, {found}; name it with --recipe"
                )
            k, v, digest = recipe.k, recipe.v, recipe.digest()
        try:
            return CachePlan(geometry, k, v, self.sinks, self.window, self.name, self.name, digest)
        except ValueError as error:
            raise KvError(f"preset {self.name} cannot store this model: {error}; use another") from error


def head_group(head_dim: int, wanted: int) -> int:
    """Channels of a group: `wanted` where it divides the head, else the whole head."""
    return wanted if head_dim % wanted == 0 else head_dim


def plain(bits: int, group: int) -> MakeHead:
    """Heads of uniform codes in groups of `group` channels of one token, as they come."""
    return lambda head_dim: HeadPlan(QuantSpec(bits, head_group(head_dim, group)))


def by_channel(bits: int, group: int) -> MakeHead:
    """Heads of uniform codes in groups of `group` tokens of one channel, as they come."""
    return lambda head_dim: HeadPlan(QuantSpec(bits, group, "channel"))
