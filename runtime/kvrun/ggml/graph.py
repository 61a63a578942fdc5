"""Graphs that are built once and computed many times, and the memory they work in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from .library import ALL_THREADS, F32, I32, SUCCESS, GgmlError, InitParams, Library
from .tensors import aligned_copy

_C_TYPES = {F32: (ctypes.c_float, np.float32), I32: (ctypes.c_int32, np.int32)}


class Backend:
    """ggml's CPU backend with `n_threads` threads.

    All graphs of a backend share the memory for their intermediate results, so only one of them holds results at a
    time. generation: changes when that memory moved; graphs allocated before must be built anew.
    """

    def __init__(self, lib: Library, n_threads: int) -> None:
        self.lib, self.n_threads, self.generation = lib, n_threads, 0
        self._backend = lib.ggml_backend_cpu_init()
        self._alloc = lib.ggml_gallocr_new(lib.ggml_backend_cpu_buffer_type())
        if not self._backend or not self._alloc:
            raise GgmlError("ggml's CPU backend did not start; use --engine reference")
        lib.ggml_backend_cpu_set_n_threads(self._backend, n_threads)
        self._size = 0

    def allocate(self, graph: int) -> None:
        """Give a graph's intermediate results their places."""
        if not self.lib.ggml_gallocr_alloc_graph(self._alloc, graph):
            raise MemoryError("there is not enough memory for the intermediate results; use a smaller -ub")
        size = self.n_bytes
        if size != self._size:
            self._size = size
            self.generation += 1

    def compute(self, graph: int) -> None:
        """Run an allocated graph."""
        status = self.lib.ggml_backend_graph_compute(self._backend, graph)
        if status != SUCCESS:
            raise GgmlError(f"ggml could not compute a graph (status {status}); use --engine reference")

    def supports(self, tensor: int) -> bool:
        """Whether the CPU can compute what a tensor stands for."""
        return bool(self.lib.ggml_backend_supports_op(self._backend, tensor))

    @property
    def n_bytes(self) -> int:
        """Bytes for intermediate results."""
        return int(self.lib.ggml_gallocr_get_buffer_size(self._alloc, 0))

    def close(self) -> None:
        """Give the memory back; graphs must not be computed any more."""
        if self._backend:
            self.lib.ggml_gallocr_free(self._alloc)
            self.lib.ggml_backend_free(self._backend)
            self._backend = None


class Memory:
    """Tensors that outlive graphs: inputs, results, small matrices."""

    def __init__(self, backend: Backend, max_tensors: int = 16) -> None:
        self.lib, self._backend = backend.lib, backend
        self._context = self.lib.ggml_init(InitParams((max_tensors + 1) * self.lib.ggml_tensor_overhead(), None, True))
        self._buffers: list[int] = []
        self._arrays: list[np.ndarray] = []

    def tensor(self, array: np.ndarray) -> int:
        """A ggml tensor (a pointer) over a copy of a float32 or int32 array; the last axis comes first in ggml."""
        kind = {np.dtype(np.float32): F32, np.dtype(np.int32): I32}[array.dtype]
        shape = array.shape[::-1]
        names = {1: self.lib.ggml_new_tensor_1d, 2: self.lib.ggml_new_tensor_2d, 3: self.lib.ggml_new_tensor_3d}
        tensor = names[len(shape)](self._context, kind, *shape)
        copy = aligned_copy(array)
        buffer = self.lib.ggml_backend_cpu_buffer_from_ptr(copy.ctypes.data, copy.nbytes)
        if not tensor or self.lib.ggml_backend_tensor_alloc(buffer, tensor, copy.ctypes.data) != SUCCESS:
            raise MemoryError("ggml did not take a tensor")
        self._arrays.append(copy)
        self._buffers.append(buffer)
        return int(tensor)

    def array(self, tensor: int) -> np.ndarray:
        """The array under a tensor that was made here, flat float32 or int32."""
        address = self.lib.ggml_get_data(tensor)
        copy = next(a for a in self._arrays if a.ctypes.data == address)
        return copy

    def close(self) -> None:
        """Give ggml's bookkeeping back."""
        if self._context:
            for buffer in self._buffers:
                self.lib.ggml_backend_buffer_free(buffer)
            self.lib.ggml_free(self._context)
            self._context = None


class Graph:
    """A graph under construction, then a graph to compute.

    Any of ggml's functions that take a context first are called through `op`.
    """

    def __init__(self, backend: Backend, max_nodes: int) -> None:
        self.backend, self.lib = backend, backend.lib
        lib = self.lib
        size = lib.ggml_graph_overhead_custom(max_nodes, False) + (2 * max_nodes + 8) * lib.ggml_tensor_overhead()
        self._context = lib.ggml_init(InitParams(size, None, True))
        self.graph = lib.ggml_new_graph_custom(self._context, max_nodes, False)
        self._kept: list[Any] = []
        self.generation = -1

    def op(self, name: str, *args: Any) -> int:
        """`ggml_<name>(context, *args)`: a new tensor."""
        return int(getattr(self.lib, f"ggml_{name}")(self._context, *args))

    def custom(
        self, shape: Sequence[int], args: Sequence[int], function: int, data: np.ndarray, inplace: int | None = None
    ) -> int:
        """An operation of our own on all threads: `function(tensor, thread, n_threads, data)`.

        shape: of the float32 result, ggml's order.  args: tensors that it depends on.  function: its address.
        inplace: the tensor that it changes, in place of `shape`.
        """
        self._kept.append(data)
        sources = (ctypes.c_void_p * len(args))(*args)
        rest = (sources, len(args), function, ALL_THREADS, data.ctypes.data)
        if inplace is not None:
            return self.op("custom_inplace", inplace, *rest)
        return self.op("custom_4d", F32, *(list(shape) + [1] * (4 - len(shape))), *rest)

    def want(self, tensor: int) -> None:
        """Compute this tensor, and what it depends on, after what was wanted before."""
        self.lib.ggml_build_forward_expand(self.graph, tensor)

    def allocate(self) -> None:
        """Give all intermediate results their places; to be done once, when everything is built."""
        self.backend.allocate(self.graph)
        self.generation = self.backend.generation

    @property
    def current(self) -> bool:
        """Whether the places given by `allocate` still hold."""
        return self.generation == self.backend.generation

    def address(self, tensor: int) -> int:
        """Where a tensor's data lies, after `allocate`."""
        return int(self.lib.ggml_get_data(tensor))

    def compute(self) -> None:
        """Run it."""
        self.backend.compute(self.graph)

    def close(self) -> None:
        """Give the graph's memory back."""
        if self._context:
            self.lib.ggml_free(self._context)
            self._context = None
