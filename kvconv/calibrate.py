"""The calibration pass: one layer's weights at a time, the hidden states of all chunks beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvkernels.spec import QuantSpec, default_group
from kvrun.errors import KvError
from kvrun.plan import LayerGeometry
from kvrun.recipe import Provenance, Recipe

from . import __version__
from .choose import OBJECTIVE, Choice, choose_head
from .stream import stream
from .text import Text, cut, place

if TYPE_CHECKING:
    from kvrun.gguf_file import GGUFFile
    from kvrun.models import Model


DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    bits_k, bits_v: code widths.  group: values per scale, None for 64 or what divides the head.
    sinks, window, chunk_tokens, n_ctx: tokens.  n_ctx: positions to place chunks over; 0 is what the model was trained
    for, None is that but at most 4096.
    """

    bits_k: int = 4
    bits_v: int = 4
    group: int | None = None
    sinks: int = 4
    window: int = 32
    n_chunks: int = 8
    chunk_tokens: int = 512
    n_ctx: int | None = None
    seed: int = 0

    def check(self, geometry: Sequence[LayerGeometry]) -> None:
        """Raise KvError where a layer's heads cannot be stored as wanted."""
        for shape in geometry:
            self.spec(self.bits_k, shape.head_dim_k)
            self.spec(self.bits_v, shape.head_dim_v)

    def spec(self, bits: int, head_dim: int) -> QuantSpec:
        """Storage of a head; KvError where it cannot be had."""
        if bits == 16:
            return QuantSpec(16)
        spec = QuantSpec(bits, self.group or default_group(head_dim))
        try:
            spec.check_head_dim(head_dim)
        except ValueError as error:
            raise KvError(f"{error}; choose another --group") from error
        return spec


@dataclass(frozen=True)
class Sample:
    """Chunks of text with their positions: tokens, positions int64 [n_chunk, chunk_tokens]."""

    text: Text
    tokens: np.ndarray
    positions: np.ndarray
    n_ctx: int


def budget_bytes(file: GGUFFile) -> int:
    """Bytes of the largest layer in float32: what may be kept dequantized while all chunks go through it."""
    layers: dict[str, int] = {}
    for name, info in file.tensors.items():
        if name.startswith("blk."):
            layer = name.split(".")[1]
            layers[layer] = layers.get(layer, 0) + 4 * int(np.prod(info.shape))
    return max(layers.values(), default=0)


def draw(
    text: Text, encode: Callable[[str], Sequence[int]], settings: Settings, n_ctx_train: int, bos: int | None
) -> Sample:
    """Cut the text into chunks and place them over the context; KvError where the text or the context is too short."""
    if settings.chunk_tokens <= settings.sinks:
        raise KvError(f"a chunk of {settings.chunk_tokens} tokens holds nothing but sinks; raise --chunk-tokens")
    trained = n_ctx_train or DEFAULT_CONTEXT
    n_ctx = min(DEFAULT_CONTEXT, trained) if settings.n_ctx is None else settings.n_ctx or trained
    if settings.chunk_tokens > n_ctx:
        raise KvError(f"chunks of {settings.chunk_tokens} tokens exceed the context of {n_ctx}; lower --chunk-tokens")
    tokens = cut(text.content, encode, settings.n_chunks, settings.chunk_tokens, bos=bos)
    return Sample(text, tokens, place(len(tokens), settings.chunk_tokens, n_ctx, settings.seed), n_ctx)


def calibrate(
    model: Model, sample: Sample, settings: Settings, on_progress: Callable[[int], None] | None = None
) -> Recipe:
    """Choose a storage for every layer, KV head and side from how the text's keys and values survive it.

    Each chunk is a sequence of its own with full-precision causal attention.  Memory: the hidden states, keys and
    values of all chunks at one layer, and one layer's weights.
    on_progress: called with the number of layers done.
    Raises KvError naming layer and head where a key or value is not a number or does not fit float16.
    """
    config = model.config
    specs = [
        (settings.spec(settings.bits_k, shape.head_dim_k), settings.spec(settings.bits_v, shape.head_dim_v))
        for shape in config.geometry
    ]
    k: list[list[Choice]] = []
    v: list[list[Choice]] = []
    with torch.inference_mode():
        for il, record in enumerate(stream(model, torch.from_numpy(sample.tokens), torch.from_numpy(sample.positions))):
            k.append(choose_layer(il, "k", record.keys[:, :, settings.sinks :], specs[il][0]))
            v.append(choose_layer(il, "v", record.values[:, :, settings.sinks :], specs[il][1]))
            if on_progress is not None:
                on_progress(il + 1)
    made = Provenance(
        tool_version=f"kvconv {__version__}",
        text_name=sample.text.name,
        text_sha256=sample.text.sha256,
        n_chunks=len(sample.tokens),
        chunk_tokens=settings.chunk_tokens,
        n_ctx=sample.n_ctx,
        seed=settings.seed,
        objective=OBJECTIVE,
        k_before=tuple(tuple(c.before for c in layer) for layer in k),
        k_after=tuple(tuple(c.after for c in layer) for layer in k),
        v_before=tuple(tuple(c.before for c in layer) for layer in v),
        v_after=tuple(tuple(c.after for c in layer) for layer in v),
    )
    return Recipe(
        fingerprint=model.file.fingerprint(),
        arch=model.file.arch,
        geometry=config.geometry,
        k=tuple(tuple(c.plan for c in layer) for layer in k),
        v=tuple(tuple(c.plan for c in layer) for layer in v),
        sinks=settings.sinks,
        window=settings.window,
        provenance=made,
    )


def choose_layer(il: int, side: str, x: Tensor, spec: QuantSpec) -> list[Choice]:
    """A choice for every head of one side; x: float32 [n_head_kv, n_chunk, n, head_dim] without the sinks."""
    what = "keys" if side == "k" else "values"
    choices = []
    for ih, head in enumerate(x):
        if not bool(torch.isfinite(head).all()):
            raise KvError(f"{what} of layer {il}, KV head {ih} are not numbers (NaN or Inf): the model is damaged")
        try:
            choices.append(choose_head(head, spec, side))
        except KvError as error:
            raise KvError(f"{what} of layer {il}, KV head {ih}: {error}") from error
    return choices
