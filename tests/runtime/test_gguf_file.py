"""The reader: what it reads, and that hostile files of a few bytes each end in one line."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrun.errors import GGUFError, KvError, UnsupportedModelError
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import encode_kv
from tools.fuzz_gguf import outcome
from tools.make_tiny_model import make_tiny_model

ARCH = encode_kv("general.architecture", "llama")


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def info(name: bytes = b"t", dims: Sequence[int] = (32,), kind: int = 0, offset: int = 0, n_dims: int = -1) -> bytes:
    head = string(name) + struct.pack("<I", len(dims) if n_dims < 0 else n_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def gguf(
    pairs: Sequence[bytes] = (ARCH,),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(infos) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return head + (bytes(-len(head) % alignment) + data if infos else b"")


def raw_pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + value


def opened(path: Path, content: bytes) -> GGUFFile:
    path.write_bytes(content)
    return GGUFFile(path)


HUGE = 1 << 63
LETTER_KEY = b"k"
F32_32 = np.arange(32, dtype="<f4").tobytes()

HOSTILE = {
    "empty": b"",
    "not GGUF": b"GGML" + bytes(60),
    "only the magic": b"GGUF",
    "half a header": gguf()[:20],
    "version 0": gguf(version=0),
    "version 1": gguf(version=1),
    "version 4": gguf(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "count of keys": gguf(n_pairs=HUGE),
    "one key too many": gguf(n_pairs=2),
    "count of tensors": gguf(n_tensors=HUGE),
    "one tensor too many": gguf(infos=[info()], data=F32_32, n_tensors=2),
    "array length": gguf([raw_pair(LETTER_KEY, 9, array(4, HUGE))]),
    "array of strings": gguf([raw_pair(LETTER_KEY, 9, array(8, HUGE))]),
    "array of strings that fit the count": gguf([raw_pair(LETTER_KEY, 9, array(8, 2, string(b"", HUGE) + bytes(8)))]),
    "nested arrays": gguf([raw_pair(LETTER_KEY, 9, array(9, 1, array(4, 1, bytes(4))))]),
    "string length": gguf([raw_pair(LETTER_KEY, 8, string(b"abc", HUGE))]),
    "string past the end": gguf([raw_pair(LETTER_KEY, 8, string(b"abc", 4))]),
    "string whose length wraps": gguf([raw_pair(LETTER_KEY, 8, string(b"abc", 2**64 - 4))]),
    "key length": gguf([string(b"abc", 2**64 - 1)]),
    "empty key": gguf([raw_pair(b"", 4, bytes(4))]),
    "key of 64 KiB": gguf([raw_pair(b"k" * 65536, 4, bytes(4))]),
    "key that is not UTF-8": gguf([raw_pair(b"\xff\xfe", 4, bytes(4))]),
    "key twice": gguf([ARCH, ARCH]),
    "unknown type": gguf([raw_pair(LETTER_KEY, 13, bytes(16))]),
    "unknown type in an array": gguf([raw_pair(LETTER_KEY, 9, array(99, 1, bytes(16)))]),
    "no dimensions": gguf(infos=[info(dims=())], data=F32_32),
    "5 dimensions": gguf(infos=[info(dims=(1,) * 5)], data=F32_32),
    "2^31 dimensions": gguf(infos=[info(n_dims=1 << 31)], data=F32_32),
    "dimensions whose product wraps to 0": gguf(infos=[info(dims=(1 << 32, 1 << 32))], data=F32_32),
    "dimensions whose bytes wrap to 4": gguf(infos=[info(dims=((1 << 62) + 1,))], data=F32_32),
    "a dimension of 0": gguf(infos=[info(dims=(32, 0))], data=F32_32),
    "tensor past the end": gguf(infos=[info(dims=(33,))], data=F32_32),
    "offset past the end": gguf(infos=[info(offset=1 << 40)], data=F32_32),
    "offset that wraps": gguf(infos=[info(offset=2**64 - 32)], data=F32_32),
    "offset off the alignment": gguf(infos=[info(dims=(4,), offset=4)], data=F32_32),
    "overlapping tensors": gguf(infos=[info(b"a"), info(b"b", dims=(1,), offset=32)], data=F32_32),
    "tensor twice": gguf(infos=[info(dims=(1,)), info(dims=(1,), offset=32)], data=F32_32),
    "tensor name of 64 bytes": gguf(infos=[info(b"n" * 64)], data=F32_32),
    "tensor without a name": gguf(infos=[info(b"")], data=F32_32),
    "unknown tensor type": gguf(infos=[info(kind=4)], data=F32_32),
    "block that does not divide the row": gguf(infos=[info(dims=(31,), kind=8)], data=F32_32),
    "alignment 0": gguf([encode_kv("general.alignment", 0)]),
    "alignment 3": gguf([encode_kv("general.alignment", 3)]),
    "alignment 2^30": gguf([encode_kv("general.alignment", 1 << 30)]),
    "alignment as int32": gguf([raw_pair(b"general.alignment", 5, struct.pack("<i", 32))]),
    "alignment as an array": gguf([raw_pair(b"general.alignment", 9, array(4, 1, struct.pack("<I", 32)))]),
    "alignment as a text": gguf([encode_kv("general.alignment", "32")]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_end_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable() and "bad.gguf" in message and ";" in message


def test_more_strings_than_any_vocabulary_are_refused_before_they_are_walked(tmp_path: Path) -> None:
    count = (1 << 22) + 1
    path = tmp_path / "many.gguf"
    with path.open("wb") as stream:
        stream.write(gguf([raw_pair(LETTER_KEY, 9, array(8, count))]))
        stream.truncate(stream.tell() + 8 * count)
    with pytest.raises(GGUFError, match="4194305 strings"):
        GGUFFile(path)


def test_control_characters_in_a_key_are_kept_and_escaped_in_messages(tmp_path: Path) -> None:
    key = "a\x1b[31m\nb"
    file = opened(tmp_path / "f.gguf", gguf([raw_pair(key.encode(), 4, bytes(4))]))
    assert file.keys() == [key]
    with pytest.raises(GGUFError) as caught:
        file.require(key, str)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "nothing.gguf" if kind == "missing" else tmp_path
    with pytest.raises(GGUFError, match=r"no such file|not a file"):
        GGUFFile(path)


def test_all_value_types_read_back(tmp_path: Path) -> None:
    values = {
        "u8": (0, "<B", 200),
        "i8": (1, "<b", -100),
        "u16": (2, "<H", 60000),
        "i16": (3, "<h", -30000),
        "u32": (4, "<I", 4_000_000_000),
        "i32": (5, "<i", -2_000_000_000),
        "f32": (6, "<f", 0.25),
        "u64": (10, "<Q", 2**63 + 1),
        "i64": (11, "<q", -(2**62)),
        "f64": (12, "<d", 0.1),
    }
    pairs = [raw_pair(key.encode(), kind, struct.pack(code, value)) for key, (kind, code, value) in values.items()]
    pairs += [raw_pair(b"true", 7, b"\1"), raw_pair(b"false", 7, b"\0"), raw_pair(b"odd bool", 7, b"\2")]
    pairs += [raw_pair(b"text", 8, string("grün".encode())), raw_pair(b"broken text", 8, string(b"a\xff"))]
    pairs += [raw_pair(b"texts", 9, array(8, 3, string(b"a") + string(b"") + string("ü".encode())))]
    pairs += [raw_pair(b"no texts", 9, array(8, 0)), raw_pair(b"no numbers", 9, array(5, 0))]
    pairs += [raw_pair(b"bools", 9, array(7, 3, b"\1\0\1"))]
    file = opened(tmp_path / "f.gguf", gguf(pairs, version=2))
    assert file.version == 2
    for key, (_, _, value) in values.items():
        assert file.get(key) == value and type(file.get(key)) is type(value)
    assert [file.get(k) for k in ("true", "false", "odd bool")] == [True, False, True]
    assert file.get("text") == "grün" and file.get("broken text") == "a\N{REPLACEMENT CHARACTER}"
    assert file.get("texts") == ["a", "", "ü"] and file.get("no texts") == []
    assert file.get("no numbers").dtype == np.int32 and len(file.get("no numbers")) == 0
    assert file.get("bools").tolist() == [True, False, True]
    assert file.get("absent", 5) == 5 and "absent" not in file
    assert file.raw_kv("text") == raw_pair(b"text", 8, string("grün".encode()))


def test_typed_access_names_the_key(tmp_path: Path) -> None:
    pairs = [encode_kv("n", 3), encode_kv("x", 0.5), encode_kv("b", True), encode_kv("s", "t")]
    file = opened(tmp_path / "f.gguf", gguf(pairs))
    assert file.require("n", int) == 3 and file.require("n", float) == 3.0 and file.require("b", bool) is True
    for key, kind in (("b", int), ("s", int), ("x", int), ("n", str), ("b", float), ("s", list), ("gone", int)):
        with pytest.raises(GGUFError, match=repr(key)):
            file.require(key, kind)
    with pytest.raises(GGUFError, match=r"general\.architecture"):
        _ = file.arch


def test_any_order_gaps_and_alignment_of_tensors(tmp_path: Path) -> None:
    data = np.zeros(3 * 64 // 4, "<f4")
    data[0:4], data[32:36] = (1, 2, 3, 4), (5, 6, 7, 8)
    infos = [info(b"late", (2, 2), offset=128), info(b"early", (4,))]
    pairs = [ARCH, encode_kv("general.alignment", 64)]
    file = opened(tmp_path / "a name with späces.gguf", gguf(pairs, infos, data.tobytes(), alignment=64))
    assert file.alignment == 64 and list(file.tensors) == ["late", "early"]
    assert file.dequantize("late").tolist() == [[5, 6], [7, 8]]
    assert file.dequantize("early").tolist() == [1, 2, 3, 4]
    assert file.tensors["late"].offset == file.data_start + 128 and file.data_start % 64 == 0
    with pytest.raises(GGUFError, match="'gone'"):
        file.dequantize("gone")


def test_agrees_with_the_stock_reader(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "tiny.gguf")
    file, stock = GGUFFile(path), GGUFReader(path)
    assert set(file) == {key for key in stock.fields if not key.startswith("GGUF.")}
    for key in file:
        ours, theirs = file.get(key), stock.fields[key].contents()
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == theirs, key
    for tensor in stock.tensors:
        found = file.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape.tolist()[::-1])
        assert (found.offset, found.n_bytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(file.dequantize(tensor.name), tensor.data)


LIBRARY_NAMES = {"BF16": "ggml_bf16_to_fp32_row", "F16": "ggml_fp16_to_fp32_row"}
TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")


@pytest.mark.parametrize("name", TYPES)
def test_dequantizes_as_ggml_does(tmp_path: Path, name: str) -> None:
    """Blocks of random bytes against the C library, whole and by rows."""
    kind, rows, cols = GGMLQuantizationType[name], 37, 512
    block, block_bytes = GGML_QUANT_SIZES[kind]
    n_bytes = rows * cols // block * block_bytes
    # No byte above 0x38: no f16 scale and no bf16 value is infinite or not a number, wherever in the block it lies.
    raw = np.random.default_rng(5).integers(0, 0x38, n_bytes, dtype=np.uint8)
    file = opened(tmp_path / "f.gguf", gguf(infos=[info(b"t", (cols, rows), kind)], data=raw.tobytes()))
    ours = file.dequantize("t")

    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    (library, *_) = sorted((Path(spec.origin).parent / "lib").glob("libggml-base*"))
    short = name[:-1].lower() + "K" if name.endswith("_K") else name.lower()
    function = getattr(ctypes.CDLL(str(library)), LIBRARY_NAMES.get(name, f"dequantize_row_{short}"))
    theirs = np.full((rows, cols), np.nan, np.float32)
    function(raw.ctypes.data_as(ctypes.c_void_p), theirs.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(theirs.size))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=0)
    picked = np.array([36, 0, 5, 5])
    np.testing.assert_array_equal(file.dequantize("t", picked), ours[picked])
    np.testing.assert_array_equal(file.dequantize("t", slice(3, 30, 4)), ours[3:30:4])


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.I32
    file = opened(tmp_path / "f.gguf", gguf(infos=[info(b"t", (32, 2), kind)], data=bytes(256)))
    with pytest.raises(KvError, match="I32"):
        file.dequantize("t")


def test_rows_of_a_large_tensor_go_through_in_pieces(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5000, 32)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType.Q8_0)
    file = opened(
        tmp_path / "f.gguf", gguf(infos=[info(b"t", (32, 5000), GGMLQuantizationType.Q8_0)], data=raw.tobytes())
    )
    np.testing.assert_array_equal(file.dequantize("t"), quants.dequantize(raw, GGMLQuantizationType.Q8_0))


def test_fingerprint_sees_weights_and_shapes_but_not_metadata(tmp_path: Path) -> None:
    base = make_tiny_model("llama", tmp_path / "a.gguf")
    print_of = GGUFFile(base).fingerprint()
    assert GGUFFile(make_tiny_model("llama", tmp_path / "b.gguf", name="other")).fingerprint() == print_of
    assert GGUFFile(make_tiny_model("llama", tmp_path / "c.gguf", seed=1)).fingerprint() != print_of
    assert GGUFFile(make_tiny_model("llama", tmp_path / "d.gguf", n_layer=1)).fingerprint() != print_of
    for tensor in ("blk.1.attn_k.weight", "blk.0.attn_v.weight", "token_embd.weight"):
        place = GGUFFile(base).tensors[tensor]
        changed = bytearray(base.read_bytes())
        changed[place.offset + place.n_bytes - 1] ^= 1
        assert opened(tmp_path / "e.gguf", bytes(changed)).fingerprint() != print_of, tensor


@pytest.fixture(scope="module")
def real_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A model's bytes, and how many of them are its header."""
    path = make_tiny_model("qwen2", tmp_path_factory.mktemp("fuzz") / "t.gguf", n_embd=32, head_dim=32, n_ff=32)
    return path.read_bytes(), GGUFFile(path).data_start


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_headers_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, real_file: tuple[bytes, int], data: st.DataObject
) -> None:
    """Whatever a few changed bytes or a cut do, the file either reads in full or is refused with a `KvError`."""
    content, header_end = bytearray(real_file[0]), real_file[1]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_end))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, b"\0" * 8])))
        content[at : at + len(patch)] = patch
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content)
    assert outcome(path) in ("read", "refused")


def test_a_tensor_type_that_cannot_be_expanded_is_named(tmp_path: Path) -> None:
    """Types for intermediate results, such as Q8_1, have a block size but nothing that expands them."""
    file = GGUFFile(make_tiny_model("llama", tmp_path / "t.gguf"))
    name = "blk.0.attn_k.weight"
    file.tensors[name] = replace(file.tensors[name], type=GGMLQuantizationType.Q8_1)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*Q8_1.*another quantization"):
        file.dequantize(name)
