"""Pieces: the packed layout of the GPU kernels, in torch; the definition that they are held to.

A head's channels are cut into pieces, each a power of two from 16 to 128 channels and each within one group of the
token axis, so that a piece meets one scale and one minimum and no product is filled up with nothing. A token's `w`
codes of one plane (see `kvkernels.spec.PLANES`) of one piece are a little-endian bit stream of `w * width` bits. These
streams lie token after token, so a tile of tokens is one run of memory that is read 16 bytes at a time whatever the
width, and a new token touches only bytes of its own. A head is piece after piece, plane after plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import PLANES, QuantSpec

#: The widest piece (channels): a product with one fits in the registers of four warps.
MAX_PIECE = 128
#: The narrowest piece (channels), what the matrix units multiply at a time.
MIN_PIECE = 16


def pieces_of_group(group: int) -> tuple[tuple[int, int], ...]:
    """(first channel, channels) of every piece of a run of `group` channels, which is a multiple of `MIN_PIECE`."""
    out, start = [], 0
    while start < group:
        width = MAX_PIECE
        while width > group - start:
            width //= 2
        out.append((start, width))
        start += width
    return tuple(out)


def run_length(spec: QuantSpec, d: int) -> int:
    """Channels that share a scale, which pieces must not leave: a group of the token axis, else the whole head."""
    return spec.group if spec.quantized and spec.axis == "token" else d


def check_device_spec(spec: QuantSpec, d: int) -> None:
    """Raise ValueError where the GPU kernels cannot store a head of `d` channels this way."""
    spec.check_head_dim(d)
    if spec.code != "uniform":
        raise ValueError(f"the GPU kernels have no {spec.code} blocks; the reference engine has")
    if run_length(spec, d) % MIN_PIECE or d % MIN_PIECE:
        raise ValueError(f"the GPU kernels need groups and heads of a multiple of {MIN_PIECE} channels")
    if spec.axis == "channel" and (spec.group < 16 or spec.group > 128 or spec.group & (spec.group - 1)):
        raise ValueError(f"the GPU kernels need 16, 32, 64 or 128 tokens in a group, not {spec.group}")


def streams(codes: Tensor, width: int) -> Tensor:
    """Little-endian bit streams: uint8 [..., n] below 2^width to uint8 [..., n * width / 8]."""
    per_byte = 8 // width
    parts = codes.reshape(*codes.shape[:-1], -1, per_byte).to(torch.int32)
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.int32) * width
    return (parts << shifts).sum(-1).to(torch.uint8)


def layout(spec: QuantSpec, d: int) -> list[tuple[int, int, int, int, int]]:
    """(first channel, channels, plane width, lowest bit, bytes per token before it) of every piece and plane."""
    out, at = [], 0
    run = run_length(spec, d)
    for first in range(0, d, run):
        for start, channels in pieces_of_group(run):
            shift = 0
            for width in PLANES[spec.bits]:
                out.append((first + start, channels, width, shift, at))
                shift += width
                at += channels * width // 8
    return out


def store_codes(codes: Tensor, memory: Tensor, first: int, spec: QuantSpec) -> None:
    """Write one head's codes as tokens `first ..`.

    codes: uint8 [n, d].  memory: uint8 [capacity * d * bits / 8], the head's part of the store.
    """
    n, d = codes.shape
    capacity = memory.numel() * 8 // (d * spec.bits)
    for start, channels, width, shift, at in layout(spec, d):
        row = channels * width // 8
        part = (codes[:, start : start + channels] >> shift) & (2**width - 1)
        at = at * capacity + first * row
        memory[at : at + n * row] = streams(part, width).reshape(-1)
