"""The numbers that describe a model's graph, read from GGUF metadata and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .errors import GGUFError, UnsupportedModelError
from .gguf_file import GGUFFile
from .plan import LayerGeometry
from .rope_scaling import RopeScaling

RopeStyle = Literal["interleaved", "neox"]
MAX_LAYERS = 4096
MAX_DIM = 1 << 24
MAX_CONTEXT = 1 << 40


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model.

    n_head, n_head_kv, n_ff: per layer.  head_dim_k, head_dim_v: channels of a key and of a value head.
    n_rot: leading channels of a head that RoPE turns.  rope_style: pairs (2i, 2i + 1) "interleaved", or
    (i, i + n_rot / 2) "neox", as the architecture's GGUF files are laid out.
    rope_scaling: how RoPE is stretched.
    n_ctx_train: context the model was trained for, in tokens.
    sliding: per layer, latest tokens that a query sees, 0 for all; empty where no layer slides.
    """

    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: tuple[int, ...]
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_rot: int
    rope_theta: float
    rope_style: RopeStyle
    rope_scaling: RopeScaling
    rms_eps: float
    n_vocab: int
    n_ctx_train: int
    sliding: tuple[int, ...] = ()

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """Shape of each layer's cache."""
        sliding = self.sliding or (0,) * self.n_layer
        return tuple(
            LayerGeometry(n, self.head_dim_k, self.head_dim_v, latest)
            for n, latest in zip(self.n_head_kv, sliding, strict=True)
        )

    @classmethod
    def from_file(
        cls,
        file: GGUFFile,
        rope_style: RopeStyle,
        scalings: tuple[str, ...] = ("linear", "yarn"),
        sliding: tuple[int, int] = (0, 0),
    ) -> ModelConfig:
        """Read the keys that most architectures share.

        scalings: values of `rope.scaling.type` that the architecture has.
        sliding: its `sliding_period` and `sliding_default`, see `kvrun.models.base.Model`.
        GGUFError where a key is missing or senseless, UnsupportedModelError for any other RoPE scaling.
        """
        keys = Keys(file)
        n_layer = keys.count("block_count", limit=MAX_LAYERS)
        n_embd = keys.count("embedding_length")
        n_head = keys.per_layer("attention.head_count", n_layer)
        n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, default=n_head)
        if any(q % kv for q, kv in zip(n_head, n_head_kv, strict=True)):
            raise keys.bad("attention.head_count_kv", "does not divide the number of query heads")
        head_dim = n_embd // n_head[0]
        head_dim_k = keys.count("attention.key_length", default=head_dim)
        n_rot = keys.count("rope.dimension_count", default=head_dim_k)
        if n_rot % 2 or n_rot > head_dim_k:
            raise keys.bad("rope.dimension_count", f"is {n_rot}, odd or larger than the head size {head_dim_k}")
        name = file.get("general.name", file.path.stem)
        return cls(
            arch=file.arch,
            name=name if isinstance(name, str) else file.path.stem,
            n_layer=n_layer,
            n_embd=n_embd,
            n_ff=keys.per_layer("feed_forward_length", n_layer),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=head_dim_k,
            head_dim_v=keys.count("attention.value_length", default=head_dim),
            n_rot=n_rot,
            rope_theta=keys.positive("rope.freq_base", default=10000.0),
            rope_style=rope_style,
            rope_scaling=_rope_scaling(keys, scalings),
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            n_vocab=_vocabulary_size(file),
            n_ctx_train=keys.count("context_length", limit=MAX_CONTEXT),
            sliding=_sliding(keys, n_layer, *sliding),
        )


class Keys:
    """Typed access to `{arch}.*`; GGUFError where a value is missing, of another type or senseless."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.arch + "."

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.file

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is in the file."""
        return self.file.get(self.prefix + key, default)

    def bad(self, key: str, why: str) -> GGUFError:
        """The error that says what is wrong with a key."""
        return GGUFError(f"{self.file.path}: key {self.prefix + key!r} {why}; convert the model again")

    def count(self, key: str, *, default: int | None = None, limit: int = MAX_DIM) -> int:
        """A whole number from 1 to `limit`."""
        if default is not None and key not in self:
            return default
        value = self.file.require(self.prefix + key, int)
        if not 0 < value <= limit:
            raise self.bad(key, f"is {value}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """A finite number above 0."""
        if default is not None and key not in self:
            return default
        value = self.file.require(self.prefix + key, float)
        if not (math.isfinite(value) and value > 0):
            raise self.bad(key, f"is {value}")
        return value

    def scale(self, key: str, default: float) -> float:
        """A multiplier; llama.cpp takes 0 for one that is not there."""
        return default if self.get(key, 0.0) == 0.0 else self.positive(key)

    def per_layer(self, key: str, n_layer: int, *, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One number for every layer, or an array with one number per layer."""
        if default is not None and key not in self:
            return default
        value = self.file.get(self.prefix + key)
        if not isinstance(value, np.ndarray):
            return (self.count(key),) * n_layer
        if value.dtype.kind not in "iu" or len(value) != n_layer:
            raise self.bad(key, f"does not hold one whole number for each of the {n_layer} layers")
        if not all(0 < n <= MAX_DIM for n in value.tolist()):
            raise UnsupportedModelError(
                f"{self.file.path}: key {self.prefix + key!r} has a layer with 0; layers without attention are not "
                "supported, choose another model"
            )
        return tuple(value.tolist())


def _sliding(keys: Keys, n_layer: int, period: int, default: int) -> tuple[int, ...]:
    """Window of each layer: all but the last of every `period` layers slide."""
    name = "attention.sliding_window"
    if not period or keys.get(name, default) == 0:
        return ()
    latest = keys.count(name, default=default, limit=MAX_CONTEXT)
    period = keys.count(f"{name}_pattern", default=period)
    return tuple(latest if il % period < period - 1 else 0 for il in range(n_layer))


def _rope_scaling(keys: Keys, scalings: tuple[str, ...]) -> RopeScaling:
    prefix = "rope.scaling."
    kind = keys.get(prefix + "type", "linear")
    if kind not in ("none", *scalings):
        raise UnsupportedModelError(
            f"{keys.file.path}: the model uses RoPE scaling {kind!r}, which is not supported for {keys.file.arch} "
            f"({', '.join(scalings)}); choose another model"
        )
    # llama.cpp reads the old key where the new one is missing, and takes 0 for no scaling.
    key = next((k for k in (prefix + "factor", "rope.scale_linear") if k in keys), None)
    factor = 1.0 if key is None or kind == "none" or keys.get(key) == 0 else keys.positive(key)
    ext_factor = keys.get(prefix + "yarn_ext_factor", 1.0)
    if kind == "yarn" and ext_factor != 1.0:
        why = f"YaRN with an extrapolation factor of {ext_factor!r}, which is not supported (1 is)"
        raise UnsupportedModelError(f"{keys.file.path}: the model uses {why}; choose another model")
    n_ctx_train = keys.count("context_length", limit=MAX_CONTEXT)
    return RopeScaling(
        factor=factor,
        magnitude=keys.positive(prefix + "attn_factor", default=1.0),
        n_ctx_orig=keys.count(prefix + "original_context_length", default=n_ctx_train, limit=MAX_CONTEXT),
        yarn=kind == "yarn",
        by_length=kind == "longrope",
    )


def _vocabulary_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError(
            f"{file.path}: there is no matrix 'token_embd.weight'; give a model, not a projector or adapter"
        )
    return embedding.shape[0]
