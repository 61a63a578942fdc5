"""Packed storage of one side (keys or values) of one layer: buffers for all heads, whatever widths they have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pack import pack, packed_bytes, unpack
from .quantize import decode, encode
from .spec import QuantSpec


class Band:
    """Heads of a layer that are stored alike share one set of buffers.

    heads: int64 [n], which KV heads.  codes: uint8 [n, capacity, bytes] (float16 [n, capacity, d] for 16 bits).
    scale, minimum: float16, [n, capacity, d / group] or [n, capacity / group, d]; None for 16 bits, and only the
    uniform code has a minimum.
    """

    def __init__(self, heads: Sequence[int], spec: QuantSpec, clip: Sequence[float], capacity: int, d: int) -> None:
        n = len(heads)
        self.spec = spec
        self.heads = torch.tensor(heads, dtype=torch.int64)
        self.clip = torch.tensor(clip, dtype=torch.float32) if any(c != 1.0 for c in clip) else None
        self.scale: Tensor | None = None
        self.minimum: Tensor | None = None
        if not spec.quantized:
            self.codes = torch.empty(n, capacity, d, dtype=torch.float16)
            return
        self.codes = torch.empty(n, capacity, packed_bytes(d, spec.bits), dtype=torch.uint8)
        shape = (n, capacity, d // spec.group) if spec.axis == "token" else (n, capacity // spec.group, d)
        self.scale = torch.empty(shape, dtype=torch.float16)
        if spec.has_minimum:
            self.minimum = torch.empty(shape, dtype=torch.float16)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.minimum) if t is not None)

    def _rows(self, start: int, stop: int) -> slice:
        """Rows of `scale` and `minimum` that belong to tokens `start .. stop - 1`."""
        step = self.spec.block
        return slice(start // step, stop // step)

    def write(self, start: int, x: Tensor) -> None:
        """Quantize and pack x, float16 [n, n_tok, d], as tokens `start ..`."""
        stop = start + x.shape[1]
        rows = self._rows(start, stop)
        if self.scale is None:
            self.codes[:, start:stop] = x
            return
        codes, self.scale[:, rows], minimum = encode(x, self.spec, self.clip)
        if self.minimum is not None:
            assert minimum is not None
            self.minimum[:, rows] = minimum
        self.codes[:, start:stop] = pack(codes, self.spec.bits)

    def copy(self, source: Band, start: int, stop: int, to: int) -> None:
        """Take tokens `start .. stop - 1` of a band that is stored alike, as they are, as tokens `to ..`."""
        end = to + stop - start
        self.codes[:, to:end] = source.codes[:, start:stop]
        for mine, theirs in ((self.scale, source.scale), (self.minimum, source.minimum)):
            if mine is not None and theirs is not None:
                mine[:, self._rows(to, end)] = theirs[:, self._rows(start, stop)]

    def read(self, stop: int, dtype: torch.dtype) -> Tensor:
        """Restored values of tokens `0 .. stop - 1`: [n, stop, d] in `dtype`."""
        if self.scale is None:
            return self.codes[:, :stop].to(dtype)
        rows = self._rows(0, stop)
        codes = unpack(self.codes[:, :stop], self.spec.bits)
        minimum = None if self.minimum is None else self.minimum[:, rows]
        return decode((codes, self.scale[:, rows], minimum), self.spec, dtype)


class PackedStore:
    """One side of one layer, up to `capacity` packed tokens.

    specs, clips: one per KV head.  head_dim: channels.  All heads are packed `block` tokens at a time.
    """

    def __init__(self, specs: Sequence[QuantSpec], clips: Sequence[float], capacity: int, head_dim: int) -> None:
        self.block = max(spec.block for spec in specs)
        if any(self.block % spec.block for spec in specs):
            raise ValueError("the channel-axis groups of one layer must divide one another")
        self.n_head = len(specs)
        self.head_dim = head_dim
        self.capacity = capacity // self.block * self.block
        self.quantized = any(spec.quantized for spec in specs)
        alike: dict[QuantSpec, list[int]] = {}
        for head, spec in enumerate(specs):
            alike.setdefault(spec, []).append(head)
        self.bands = [
            Band(heads, spec, [clips[h] for h in heads], self.capacity, head_dim) for spec, heads in alike.items()
        ]

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        return sum(band.n_bytes for band in self.bands)

    def write(self, start: int, x: Tensor) -> None:
        """Pack x, float16 [n_head, n_tok, d], as packed tokens `start ..`; both ends are multiples of the block."""
        for band in self.bands:
            band.write(start, x if len(self.bands) == 1 else x[band.heads])

    def copy(self, source: PackedStore, start: int, stop: int, to: int) -> None:
        """Take packed tokens `start .. stop - 1` of a store of the same heads, as they are, as tokens `to ..`."""
        for mine, theirs in zip(self.bands, source.bands, strict=True):
            mine.copy(theirs, start, stop, to)

    def read(self, stop: int, dtype: torch.dtype) -> Tensor:
        """Restored values of packed tokens `0 .. stop - 1`: [n_head, stop, d]; lives as long as the caller keeps it."""
        if len(self.bands) == 1:
            return self.bands[0].read(stop, dtype)
        out = torch.empty(self.n_head, stop, self.head_dim, dtype=dtype)
        for band in self.bands:
            out[band.heads] = band.read(stop, dtype)
        return out
