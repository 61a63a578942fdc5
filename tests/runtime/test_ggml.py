"""ggml by ctypes, against gguf's own dequantizer."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

from kvrun.errors import UnsupportedModelError
from kvrun.ggml import Backend, FileTensors, GgmlError, Graph, Memory, load_library
from kvrun.ggml import library as library_module
from kvrun.gguf_file import GGUFFile

T = gguf.GGMLQuantizationType
#: Types that gguf can write; the K types are tested on files that exist (`test_cpu_engine.py`).
WRITABLE = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.TQ1_0, T.TQ2_0]
#: Types with random blocks whose scales are then made harmless: f16 scales at these byte offsets of a block.
K_SCALES = {T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,), T.IQ4_NL: (0,)}


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, cols: int) -> np.ndarray:
    """A matrix of random codes of a type that gguf cannot write, uint8 [rows, bytes]."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(kind).integers(0, 256, (rows, cols // block, n_bytes), dtype=np.uint8)
    for at in K_SCALES[kind]:
        data[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data.reshape(rows, -1)


def matrix_file(path: Path, kind: gguf.GGMLQuantizationType, rows: int, cols: int) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "test")
    if kind in K_SCALES:
        data = random_blocks(kind, rows, cols)
    else:
        data = quantize(np.random.default_rng(0).standard_normal((rows, cols), np.float32), kind)
    writer.add_tensor("odd", np.ones(5, np.float32))
    writer.add_tensor("m", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def result(graph: Graph, tensor: int, n: int) -> np.ndarray:
    return np.array((ctypes.c_float * n).from_address(graph.address(tensor)))


@pytest.mark.parametrize("kind", [*WRITABLE, *K_SCALES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 37])
def test_products_of_every_type_are_gguf_s_values_times_the_input(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, n: int
) -> None:
    rows, cols = 24, 512
    file = matrix_file(tmp_path / "m.gguf", kind, rows, cols)
    backend = Backend(load_library(), 2)
    memory, tensors = Memory(backend), FileTensors(backend.lib, file)
    x = np.random.default_rng(1).standard_normal((n, cols), np.float32)
    graph = Graph(backend, 8)
    product = graph.op("mul_mat", tensors["m"], memory.tensor(x))
    backend.lib.ggml_set_output(product)
    graph.want(product)
    graph.allocate()
    want = x.astype(np.float64) @ file.dequantize("m").T
    for _ in range(2):  # a graph is built once and computed again
        graph.compute()
        got = result(graph, product, n * rows).reshape(n, rows)
        # ggml rounds the input to 8 bits for quantized types, to f16 or bf16 for those.
        limit = {T.F32: 1e-5, T.F16: 1e-3, T.BF16: 6e-3}.get(kind, 1.5e-2)
        error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
        assert error < limit, f"{kind.name}: RMS ratio {error:.2e}"
    # In place: the tensor is where the file is mapped.
    assert backend.lib.ggml_get_data(tensors["m"]) == file.tensor_bytes("m").ctypes.data
    graph.close()
    memory.close()
    tensors.close()
    backend.close()


def test_rows_of_an_embedding(tmp_path: Path) -> None:
    file = matrix_file(tmp_path / "m.gguf", T.Q5_0, 50, 64)
    backend = Backend(load_library(), 1)
    memory, tensors = Memory(backend), FileTensors(backend.lib, file)
    ids = np.array([49, 0, 7], np.int32)
    graph = Graph(backend, 8)
    rows = graph.op("get_rows", tensors["m"], memory.tensor(ids))
    backend.lib.ggml_set_output(rows)
    graph.want(rows)
    graph.allocate()
    graph.compute()
    assert np.array_equal(result(graph, rows, 3 * 64).reshape(3, 64), file.dequantize("m")[ids])


def test_graphs_share_memory_and_notice_when_it_moves() -> None:
    backend = Backend(load_library(), 1)
    memory = Memory(backend)

    def make(n: int) -> tuple[Graph, int]:
        x = memory.tensor(np.full((n, 64), 2.0, np.float32))
        graph = Graph(backend, 8)
        total = graph.op("add", graph.op("mul", x, x), x)
        backend.lib.ggml_set_output(total)
        graph.want(total)
        graph.allocate()
        return graph, total

    small, _ = make(2)
    large, total = make(3000)
    assert large.current and not small.current
    again, again_total = make(2)
    assert large.current and again.current
    again.compute()
    assert (result(again, again_total, 128) == 6).all()
    large.compute()
    assert (result(large, total, 3000 * 64) == 6).all()


def test_types_without_a_product_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "test")
    writer.add_tensor("m", np.zeros((4, 32), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = FileTensors(load_library(), GGUFFile(tmp_path / "i.gguf"))
    with pytest.raises(UnsupportedModelError, match="--engine reference"):
        tensors["m"]


def test_a_library_without_a_function_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    library_module.load_library.cache_clear()
    monkeypatch.setitem(library_module.FUNCTIONS, "ggml_of_the_future", (None, ()))
    with pytest.raises(GgmlError, match=r"no ggml_of_the_future; .*tested with .*--engine reference") as caught:
        load_library()
    assert "\n" not in str(caught.value)
    library_module.load_library.cache_clear()


def test_a_package_that_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library_module.load_library.cache_clear()
    monkeypatch.setattr(library_module, "PACKAGE", "llama_cpp_that_is_not_there")
    with pytest.raises(GgmlError, match="not installed"):
        load_library()
    monkeypatch.undo()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(GgmlError, match="is not there"):
        load_library()
    library_module.load_library.cache_clear()


def test_the_note_names_both_versions() -> None:
    note = load_library().note
    assert note.startswith("ggml ") and "llama-cpp-python" in note
