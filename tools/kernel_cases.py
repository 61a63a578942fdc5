"""The launches that `tools/kernel_table.py` compiles: every GPU kernel at the shapes of models that people run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvkernels.append.triton import Incoming, append_launch
from kvkernels.attend.triton import DeviceLayer, decode_launches
from kvkernels.device_store import DeviceSide
from kvkernels.launch import Launch
from kvkernels.spec import QuantSpec, default_group

#: Query heads, KV heads, channels of a head, tokens of a sliding window, of one layer of each model. Llama-3-8B has
#: the shape of Qwen3-4B.
SHAPES = {"qwen3-4b": (32, 8, 128, 0), "gemma-3-4b": (8, 4, 256, 1024), "smollm2-135m": (9, 3, 64, 0)}
#: Storages that are compiled for each, see `_specs`.
KINDS = {"qwen3-4b": ("4", "2", "2c"), "gemma-3-4b": ("4",), "smollm2-135m": ("4", "mixed")}


def _specs(kind: str, d: int, n_kv: int) -> tuple[list[QuantSpec], list[QuantSpec]]:
    """Storage of keys and values of every head: "4", "3", "2" bits, "2c" channel-wise keys, "mixed" widths."""
    group = default_group(d)
    if kind == "2c":
        return [QuantSpec(2, 32, "channel")] * n_kv, [QuantSpec(2, group)] * n_kv
    if kind == "mixed":
        widths = [(4, 4), (3, 4), (2, 3)]
        pairs = [widths[head % len(widths)] for head in range(n_kv)]
        return [QuantSpec(k, group) for k, _ in pairs], [QuantSpec(v, group) for _, v in pairs]
    return [QuantSpec(int(kind), group)] * n_kv, [QuantSpec(int(kind), group)] * n_kv


def decode_layer(kind: str, shape: str) -> tuple[DeviceLayer, torch.Tensor]:
    """A layer for 4096 tokens, nothing written, and one query per head."""
    n_head, n_kv, d, sliding = SHAPES[shape]
    k, v = _specs(kind, d, n_kv)
    sides = [
        DeviceSide(specs, [1.0] * n_kv, 4096, d, sinks=4, slots=32 + max(s.block for s in specs) + 15)
        for specs in (k, v)
    ]
    layer = DeviceLayer(*sides, window=32, scale=d**-0.5, inverse=torch.zeros(n_kv, d, d), sliding=sliding)
    return layer, torch.zeros(1, n_head, d, dtype=torch.float16)


def append_layer(layer: DeviceLayer) -> Launch:
    """One new token into a layer whose keys and values are both transformed."""
    keys, values = (
        Incoming(
            torch.zeros(side.n_head, side.d, side.d), torch.zeros(side.n_head, side.d) if side is layer.k else None
        )
        for side in (layer.k, layer.v)
    )
    k, v = (torch.zeros(1, side.n_head, 1, side.d, dtype=torch.float16) for side in (layer.k, layer.v))
    return append_launch(layer, k, v, torch.zeros(1, dtype=torch.int32), keys=keys, values=values)


def cases() -> Iterator[tuple[str, str, Launch]]:
    """(kernel, shape and storage, launch) of everything in the table."""
    for shape in SHAPES:
        for kind in KINDS[shape]:
            layer, q = decode_layer(kind, shape)
            lengths = torch.ones(1, dtype=torch.int32)
            attention, combine = decode_launches(layer, q, lengths, torch.empty_like(q))
            yield "decode", f"{shape} {kind}", attention
            if kind == "4":
                yield "combine", shape, combine
            if kind == "4":
                yield "append", f"{shape} {kind}", append_layer(layer)
