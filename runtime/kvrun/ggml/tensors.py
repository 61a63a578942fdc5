"""The tensors of a mapped GGUF file, handed to ggml where they lie."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..errors import UnsupportedModelError
from ..gguf_file import GGUFFile
from .library import Library

#: Where ggml wants tensors to start, in bytes.
ALIGNMENT = 32
#: Types whose products ggml's CPU code has no kernel for, although it knows their names.
_NOT_MULTIPLIED = {"I8", "I16", "I32", "I64", "F64", "Q8_K", "Q8_1"}


class FileTensors:
    """ggml tensors over the memory map of `file`: nothing is copied, except tensors that lie unaligned.

    The file must stay open, and its map in place, as long as this lives.
    """

    def __init__(self, lib: Library, file: GGUFFile) -> None:
        self.lib, self.file = lib, file
        self._copies: list[np.ndarray] = []
        self._buffers: list[int] = []
        self._made: dict[str, int] = {}
        names = list(file.tensors)
        overhead = lib.ggml_tensor_overhead()
        self._context = lib.ggml_init(_params((len(names) + 1) * overhead))
        starts = {name: self._map(name) for name in names}
        self._whole: dict[str, int] = {}
        for part in file.parts:
            aligned = [name for name in part.tensors if starts[name] % ALIGNMENT == 0]
            if aligned:
                # One buffer spans all tensors of a file, so that ggml sees one allocation, as in llama.cpp.
                low = min(starts[name] for name in aligned)
                high = max(starts[name] + file.tensors[name].n_bytes for name in aligned)
                self._whole |= dict.fromkeys(aligned, self._buffer(low, high - low))
        self._starts = starts

    def _map(self, name: str) -> int:
        return int(self.file.tensor_bytes(name).ctypes.data)

    def _buffer(self, address: int, n_bytes: int) -> int:
        buffer = self.lib.ggml_backend_cpu_buffer_from_ptr(address, n_bytes)
        self._buffers.append(buffer)
        return int(buffer)

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def __getitem__(self, name: str) -> int:
        """The ggml tensor (a pointer). UnsupportedModelError where ggml does not know the type."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def optional(self, name: str) -> int | None:
        """The ggml tensor, or None where the file has none of this name."""
        if name not in self:
            return None
        return self[name]

    def _make(self, name: str) -> int:
        lib, info = self.lib, self.file.tensors[name]
        kind = int(info.type)
        shape = [int(n) for n in reversed(info.shape)]
        if info.type.name in _NOT_MULTIPLIED or self._expected_bytes(kind, shape) != info.n_bytes:
            raise UnsupportedModelError(
                f"{self.file.path}: ggml {lib.version} cannot multiply {name} of type {info.type.name}; "
                "use --engine reference or another quantization"
            )
        new = {1: lib.ggml_new_tensor_1d, 2: lib.ggml_new_tensor_2d, 3: lib.ggml_new_tensor_3d}.get(len(shape))
        if new is None:
            raise UnsupportedModelError(f"{self.file.path}: {name} has {len(shape)} dimensions; choose another model")
        tensor = new(self._context, kind, *shape)
        start, buffer = self._starts[name], self._whole.get(name)
        if start % ALIGNMENT:
            copy = aligned_copy(self.file.tensor_bytes(name))
            self._copies.append(copy)
            start = copy.ctypes.data
            buffer = self._buffer(start, copy.nbytes)
        if lib.ggml_backend_tensor_alloc(buffer, tensor, start) != 0:
            raise MemoryError(f"ggml did not take tensor {name}")
        return int(tensor)

    def _expected_bytes(self, kind: int, shape: list[int]) -> int:
        """What ggml would reserve, 0 for types that it does not have."""
        block = int(self.lib.ggml_blck_size(kind))
        if block == 0 or shape[0] % block:
            return 0
        return int(self.lib.ggml_row_size(kind, shape[0])) * int(np.prod(shape[1:], dtype=np.int64))

    def close(self) -> None:
        """Give ggml's bookkeeping back; the tensors must not be used any more."""
        if self._context:
            for buffer in self._buffers:
                self.lib.ggml_backend_buffer_free(buffer)
            self.lib.ggml_free(self._context)
            self._context = None
            self._made.clear()
            self._buffers.clear()


def _params(n_bytes: int) -> Any:
    from .library import InitParams

    return InitParams(n_bytes, None, True)


def aligned_copy(data: np.ndarray) -> np.ndarray:
    """The bytes of an array, uint8 [n], at an address that ggml accepts."""
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    raw = np.empty(flat.nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    out = raw[skip : skip + flat.nbytes]
    ctypes.memmove(out.ctypes.data, flat.ctypes.data, flat.nbytes)
    return out
