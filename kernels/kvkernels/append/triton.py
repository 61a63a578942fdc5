"""New keys and values into the cache on the GPU: what the Triton kernel is called with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attend.triton import DeviceLayer, kind
from ..launch import Launch
from .triton_kernel import append_kernel


@dataclass(frozen=True)
class Incoming:
    """How new tokens of one side become what is stored: `T (x - offset)`.

    matrix: float32 [n_kv, d, d], `T`, or None for identity.  offset: float32 [n_kv, d], or None. A rotating offset is
    that of `DeviceLayer.offset`.
    """

    matrix: Tensor | None = None
    offset: Tensor | None = None


def append(
    layer: DeviceLayer,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    *,
    keys: Incoming | None = None,
    values: Incoming | None = None,
    bad: Tensor | None = None,
) -> None:
    """Store new tokens after the `before` ones that each sequence has, and pack what leaves the window.

    k: [batch, n_kv, n, d_k], any float type, after RoPE.  v: [batch, n_kv, n, d_v].  before: int32 [batch].
    n is at most `slots - (window + block - 1)` of either side: the ring must hold them beside what is not packed yet.
    bad: int32 [1], becomes 1 where a key or value does not fit f16; None does not look.
    """
    append_launch(layer, k, v, before, keys=keys, values=values, bad=bad).run()


def append_launch(
    layer: DeviceLayer,
    k: Tensor,
    v: Tensor,
    before: Tensor,
    *,
    keys: Incoming | None = None,
    values: Incoming | None = None,
    bad: Tensor | None = None,
) -> Launch:
    """The launch of `append`."""
    keys, values, offset = keys or Incoming(), values or Incoming(), layer.offset
    n_new, n_kv = k.shape[2], layer.k.n_head
    for name, side, x in (("keys", layer.k, k), ("values", layer.v, v)):
        room = side.slots - (layer.window + side.block - 1)
        if n_new > room:
            raise ValueError(
                f"{n_new} new tokens do not fit the {room} spare slots of the {name}; append fewer at a time"
            )
        if x.stride(-1) != 1:
            raise ValueError(f"the channels of the {name} must lie side by side")
    tokens = max(16, layer.k.block, layer.v.block)
    kinds_k, kinds_v = (sorted({kind(spec) for spec in side.specs}) for side in (layer.k, layer.v))
    numbers = [[kinds.index(kind(s)) for s in side.specs] for kinds, side in ((kinds_k, layer.k), (kinds_v, layer.v))]
    n_packed = n_new + max(layer.k.block, layer.v.block) - 1
    device = k.device
    clips = torch.tensor([layer.k.clips, layer.v.clips], dtype=torch.float32, device=device)

    def given(x: Tensor | None) -> Tensor:
        return clips if x is None else x  # a pointer that no program reads

    return Launch(
        append_kernel,
        (2 * n_kv, -(-n_new // tokens) + -(-n_packed // tokens), k.shape[0]),
        {
            "k": k,
            "v": v,
            "before": before,
            "clips": clips,
            "kinds": torch.tensor(numbers, dtype=torch.int32, device=device),
            "k_table": layer.k.table,
            "v_table": layer.v.table,
            "k_units": layer.k.codes,
            "k_params": layer.k.params,
            "k_full": layer.k.full,
            "v_units": layer.v.codes,
            "v_params": layer.v.params,
            "v_full": layer.v.full,
            "k_offset": given(keys.offset),
            "mu": given(None if offset is None else offset.offset),
            "angles": given(None if offset is None else offset.angles),
            "k_matrix": given(keys.matrix),
            "v_offset": given(values.offset),
            "v_matrix": given(values.matrix),
            "bad": torch.zeros(1, dtype=torch.int32, device=device) if bad is None else bad,
            "n_new": n_new,
            **dict(zip(("k_sequence", "k_head", "k_token"), k.stride(), strict=False)),
            **dict(zip(("v_sequence", "v_head", "v_token"), v.stride(), strict=False)),
            "k_units_stride": layer.k.codes.stride(0),
            "k_params_stride": layer.k.params.stride(0),
            "v_units_stride": layer.v.codes.stride(0),
            "v_params_stride": layer.v.params.stride(0),
            "k_capacity": layer.k.capacity,
            "v_capacity": layer.v.capacity,
            "sinks": layer.k.sinks,
            "window": layer.window,
            "k_slots": layer.k.slots,
            "v_slots": layer.v.slots,
        },
        {
            "D_K": layer.k.d,
            "D_V": layer.v.d,
            "KINDS_K": tuple(kinds_k),
            "KINDS_V": tuple(kinds_v),
            "N_KINDS_K": len(kinds_k),
            "N_KINDS_V": len(kinds_v),
            "BLOCK_K": layer.k.block,
            "BLOCK_V": layer.v.block,
            "TOKENS": tokens,
            "TRANSFORM_K": keys.matrix is not None,
            "TRANSFORM_V": values.matrix is not None,
            "CONSTANT_K": keys.offset is not None,
            "CONSTANT_V": values.offset is not None,
            "N_ROT": 0 if offset is None else offset.angles.shape[1],
            "NEOX": offset is not None and offset.style == "neox",
            "PRECISION": "ieee" if torch.version.hip else "tf32x3",
        },
        # Fused multiply and add would round once where the definition rounds twice, and change codes.
        options={"enable_fp_fusion": False},
    )
