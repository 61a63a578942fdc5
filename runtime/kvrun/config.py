"""The numbers that describe a model's graph, read from GGUF metadata and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .errors import GGUFError, UnsupportedModelError
from .gguf_file import GGUFFile
from .plan import LayerGeometry

RopeStyle = Literal["interleaved", "neox"]
MAX_LAYERS = 4096
MAX_DIM = 1 << 24


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model.

    n_head, n_head_kv, n_ff: per layer.  head_dim_k, head_dim_v: channels of a key and of a value head.
    n_rot: leading channels of a head that RoPE turns.  rope_style: pairs (2i, 2i + 1) "interleaved", or
    (i, i + n_rot / 2) "neox", as the architecture's GGUF files are laid out.
    rope_scale: positions are divided by it (linear scaling), 1 for none.
    n_ctx_train: context the model was trained for, in tokens.
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
    rope_scale: float
    rms_eps: float
    n_vocab: int
    n_ctx_train: int

    @property
    def geometry(self) -> tuple[LayerGeometry, ...]:
        """Shape of each layer's cache."""
        return tuple(LayerGeometry(n, self.head_dim_k, self.head_dim_v) for n in self.n_head_kv)

    @classmethod
    def from_file(cls, file: GGUFFile, rope_style: RopeStyle) -> ModelConfig:
        """Read the keys that most architectures share.

        GGUFError where one is missing or senseless, UnsupportedModelError for RoPE scaling other than linear.
        """
        keys = _Keys(file)
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
            rope_scale=_rope_scale(keys),
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            n_vocab=_vocabulary_size(file),
            n_ctx_train=keys.count("context_length", limit=1 << 40),
        )


class _Keys:
    """Typed access to `{arch}.*`."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.arch + "."

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.file

    def bad(self, key: str, why: str) -> GGUFError:
        return GGUFError(f"{self.file.path}: key {self.prefix + key!r} {why}; convert the model again")

    def count(self, key: str, *, default: int | None = None, limit: int = MAX_DIM) -> int:
        if default is not None and key not in self:
            return default
        value = self.file.require(self.prefix + key, int)
        if not 0 < value <= limit:
            raise self.bad(key, f"is {value}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        if default is not None and key not in self:
            return default
        value = self.file.require(self.prefix + key, float)
        if not (math.isfinite(value) and value > 0):
            raise self.bad(key, f"is {value}")
        return value

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


def _rope_scale(keys: _Keys) -> float:
    kind = keys.file.get(keys.prefix + "rope.scaling.type", "linear")
    if kind == "none":
        return 1.0
    if kind != "linear" or keys.file.get(keys.prefix + "rope.scaling.attn_factor", 1.0) != 1.0:
        what = "an attention factor" if kind == "linear" else f"RoPE scaling {kind!r}"
        raise UnsupportedModelError(
            f"{keys.file.path}: the model uses {what}, which is not supported (linear is); choose another model"
        )
    # llama.cpp reads the old key where the new one is missing, and takes 0 for no scaling.
    key = next((k for k in ("rope.scaling.factor", "rope.scale_linear") if k in keys), None)
    if key is None or keys.file.get(keys.prefix + key) == 0:
        return 1.0
    return keys.positive(key)


def _vocabulary_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError(
            f"{file.path}: there is no matrix 'token_embd.weight'; give a model, not a projector or adapter"
        )
    return embedding.shape[0]
