"""How a recipe lies in GGUF metadata: flat arrays under `kvconv.`, one entry per head (docs/recipe-format.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvkernels.spec import Axis, Code, QuantSpec

from .errors import RecipeError
from .plan import HeadPlan, HeadTransform, LayerGeometry

PREFIX = "kvconv."
#: The newest version that is read. A recipe is written in the oldest version that can hold it (`needed_version`).
FORMAT_VERSION = 3
#: Widths a recipe may hold. One bit is no storage, only a control of comparisons.
STORED_WIDTHS = (2, 3, 4, 5, 6, 8, 16)
AXES: tuple[Axis, ...] = ("token", "channel")
#: What `kvconv.{k,v}.code` counts; the key came with version 3 and is left out where all codes are uniform.
CODES: tuple[Code, ...] = ("uniform", "cubic")
#: Bits of `kvconv.{k,v}.transform`: what the head's transform is made of. The last one came with version 2.
HAS_ORDER, HAS_HADAMARD, HAS_MATRIX, HAS_OFFSET, ROTATES = 1, 2, 4, 8, 16
MAX_HEAD_DIM = 4096
#: Tokens that each layer's queries see, 0 for all. Came with version 3.
SLIDING = "sliding_window"
#: A learned matrix that is worse conditioned than this (1-norm) cannot be undone in float32.
MAX_CONDITION = 1e6

Heads = tuple[tuple[HeadPlan, ...], ...]


class Metadata(Protocol):
    """The part of `GGUFFile` that reading a recipe needs."""

    def __contains__(self, key: str) -> bool: ...

    def get(self, key: str, default: Any = None) -> Any: ...


def encode_geometry(geometry: Sequence[LayerGeometry]) -> dict[str, np.ndarray]:
    """`kvconv.n_head_kv`, `kvconv.head_dim_k`, `kvconv.head_dim_v`: uint32 [n_layer].

    `kvconv.sliding_window`, the same, is left out where no layer has one.
    """
    names = ("n_head_kv", "head_dim_k", "head_dim_v")
    columns = {name: [int(getattr(layer, name)) for layer in geometry] for name in names}
    if any(layer.sliding for layer in geometry):
        columns[SLIDING] = [layer.sliding for layer in geometry]
    return {PREFIX + name: np.array(column, np.uint32) for name, column in columns.items()}


def encode_side(side: str, heads: Heads) -> dict[str, np.ndarray]:
    """Arrays of one side ("k" or "v"), heads in layer order.

    bits, axis, transform: uint8; group, hadamard: uint16; clip: float32; one entry per head.  code: the same, uint8,
    left out where all heads have uniform codes.  order (uint8, or uint16
    where a head has more than 256 channels), offset (float32) and matrix (float16 bits in uint16, row by row) are
    concatenated over the heads that have one, and left out where none has.
    """
    flat = [head for layer in heads for head in layer]
    specs, transforms = [head.spec for head in flat], [head.transform for head in flat]
    arrays: dict[str, np.ndarray] = {
        "bits": np.array([s.bits for s in specs], np.uint8),
        "group": np.array([s.group for s in specs], np.uint16),
        "axis": np.array([AXES.index(s.axis) for s in specs], np.uint8),
        "transform": np.array([_flags(t) for t in transforms], np.uint8),
        "hadamard": np.array([t.hadamard for t in transforms], np.uint16),
        "clip": np.array([head.clip for head in flat], np.float32),
    }
    orders = [t.order for t in transforms if t.order is not None]
    offsets = [t.offset for t in transforms if t.offset is not None]
    matrices = [t.matrix for t in transforms if t.matrix is not None]
    if orders:
        wide = max(len(order) for order in orders) > 256
        arrays["order"] = np.concatenate(orders).astype(np.uint16 if wide else np.uint8)
    if offsets:
        arrays["offset"] = np.concatenate(offsets).astype(np.float32)
    if matrices:
        arrays["matrix"] = np.concatenate([m.astype(np.float16).ravel() for m in matrices]).view(np.uint16)
    if any(s.code != "uniform" for s in specs):
        arrays["code"] = np.array([CODES.index(s.code) for s in specs], np.uint8)
    return {f"{PREFIX}{side}.{name}": array for name, array in arrays.items()}


def _flags(transform: HeadTransform) -> int:
    return (
        HAS_ORDER * (transform.order is not None)
        | HAS_HADAMARD * bool(transform.hadamard)
        | HAS_MATRIX * (transform.matrix is not None)
        | HAS_OFFSET * (transform.offset is not None)
        | ROTATES * transform.rotating
    )


def needed_version(k: Heads, v: Heads, geometry: Sequence[LayerGeometry]) -> int:
    """The oldest format version that can hold these heads in these layers."""
    if any(layer.sliding for layer in geometry):
        return 3
    if any(head.spec.code != "uniform" for layer in (*k, *v) for head in layer):
        return 3
    return 2 if any(head.transform.rotating for layer in k for head in layer) else 1


class Fields:
    """Typed access to the `kvconv.*` keys of a file; every mismatch is a RecipeError that names the key."""

    def __init__(self, source: Metadata) -> None:
        self._source = source

    def _get(self, name: str) -> Any:
        value = self._source.get(PREFIX + name)
        if value is None:
            raise RecipeError(f"{PREFIX}{name} is missing")
        return value

    def has(self, name: str) -> bool:
        """Whether a key is there."""
        return PREFIX + name in self._source

    def text(self, name: str) -> str:
        """A string."""
        value = self._get(name)
        if not isinstance(value, str):
            raise RecipeError(f"{PREFIX}{name} is not a string")
        return value

    def number(self, name: str, *, limit: int = 2**32 - 1) -> int:
        """A whole number from 0 to `limit`."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RecipeError(f"{PREFIX}{name} is not a whole number")
        if not 0 <= value <= limit:
            raise RecipeError(f"{PREFIX}{name} is {value}, outside 0 to {limit}")
        return value

    def array(self, name: str, dtypes: tuple[type[np.generic], ...], length: int | None = None) -> np.ndarray:
        """A flat array of one of `dtypes`; `length` entries where given."""
        value = self._get(name)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.type not in dtypes:
            names = " or ".join(np.dtype(t).name for t in dtypes)
            raise RecipeError(f"{PREFIX}{name} is not an array of {names}")
        if length is not None and len(value) != length:
            raise RecipeError(f"{PREFIX}{name} has {len(value)} entries, not {length}")
        return value

    def chunks(self, name: str, dtypes: tuple[type[np.generic], ...], sizes: Sequence[int]) -> list[np.ndarray]:
        """A concatenated array cut into pieces of `sizes`; none where `sizes` is empty, and then the key is absent."""
        if not sizes:
            if PREFIX + name in self._source:
                raise RecipeError(f"{PREFIX}{name} is there, but no head uses it")
            return []
        array = self.array(name, dtypes, sum(sizes))
        return np.split(array, np.cumsum(sizes)[:-1])


def decode_geometry(fields: Fields, version: int) -> tuple[LayerGeometry, ...]:
    """Shape of every layer; sizes are checked before anything is made of them."""
    n_head_kv = fields.array("n_head_kv", (np.uint32,))
    dims = [fields.array(name, (np.uint32,), len(n_head_kv)) for name in ("head_dim_k", "head_dim_v")]
    for dim in dims:
        if len(dim) and not (int(dim.min()) > 0 and int(dim.max()) <= MAX_HEAD_DIM):
            raise RecipeError(f"a head size is outside 1 to {MAX_HEAD_DIM}")
    n_heads = len(fields.array("k.bits", (np.uint8,)))
    total = int(n_head_kv.astype(np.uint64).sum())
    if total != n_heads or not total:
        raise RecipeError(f"{PREFIX}k.bits has {n_heads} entries for {total} heads")
    sliding = np.zeros_like(n_head_kv)
    if version >= 3 and fields.has(SLIDING):
        sliding = fields.array(SLIDING, (np.uint32,), len(n_head_kv))
    columns = (n_head_kv, *dims, sliding)
    return tuple(LayerGeometry(*layer) for layer in zip(*(column.tolist() for column in columns), strict=True))


def decode_side(fields: Fields, side: str, geometry: Sequence[LayerGeometry], version: int) -> Heads:
    """The heads of one side, the reverse of `encode_side`; RecipeError on anything that does not add up."""
    dims = [getattr(layer, f"head_dim_{side}") for layer in geometry for _ in range(layer.n_head_kv)]
    n = len(dims)
    bits = fields.array(f"{side}.bits", (np.uint8,), n).tolist()
    group = fields.array(f"{side}.group", (np.uint16,), n).tolist()
    axis = fields.array(f"{side}.axis", (np.uint8,), n).tolist()
    flags = fields.array(f"{side}.transform", (np.uint8,), n).tolist()
    hadamard = fields.array(f"{side}.hadamard", (np.uint16,), n).tolist()
    clip = fields.array(f"{side}.clip", (np.float32,), n).tolist()

    code = [0] * n
    if version >= 3 and fields.has(f"{side}.code"):
        code = fields.array(f"{side}.code", (np.uint8,), n).tolist()

    def having(flag: int, name: str, dtypes: tuple[type[np.generic], ...], power: int = 1) -> list[np.ndarray | None]:
        pieces = iter(fields.chunks(name, dtypes, [d**power for d, f in zip(dims, flags, strict=True) if f & flag]))
        return [next(pieces) if f & flag else None for f in flags]

    if any(f >= 2 * (ROTATES if version >= 2 else HAS_OFFSET) for f in flags):
        raise RecipeError(f"{PREFIX}{side}.transform names a transform that this version does not know")
    if any(bool(f & HAS_HADAMARD) != bool(block) for f, block in zip(flags, hadamard, strict=True)):
        raise RecipeError(f"{PREFIX}{side}.hadamard does not fit {PREFIX}{side}.transform")
    if any(a >= len(AXES) for a in axis):
        raise RecipeError(f"{PREFIX}{side}.axis names an axis that this version does not know")
    if any(c >= len(CODES) for c in code):
        raise RecipeError(f"{PREFIX}{side}.code names a code that this version does not know")
    orders = having(HAS_ORDER, f"{side}.order", (np.uint8, np.uint16))
    offsets = having(HAS_OFFSET, f"{side}.offset", (np.float32,))
    matrices = having(HAS_MATRIX, f"{side}.matrix", (np.uint16,), power=2)

    def head(i: int) -> HeadPlan:
        order, matrix, offset = orders[i], matrices[i], offsets[i]
        transform = HeadTransform(
            order=None if order is None else order.astype(np.uint16),
            hadamard=hadamard[i],
            matrix=None if matrix is None else matrix.view(np.float16).astype(np.float32).reshape(dims[i], dims[i]),
            offset=None if offset is None else offset.astype(np.float32),
            rotating=bool(flags[i] & ROTATES),
        )
        return HeadPlan(QuantSpec(bits[i], group[i], AXES[axis[i]], CODES[code[i]]), transform, clip[i])

    heads = []
    for i in range(n):
        try:
            heads.append(head(i))
        except ValueError as error:
            raise RecipeError(f"{side} head {i}: {error}") from error
    return by_layer(heads, geometry)


def by_layer(flat: Sequence[Any], geometry: Sequence[LayerGeometry]) -> tuple[tuple[Any, ...], ...]:
    """Entries in layer order, cut into one tuple per layer."""
    items = iter(flat)
    return tuple(tuple(next(items) for _ in range(layer.n_head_kv)) for layer in geometry)


def check_heads(side: str, heads: Heads, geometry: Sequence[LayerGeometry]) -> None:
    """Raise RecipeError where a head cannot be stored or undone as it says, naming layer and head."""
    if len(heads) != len(geometry):
        raise RecipeError(f"{side} has {len(heads)} layers, not {len(geometry)}")
    for il, (layer, shape) in enumerate(zip(heads, geometry, strict=True)):
        if len(layer) != shape.n_head_kv:
            raise RecipeError(f"{side} of layer {il} has {len(layer)} heads, not {shape.n_head_kv}")
        blocks = [head.spec.block for head in layer]
        if any(max(blocks) % block for block in blocks):
            raise RecipeError(f"{side} of layer {il}: channel-axis groups do not divide one another")
        for ih, head in enumerate(layer):
            dim = shape.head_dim_k if side == "k" else shape.head_dim_v
            try:
                _check_head(head, dim, side)
            except (RecipeError, ValueError) as error:
                raise RecipeError(f"{side} of layer {il}, head {ih}: {error}") from error


def _check_head(head: HeadPlan, dim: int, side: str) -> None:
    spec, transform = head.spec, head.transform
    if not 0 < dim <= MAX_HEAD_DIM:
        raise RecipeError(f"head size {dim} is outside 1 to {MAX_HEAD_DIM}")
    if spec.bits not in STORED_WIDTHS:
        raise RecipeError(f"{spec.bits} bits is none of {', '.join(map(str, STORED_WIDTHS))}")
    spec.check_head_dim(dim)
    if spec.emulates:
        raise RecipeError(f"{spec.code} blocks are for measuring llama.cpp's format; a recipe does not hold them")
    if spec.group > 65535:
        raise RecipeError(f"group {spec.group} is too large")
    if not 0.0 < head.clip <= 1.0:
        raise RecipeError(f"clip {head.clip} is outside 0 to 1")
    block = transform.hadamard
    if block and (block < 2 or block & (block - 1) or dim % block):
        raise RecipeError(f"Hadamard block {block} is no power of two that divides {dim}")
    order, offset, matrix = transform.order, transform.offset, transform.matrix
    if order is not None and not np.array_equal(np.sort(order), np.arange(dim)):
        raise RecipeError(f"the order is not a permutation of 0 to {dim - 1}")
    if offset is not None:
        if side == "v":
            raise RecipeError("values cannot have an offset")
        if offset.shape != (dim,) or not np.isfinite(offset).all():
            raise RecipeError(f"the offset is not {dim} finite numbers")
    if matrix is not None:
        if order is not None or block:
            raise RecipeError("a learned matrix takes no order and no Hadamard block")
        if matrix.shape != (dim, dim) or not np.isfinite(matrix).all():
            raise RecipeError(f"the matrix is not {dim} x {dim} finite numbers")
        if not np.linalg.cond(matrix.astype(np.float64), 1) < MAX_CONDITION:
            raise RecipeError("the matrix cannot be inverted")


def content_sha256(metadata: Mapping[str, Any]) -> str:
    """Hex digest over keys and values, independent of their order in the file."""
    digest = hashlib.sha256()
    for key in sorted(metadata):
        value = metadata[key]
        kind = value.dtype.name if isinstance(value, np.ndarray) else type(value).__name__
        data = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else str(value).encode()
        digest.update(f"{key}\0{kind}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
