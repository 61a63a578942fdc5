"""Attention over a packed cache on the GPU: what the Triton kernels are called with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..device_store import DeviceSide
from ..launch import Launch
from ..rope_offset import RopeStyle
from ..spec import QuantSpec
from .triton_decode import combine_kernel, decode_kernel

#: Query heads per KV head at most: the rows of one product.
MAX_GROUP = 16
#: Tokens that one program handles at a time, unless a group of the channel axis is shorter.
TILE = 64


@dataclass(frozen=True)
class DeviceOffset:
    """The rotating offsets of one layer's keys, see `kvkernels.rope_offset`.

    offset: float32 [n_kv, d_k], zeros for a head that has none.  angles: float32 [n_ctx, n_rot], contiguous.
    fine: float32 [at least TILE, n_rot]: cosines and then sines of the angles of positions 0, 1, ..., no magnitude.
    """

    offset: Tensor
    angles: Tensor
    fine: Tensor
    style: RopeStyle


@dataclass(frozen=True)
class DeviceLayer:
    """One layer's cache and what attention over it has to know.

    window: tokens kept in full precision after the sinks.  scale: multiplies scores.
    inverse: float32 [n_kv, d_v, d_v], `T^-1` of the values, or None where they are stored as they are.
    sliding: tokens that a query sees, itself among them; 0 is all.  cap: scores become `cap tanh(score / cap)`; 0 is
    none.
    """

    k: DeviceSide
    v: DeviceSide
    window: int
    scale: float
    inverse: Tensor | None = None
    offset: DeviceOffset | None = None
    sliding: int = 0
    cap: float = 0.0

    @property
    def kinds(self) -> tuple[tuple[Kind, Kind], ...]:
        """The different pairs of storages that heads have, sorted: what a kernel is compiled for."""
        return tuple(sorted(set(self._pairs())))

    def kind_of_heads(self) -> Tensor:
        """int32 [n_kv], which of `kinds` each head is."""
        kinds = self.kinds
        return torch.tensor(
            [kinds.index(pair) for pair in self._pairs()], dtype=torch.int32, device=self.k.codes.device
        )

    def _pairs(self) -> list[tuple[Kind, Kind]]:
        return [(kind(k), kind(v)) for k, v in zip(self.k.specs, self.v.specs, strict=True)]

    @property
    def tile(self) -> int:
        """Tokens of a tile: no more than share a scale on the channel axis."""
        groups = [spec.group for spec in (*self.k.specs, *self.v.specs) if spec.axis == "channel"]
        return min([TILE, *groups])


#: (bits, channel axis, group) as a kernel is compiled for them.
Kind = tuple[int, bool, int]


def kind(spec: QuantSpec) -> Kind:
    """What a kernel has to know of a storage."""
    return spec.bits, spec.axis == "channel", spec.group


def decode(layer: DeviceLayer, q: Tensor, lengths: Tensor, *, raw: Tensor | None = None, n_splits: int = 8) -> Tensor:
    """Attention of the newest token of each sequence over all that it sees.

    q: [batch, n_head, d_k], any float type, transformed for the stored keys; neighbouring heads share a KV head.
    lengths: int32 [batch], tokens present, the newest among them; they must lie in the store already.
    raw: as q, before the keys' transform; needed where keys have a rotating offset.
    n_splits: parts that the packed tokens are cut into.
    Returns [batch, n_head, d_v] in q's type, the values' transform undone.
    """
    out = torch.empty(*q.shape[:2], layer.v.d, dtype=q.dtype, device=q.device)
    for launch in decode_launches(layer, q, lengths, out, raw=raw, n_splits=n_splits):
        launch.run()
    return out


def decode_launches(
    layer: DeviceLayer, q: Tensor, lengths: Tensor, out: Tensor, *, raw: Tensor | None = None, n_splits: int = 8
) -> tuple[Launch, Launch]:
    """The two launches of `decode`, which write `out`, [batch, n_head, d_v]."""
    batch, n_head, d_k = q.shape
    k, v = layer.k, layer.v
    group = n_head // k.n_head
    if n_head % k.n_head or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{n_head} query heads do not share {k.n_head} KV heads, at most {MAX_GROUP} each")
    if (raw is None) != (layer.offset is None):
        raise ValueError("queries before the transform are given where keys have a rotating offset, and only there")
    if not q.is_contiguous() or (raw is not None and (raw.shape != q.shape or not raw.is_contiguous())):
        raise ValueError("queries must be contiguous, before and after the transform alike")
    offset = layer.offset
    parts = torch.empty(batch, n_splits + 1, n_head, v.d, dtype=torch.float32, device=q.device)
    stats = torch.empty(batch, n_splits + 1, n_head, 2, dtype=torch.float32, device=q.device)
    n_rot = 0 if offset is None else offset.angles.shape[1]
    tables = (stats, stats, stats) if offset is None else (offset.offset, offset.angles, offset.fine)
    attention = Launch(
        decode_kernel,
        (k.n_head, n_splits + 1, batch),
        {
            "q": q,
            "raw": q if raw is None else raw,
            "lengths": lengths,
            "kinds": layer.kind_of_heads(),
            "k_table": k.table,
            "v_table": v.table,
            "k_units": k.codes,
            "k_params": k.params,
            "k_full": k.full,
            "v_units": v.codes,
            "v_params": v.params,
            "v_full": v.full,
            **dict(zip(("mu", "angles", "fine"), tables, strict=True)),
            "out": parts,
            "stats": stats,
            "group": group,
            "stride_sequence": q.stride(0),
            "stride_q": q.stride(1),
            "k_units_stride": k.codes.stride(0),
            "k_params_stride": k.params.stride(0),
            "v_units_stride": v.codes.stride(0),
            "v_params_stride": v.params.stride(0),
            "k_capacity": k.capacity,
            "v_capacity": v.capacity,
            "sinks": k.sinks,
            "window": layer.window,
            "k_slots": k.slots,
            "v_slots": v.slots,
            "scale": layer.scale,
        },
        {
            "D_K": d_k,
            "D_V": v.d,
            "KINDS": layer.kinds,
            "N_KINDS": len(layer.kinds),
            "BLOCK_K": k.block,
            "BLOCK_V": v.block,
            "N": layer.tile,
            "SLIDING": layer.sliding,
            "CAP": layer.cap,
            "N_ROT": n_rot,
            "HALF": max(triton.next_power_of_2(n_rot // 2), 16),
            "NEOX": offset is not None and offset.style == "neox",
            "PRECISION": "ieee" if torch.version.hip else "tf32x3",
        },
        # The output must fit the registers beside the codes; AMD's have room for it, and lose it with more warps.
        num_warps=8 if d_k + v.d > 256 and not torch.version.hip else 4,
    )
    combine = Launch(
        combine_kernel,
        (n_head, batch, 1),
        {
            "parts": parts,
            "stats": stats,
            "inverse": parts if layer.inverse is None else layer.inverse,
            "out": out,
            "n_parts": n_splits + 1,
            "n_kv": k.n_head,
            "group": group,
            "stride_sequence": out.stride(0),
            "stride_out": out.stride(1),
        },
        {"D": v.d, "WIDTH": triton.next_power_of_2(v.d), "UNDO": layer.inverse is not None, "TILE": 16},
    )
    return attention, combine
