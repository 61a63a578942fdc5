"""Cache types by name: `f16`, `kv4`, ..., and `auto`, which is the recipe.

llama.cpp's names (`q4_0`, ...) mean llama.cpp's formats and are not accepted here; `kvrun compare` runs them in
llama.cpp. `emu-q4_0` and `emu-q8_0` are our emulation of two of them, the proof that both engines are measured alike:
the same blocks, the same rotation, no sinks and no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkernels.spec import GGML_BLOCKS, QuantSpec, default_group
from kvkernels.transform import hadamard_block

from .errors import KvError
from .plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry

if TYPE_CHECKING:
    from .recipe import Recipe

#: What `-ctk` and `-ctv` take.
TYPE_NAMES = ("f16", "kv8", "kv6", "kv5", "kv4", "kv3", "kv2", "auto")
#: One bit: no use but as the control that every comparison must see fail.
CONTROL_TYPE = "kv1"
#: llama.cpp's formats in our cache.
EMULATED_TYPES = ("emu-q4_0", "emu-q8_0")
LLAMACPP_TYPES = ("f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
DEFAULT_SINKS = 4
DEFAULT_WINDOW = 32


def spec_for(name: str, head_dim: int) -> QuantSpec:
    """Storage of a head of `head_dim` channels under a named type other than `auto`."""
    if name == "f16":
        return QuantSpec(16)
    return QuantSpec(int(name.removeprefix("kv")), default_group(head_dim))


def emulated_head(name: str, head_dim: int, which: str) -> HeadPlan:
    """Storage of a head under `emu-q4_0` or `emu-q8_0`, as llama.cpp stores it.

    which: "k" or "v".  The rotation is llama.cpp's (src/llama-kv-cache.cpp, pull request 21038): where 64 divides the
    head size, the largest Hadamard block that does for keys and 64 for values; none elsewhere.  Queries
    that meet such keys are rounded to q8_0 blocks (`kvrun.cache`), as llama.cpp's attention on the CPU does. It departs
    in one point: values and queries are rounded to f16 before they are quantized, as everything is in this cache.
    """
    code = name.removeprefix("emu-")
    bits, group = next(block for known, block in GGML_BLOCKS.items() if known == code)
    if head_dim % group:
        raise KvError(
            f"{name} needs heads of a multiple of {group} channels, as llama.cpp does; this one has {head_dim}"
        )
    block = 0 if head_dim % 64 else hadamard_block(head_dim) if which == "k" else 64
    return HeadPlan(QuantSpec(bits, group, code=code), HeadTransform(hadamard=block))  # type: ignore[arg-type]


def check_type(name: str) -> None:
    """Raise KvError with advice where `name` is not a cache type."""
    if name in TYPE_NAMES or name == CONTROL_TYPE or name in EMULATED_TYPES:
        return
    ours = ", ".join(TYPE_NAMES)
    if name in LLAMACPP_TYPES:
        raise KvError(f"{name} is a format of llama.cpp, which kvrun compare runs; for kvrun choose one of {ours}")
    raise KvError(f"unknown cache type {name!r}; choose one of {ours}")


def plan_for(
    geometry: Sequence[LayerGeometry],
    type_k: str,
    type_v: str,
    *,
    recipe: Recipe | None,
    sinks: int | None = None,
    window: int | None = None,
) -> CachePlan:
    """The plan of a cache whose keys are `type_k` and whose values are `type_v`.

    sinks, window: in tokens; None takes the recipe's, or 4 and 32, or 0 and 0 where nothing is quantized and where
    llama.cpp is emulated, which has neither.
    Raises KvError for an unknown name, for `auto` without a recipe, and where a type cannot store the model's heads.
    """
    check_type(type_k)
    check_type(type_v)
    if "auto" in (type_k, type_v) and recipe is None:
        raise KvError("cache type auto needs a recipe and this model has none; run kvconv calibrate, or choose kv4")

    def side(name: str, which: str) -> tuple[tuple[HeadPlan, ...], ...]:
        if name == "auto":
            assert recipe is not None
            return recipe.k if which == "k" else recipe.v
        layers = []
        for shape in geometry:
            dim = shape.head_dim_k if which == "k" else shape.head_dim_v
            head = emulated_head(name, dim, which) if name in EMULATED_TYPES else HeadPlan(spec_for(name, dim))
            try:
                head.spec.check_head_dim(dim)
            except ValueError as error:
                raise KvError(f"{name} cannot store this model: {error}; use f16") from error
            layers.append((head,) * shape.n_head_kv)
        return tuple(layers)

    uses_recipe = recipe is not None and "auto" in (type_k, type_v)
    protects = any(name not in ("f16", *EMULATED_TYPES) for name in (type_k, type_v))
    if sinks is None:
        sinks = recipe.sinks if uses_recipe and recipe else DEFAULT_SINKS if protects else 0
    if window is None:
        window = recipe.window if uses_recipe and recipe else DEFAULT_WINDOW if protects else 0
    return CachePlan(
        geometry=tuple(geometry),
        k=side(type_k, "k"),
        v=side(type_v, "v"),
        sinks=sinks,
        window=window,
        type_k=type_k,
        type_v=type_v,
        recipe=recipe.digest() if uses_recipe and recipe else "",
    )
