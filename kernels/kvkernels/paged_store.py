"""Packed storage of one side of one layer in pages of 32 tokens: what the CPU kernels read (see `pack.cpu`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .attend.cpu_tiles import UNPACK_ARGS, unpack_function
from .jit import F32, I64, PTR, Function
from .pack.cpu import PAGE, page_bytes
from .quantize.cpu import PACK_ARGS, SideName, pack_function
from .spec import QuantSpec

_C_TYPES = {PTR: ctypes.c_void_p, I64: ctypes.c_int64, F32: ctypes.c_float}


def call_function(function: Function, arg_types: Sequence[object]) -> ctypes._CFunctionType:
    """A compiled function as something that Python calls; it runs without the interpreter lock."""
    prototype = ctypes.CFUNCTYPE(None, *(_C_TYPES[t] for t in arg_types))
    return prototype(function.address)


def aligned_zeros(n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] at a multiple of 64. Memory that was never written stays unoccupied."""
    raw = np.zeros(n_bytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + n_bytes]


class PagedHead:
    """One head's pages. codes: uint8 [pages, bytes].  scale, minimum: float16 (empty where there is none)."""

    def __init__(self, side: SideName, spec: QuantSpec, clip: float, n_pages: int, d: int) -> None:
        self.side, self.spec, self.clip, self.d = side, spec, clip, d
        size = page_bytes(d, spec.bits)
        self.codes = aligned_zeros(n_pages * size).reshape(n_pages, size)
        shape: tuple[int, ...] = (0,)
        if spec.quantized:
            tokens = n_pages * PAGE
            shape = (n_pages, d // spec.group, PAGE) if spec.axis == "token" else (-(-tokens // spec.group), d)
        n_halves = int(np.prod(shape))
        self.scale = aligned_zeros(2 * n_halves).view(np.float16).reshape(shape)
        self.minimum = aligned_zeros(2 * n_halves * spec.has_minimum).view(np.float16)
        if spec.has_minimum:
            self.minimum = self.minimum.reshape(shape)
        self.pack, self.unpack = pack_function(side, spec, d), unpack_function(side, spec, d)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes

    @property
    def pointers(self) -> tuple[int, int, int]:
        """Addresses of codes, scale and minimum."""
        return self.codes.ctypes.data, self.scale.ctypes.data, self.minimum.ctypes.data


class PagedStore:
    """One side of one layer, up to `capacity` packed tokens (rounded up to whole pages).

    specs, clips: one per KV head.  head_dim: channels, a multiple of 8.
    """

    def __init__(
        self, side: SideName, specs: Sequence[QuantSpec], clips: Sequence[float], capacity: int, head_dim: int
    ) -> None:
        self.block = max(spec.block for spec in specs)
        if any(self.block % spec.block for spec in specs):
            raise ValueError("the channel-axis groups of one layer must divide one another")
        if head_dim % 8:
            raise ValueError(f"head size {head_dim} is not a multiple of 8")
        self.n_head, self.head_dim = len(specs), head_dim
        self.capacity = capacity // self.block * self.block
        self.quantized = any(spec.quantized for spec in specs)
        n_pages = -(-self.capacity // PAGE)
        self.heads = [PagedHead(side, s, c, n_pages, head_dim) for s, c in zip(specs, clips, strict=True)]

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(head.n_bytes for head in self.heads)

    def write(self, start: int, x: Tensor) -> None:
        """Pack x, float16 [n_head, n_tok, d], as packed tokens `start ..`; both ends are multiples of the block."""
        if x.dtype != torch.float16 or start < 0 or start + x.shape[1] > self.capacity:
            raise ValueError("write takes float16 tokens that lie within the capacity")
        for rows, head in zip(x.contiguous(), self.heads, strict=True):
            pack = call_function(head.pack, PACK_ARGS)
            pack(rows.data_ptr(), start, x.shape[1], *head.pointers, head.clip)

    def read(self, stop: int, dtype: torch.dtype) -> Tensor:
        """Restored values of packed tokens `0 .. stop - 1`: [n_head, stop, d], computed in float32."""
        n_pages = -(-stop // PAGE)
        out = torch.empty(self.n_head, n_pages * PAGE, self.head_dim)
        tile = np.empty(PAGE * self.head_dim, np.float32)
        for i, head in enumerate(self.heads):
            unpack = call_function(head.unpack, UNPACK_ARGS)
            for page in range(n_pages):
                unpack(*head.pointers, page, tile.ctypes.data)
                rows = tile.reshape(-1, PAGE).T if head.side == "k" else tile.reshape(PAGE, -1)
                out[i, page * PAGE : (page + 1) * PAGE] = torch.from_numpy(rows)
        return out[:, :stop].to(dtype)
