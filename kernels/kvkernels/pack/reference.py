"""Bit planes: the definition of the packed layout.

A row of `d` codes becomes `d * bits / 8` bytes: plane after plane (see `kvkernels.spec.PLANES`; the first plane holds
the lowest bits). In a plane of width `w`, byte `j` holds the `w`-bit parts of channels `j, j + m, j + 2 m, ...` with
`m = d * w / 8`, the first in the lowest bits. So unpacking is a shift and a mask of whole byte vectors, and adjacent
channels come out of adjacent bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import PLANES


def packed_bytes(d: int, bits: int) -> int:
    """Bytes of one packed row of `d` codes; `d` must be a multiple of 8."""
    if d % 8:
        raise ValueError(f"a packed row needs a multiple of 8 channels, not {d}")
    return d * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., d], each below 2^bits, to uint8 [..., d * bits / 8]."""
    d = codes.shape[-1]
    out = torch.empty(*codes.shape[:-1], packed_bytes(d, bits), dtype=torch.uint8, device=codes.device)
    shift = start = 0
    for width in PLANES[bits]:
        m = d * width // 8
        part = (codes >> shift) & (2**width - 1)
        plane = part[..., :m].clone()
        for i in range(1, 8 // width):
            plane |= part[..., i * m : (i + 1) * m] << (i * width)
        out[..., start : start + m] = plane
        shift += width
        start += m
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., d] from what `pack` returns."""
    d = packed.shape[-1] * 8 // bits
    codes = torch.zeros(*packed.shape[:-1], d, dtype=torch.uint8, device=packed.device)
    shift = start = 0
    for width in PLANES[bits]:
        m = d * width // 8
        plane = packed[..., start : start + m]
        for i in range(8 // width):
            codes[..., i * m : (i + 1) * m] |= ((plane >> (i * width)) & (2**width - 1)) << shift
        shift += width
        start += m
    return codes
