"""Statistics and samples of a whole model, gathered a few chunks at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvrun.errors import KvError

from .collect import ChannelStatistics
from .gradients import LayerRecord, records
from .samples import HeadSamples
from .stream import stream

if TYPE_CHECKING:
    from kvrun.gguf_file import GGUFFile
    from kvrun.models import Model
    from kvrun.plan import LayerGeometry

#: Samples of all layers take at most so much; where more was seen, each chunk keeps a run of its tokens.
SAMPLE_BYTES = 640 << 20
#: Bytes of one sampled value with its gradient: float32 and bfloat16.
VALUE_BYTES = 6
#: Chunks go through the model together as long as they hold no more tokens, and their states no more bytes, than this.
BATCH_TOKENS = 2048
STATE_BYTES = 256 << 20
#: An output matrix larger than this in float32 is expanded in pieces, again for each batch of rows.
OUTPUT_BYTES = 1 << 30


def budget_bytes(file: GGUFFile) -> int:
    """Bytes in float32 of the largest layer, or of the output matrix: what is kept dequantized at a time."""
    parts: dict[str, int] = {}
    for name, info in file.tensors.items():
        part = name.split(".")[1] if name.startswith("blk.") else name
        parts[part] = parts.get(part, 0) + 4 * int(np.prod(info.shape))
    output = parts.get("output.weight", parts.get("token_embd.weight", 0))
    layers = [size for part, size in parts.items() if part.isdigit()]
    return max([*layers, output if output <= OUTPUT_BYTES else 0], default=0)


@dataclass(frozen=True)
class Chunks:
    """What is read: tokens, positions int64 [n_chunk, chunk_tokens]; sinks, window: tokens; seed: of labels and runs.

    first: number of the first of these chunks in a longer calibration, so that parts of it give what the whole gives.
    """

    tokens: np.ndarray
    positions: np.ndarray
    sinks: int
    window: int
    seed: int
    first: int = 0


class SideSamples:
    """One side of one layer: x float32 and gradient bfloat16 [n_head_kv, n_chunk, n_kept, head_dim], statistics."""

    def __init__(self, n_head: int, n_chunk: int, n_kept: int, head_dim: int) -> None:
        self.x = torch.empty(n_head, n_chunk, n_kept, head_dim)
        self.gradient: Tensor | None = torch.empty(n_head, n_chunk, n_kept, head_dim, dtype=torch.bfloat16)
        self.statistics: list[ChannelStatistics] = []

    def add(
        self, rows: slice, starts: Sequence[int], x: Tensor, gradient: Tensor, query: Tensor | None, output: np.ndarray
    ) -> None:
        """Take chunks in; starts: the first token that is kept of each."""
        n_kept = self.x.shape[2]
        for at, (index, start) in enumerate(zip(range(rows.start, rows.stop), starts, strict=True)):
            self.x[:, index] = x[:, at, start : start + n_kept]
            assert self.gradient is not None
            self.gradient[:, index] = gradient[:, at, start : start + n_kept].to(torch.bfloat16)
        new = [
            ChannelStatistics.of(
                x[h],
                gradient=gradient[h],
                query=None if query is None else query[h].numpy(),
                output=output[h] if query is None else None,
            )
            for h in range(len(x))
        ]
        known = self.statistics
        self.statistics = [a.merge(b) for a, b in zip(known, new, strict=True)] if known else new

    @classmethod
    def plain(cls, x: Tensor) -> SideSamples:
        """Keys or values alone, all of them: float32 [n_head_kv, n_chunk, n, head_dim]."""
        side = cls.__new__(cls)
        side.x, side.gradient, side.statistics = x, None, [ChannelStatistics.of(head) for head in x]
        return side

    def head(self, side: str, ih: int) -> HeadSamples:
        """One head's part."""
        return HeadSamples(side, self.x[ih], self.statistics[ih], None if self.gradient is None else self.gradient[ih])


class Gathered:
    """What calibration knows of a model: `[layer]` of keys and of values."""

    def __init__(self, geometry: Sequence[LayerGeometry], n_chunk: int, n_token: int) -> None:
        per_token = VALUE_BYTES * sum(g.n_head_kv * (g.head_dim_k + g.head_dim_v) for g in geometry)
        n_kept = min(n_token, max(SAMPLE_BYTES // (per_token * n_chunk), min(n_token, 64)))
        self.n_chunk, self.n_token, self.n_kept = n_chunk, n_token, n_kept
        #: Of the kept tokens: int64 [n_chunk, n_kept].
        self.positions = torch.zeros(n_chunk, n_kept, dtype=torch.int64)
        self.k = [SideSamples(g.n_head_kv, n_chunk, n_kept, g.head_dim_k) for g in geometry]
        self.v = [SideSamples(g.n_head_kv, n_chunk, n_kept, g.head_dim_v) for g in geometry]

    def add(self, record: LayerRecord, rows: slice, starts: Sequence[int], output: np.ndarray) -> None:
        """Take one layer's record of the chunks `rows` in; output: [n_head_kv, d_v, d_v] as `ChannelStatistics`."""
        self.k[record.il].add(rows, starts, record.k, record.grad_k, record.query, output)
        self.v[record.il].add(rows, starts, record.v, record.grad_v, None, output)


def gather(model: Model, chunks: Chunks, on_progress: Callable[[int], None] | None = None) -> Gathered:
    """Run all chunks forward and back; on_progress is called with the number of chunks done.

    Memory: the samples, the states of one batch of chunks, one layer in float32 with its graph.
    """
    n_chunk, length = chunks.tokens.shape
    config = model.config
    gathered = Gathered(config.geometry, n_chunk, length - chunks.sinks)
    state_bytes = 4 * length * config.n_embd * (config.n_layer + 1)
    step = max(1, min(BATCH_TOKENS // length, STATE_BYTES // state_bytes))
    outputs: dict[int, np.ndarray] = {}
    for first in range(0, n_chunk, step):
        rows = slice(first, min(first + step, n_chunk))
        numbers = range(chunks.first + rows.start, chunks.first + rows.stop)
        starts = [_start(chunks.seed, number, gathered.n_token - gathered.n_kept) for number in numbers]
        for index, start in zip(range(rows.start, rows.stop), starts, strict=True):
            kept = slice(chunks.sinks + start, chunks.sinks + start + gathered.n_kept)
            gathered.positions[index] = torch.from_numpy(chunks.positions[index, kept])
        found = records(
            model,
            torch.from_numpy(chunks.tokens[rows]),
            torch.from_numpy(chunks.positions[rows]),
            sinks=chunks.sinks,
            window=chunks.window,
            seeds=[_seed(chunks.seed, number) for number in numbers],
        )
        for record in found:
            if record.il not in outputs:
                outputs[record.il] = output_gram(model, record.il)
            gathered.add(record, rows, starts, outputs[record.il])
        if on_progress is not None:
            on_progress(rows.stop)
    return gathered


def gather_plain(model: Model, chunks: Chunks, on_progress: Callable[[int], None] | None = None) -> Gathered:
    """Keys and values without gradients, one layer after the other; on_progress as in `gather`.

    Raises KvError naming layer and head where one is not a number.
    """
    gathered = Gathered(model.config.geometry, len(chunks.tokens), 0)
    tokens, positions = torch.from_numpy(chunks.tokens), torch.from_numpy(chunks.positions)
    gathered.positions = positions[:, chunks.sinks :]
    with torch.inference_mode():
        for il, record in enumerate(stream(model, tokens, positions)):
            for what, sides, x in (("keys", gathered.k, record.keys), ("values", gathered.v, record.values)):
                for ih, head in enumerate(x):
                    if not bool(torch.isfinite(head).all()):
                        why = f"{what} of layer {il}, KV head {ih} are not numbers (NaN or Inf)"
                        raise KvError(f"{why}: the model is damaged")
                    if not bool(torch.isfinite(head.square().sum(-1)).all()):
                        why = f"{what} of layer {il}, KV head {ih} are so large"
                        raise KvError(f"{why} that attention over them is no number; the model is damaged")
                sides[il] = SideSamples.plain(x[:, :, chunks.sinks :])
            if on_progress is not None:
                on_progress((il + 1) * len(tokens) // model.config.n_layer)
    return gathered


def output_gram(model: Model, il: int) -> np.ndarray:
    """`W_o^T W_o` summed over the query heads of each group: float64 [n_head_kv, d_v, d_v]."""
    weight = model.weights.get(f"blk.{il}.attn_output.weight").double()
    shape = model.config.geometry[il]
    heads = weight.unflatten(1, (-1, shape.head_dim_v))
    grams = torch.einsum("ehi,ehj->hij", heads, heads)
    summed: np.ndarray = grams.unflatten(0, (shape.n_head_kv, -1)).sum(1).numpy()
    return summed


def _seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint32)[0])


def _start(seed: int, number: int, room: int) -> int:
    return int(np.random.default_rng([seed, number, 1]).integers(room + 1))
