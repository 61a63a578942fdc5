"""What a cache is made of: for every layer, KV head and side, a transform and a storage; plus sinks and window.

A plan is a value. It comes from a recipe (`kvrun.recipe`) or from the name of a cache type (`kvrun.cache_types`), and a
cache (`kvrun.cache`) is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvkernels.spec import QuantSpec


@dataclass(frozen=True, eq=False)
class HeadTransform:
    """The invertible map `x -> T (x - offset)` that one side of one KV head is stored under, applied after RoPE.

    order: uint16 [head_dim], a permutation: stored channel `i` is the model's channel `order[i]`; None keeps the order.
    hadamard: block size of a normalized Hadamard matrix applied after the order, a power of two that divides the head
        size; 0 is none.
    matrix: float32 [head_dim, head_dim], a learned `T` in place of order and Hadamard.
    offset: float32 [head_dim], subtracted before `T` (keys only: softmax does not see it).
    rotating: the offset is in terms of keys before RoPE and turns with the position of each key
        (`kvkernels.rope_offset`).
    """

    order: np.ndarray | None = None
    hadamard: int = 0
    matrix: np.ndarray | None = None
    offset: np.ndarray | None = None
    rotating: bool = False

    def __post_init__(self) -> None:
        if self.rotating and self.offset is None:
            raise ValueError("a rotating offset needs an offset")

    @property
    def is_identity(self) -> bool:
        """Whether values are stored as the model made them."""
        return self.order is None and not self.hadamard and self.matrix is None and self.offset is None

    @property
    def name(self) -> str:
        """Short name for tables, such as `identity`, `offset+hadamard64`, `rotating offset+order+hadamard32`."""
        parts = []
        if self.offset is not None:
            parts.append("rotating offset" if self.rotating else "offset")
        if self.matrix is not None:
            parts.append("matrix")
        if self.order is not None:
            parts.append("order")
        if self.hadamard:
            parts.append(f"hadamard{self.hadamard}")
        return "+".join(parts) or "identity"


@dataclass(frozen=True)
class HeadPlan:
    """Storage, transform and clip of one side of one KV head.

    clip: the group's range is narrowed around its middle by this factor before quantizing, 0 < clip <= 1.
    """

    spec: QuantSpec
    transform: HeadTransform = field(default_factory=HeadTransform)
    clip: float = 1.0


@dataclass(frozen=True)
class LayerGeometry:
    """Shape of one layer's cache: KV heads and the channels of a key and of a value head.

    sliding: latest tokens that a query sees, itself among them; 0 is all.
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    sliding: int = 0


@dataclass(frozen=True)
class CachePlan:
    """The whole cache.

    geometry: per layer.  k, v: `[layer][kv head]`.
    sinks: first tokens that stay in full precision.  window: latest tokens that stay in full precision.
    type_k, type_v: the names the user gave (`f16`, `kv4`, `auto`, ...), for tables.
    recipe: short hash of the recipe the plan came from, empty when there is none.
    """

    geometry: tuple[LayerGeometry, ...]
    k: tuple[tuple[HeadPlan, ...], ...]
    v: tuple[tuple[HeadPlan, ...], ...]
    sinks: int = 0
    window: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    recipe: str = ""

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 0:
            raise ValueError("sinks and window must be 0 or more")
        if not (len(self.geometry) == len(self.k) == len(self.v)):
            raise ValueError("geometry, k and v must have one entry per layer")
        for shape, heads_k, heads_v in zip(self.geometry, self.k, self.v, strict=True):
            if not (len(heads_k) == len(heads_v) == shape.n_head_kv):
                raise ValueError("each layer needs one plan per KV head and side")
            for head in heads_k:
                head.spec.check_head_dim(shape.head_dim_k)
            for head in heads_v:
                head.spec.check_head_dim(shape.head_dim_v)
                if head.transform.offset is not None:
                    raise ValueError("values have no offset: the attention sum would have to add it back")

    @property
    def quantizes(self) -> bool:
        """Whether any head stores codes."""
        return any(head.spec.quantized for side in (self.k, self.v) for layer in side for head in layer)

    @property
    def rotates(self) -> bool:
        """Whether any key has a rotating offset: whoever reads the cache then needs the model's RoPE."""
        return any(head.transform.rotating for layer in self.k for head in layer)
