"""The header of a GGUF file: what it holds and where, with nothing decoded yet.

Layout (ggml docs/gguf.md): `GGUF`, u32 version, u64 tensor count, u64 pair count, the key-value pairs, the tensor
infos, padding to the alignment, the tensor data. A downloaded header is not trusted: no loop and no allocation takes a
count from it before the count is held against the bytes that are left.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import GGUFError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_TENSOR_NAME_BYTES = 63  # llama.cpp keeps names in 64 bytes with the terminating zero
# Far above any real model (a vocabulary has 262 thousand strings, the largest mixture of experts 50 thousand tensors),
# low enough that a hostile file of any size is refused in about a second.
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22


class ValueType(IntEnum):
    """Type numbers of metadata values."""

    U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


#: Numpy type of every value of fixed size.
DTYPES: dict[int, np.dtype] = {
    ValueType.U8: np.dtype("u1"),
    ValueType.I8: np.dtype("i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class Pair:
    """Where a key-value pair lies: `[start, end)` is all of it, its value begins at `value_start`.

    type: of the value, or of its elements where `count` is not None (an array).
    """

    start: int
    value_start: int
    end: int
    type: int
    count: int | None


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file.

    shape: as numpy and torch write it, [rows, cols].  offset, n_bytes: absolute place and size in the file, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """All that stands before the tensor data; `infos_start`, `infos_end` bound the tensor infos, in bytes."""

    version: int
    alignment: int
    pairs: dict[str, Pair]
    tensors: dict[str, TensorInfo]
    infos_start: int
    infos_end: int
    data_start: int


def quoted(name: str) -> str:
    """A name from a file for a message: escaped, and cut where it is long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def parse_header(buffer: mmap.mmap | bytes, path: str) -> Header:
    """Read the header of a file mapped as `buffer`; GGUFError, one line that names `path`, on anything wrong."""
    try:
        return _Parser(buffer, path).parse()
    except (struct.error, OverflowError):
        # Reading past the end: `Struct.unpack_from` checks the bounds itself.
        raise GGUFError(_Parser.ended(path)) from None


class _Parser:
    def __init__(self, buffer: mmap.mmap | bytes, path: str) -> None:
        self.buffer = buffer
        self.path = path
        self.size = len(buffer)
        self.at = 0
        self.strings_left = MAX_STRINGS

    @staticmethod
    def ended(path: str) -> str:
        return f"{path}: the file ends within its header; download it again"

    def fail(self, why: str) -> GGUFError:
        return GGUFError(f"{self.path}: damaged GGUF file ({why}); download it again")

    def number(self, code: struct.Struct) -> int:
        value: int = code.unpack_from(self.buffer, self.at)[0]
        self.at += code.size
        return value

    def string(self, what: str, limit: int) -> str:
        length = self.number(_U64)
        if length > self.size - self.at:
            raise GGUFError(self.ended(self.path))
        if not 0 < length <= limit:
            raise self.fail(f"a {what} of {length} bytes")
        raw = self.buffer[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"a {what} that is not UTF-8") from None

    def parse(self) -> Header:
        if self.buffer[:4] != MAGIC:
            raise GGUFError(f"{self.path}: not a GGUF file; give the path of a model in GGUF format")
        self.at = 4
        version = self.number(_U32)
        if version & 0xFFFF == 0 and version:
            raise GGUFError(f"{self.path}: a big-endian GGUF file; convert it with gguf-convert-endian")
        if version not in VERSIONS:
            raise GGUFError(f"{self.path}: GGUF version {version}, only 2 and 3 can be read; convert the model again")
        n_tensors, n_pairs = self.number(_U64), self.number(_U64)
        # 14 bytes is the smallest pair (a key of one byte, a value of one), 33 the smallest tensor info.
        for what, count, smallest, most in (("tensors", n_tensors, 33, MAX_TENSORS), ("keys", n_pairs, 14, MAX_PAIRS)):
            if count > min(most, (self.size - self.at) // smallest):
                raise self.fail(f"it claims {count} {what}")
        pairs: dict[str, Pair] = {}
        for _ in range(n_pairs):
            self.pair(pairs)
        alignment = self.alignment(pairs)
        infos_start = self.at
        raw_infos = [self.tensor_info() for _ in range(n_tensors)]
        data_start = self.at + -self.at % alignment
        tensors = self.place(raw_infos, data_start, alignment)
        return Header(version, alignment, pairs, tensors, infos_start, self.at, data_start)

    def pair(self, pairs: dict[str, Pair]) -> None:
        start = self.at
        key = self.string("key", MAX_KEY_BYTES)
        if key in pairs:
            raise self.fail(f"key {quoted(key)} twice")
        kind, count = self.number(_U32), None
        if kind == ValueType.ARRAY:
            kind, count = self.number(_U32), self.number(_U64)
            if kind == ValueType.ARRAY:
                raise self.fail(f"key {quoted(key)} holds an array of arrays")
        if kind not in DTYPES and kind != ValueType.STRING:
            raise self.fail(f"key {quoted(key)} has the unknown type {kind}")
        value_start = self.at
        n_values = 1 if count is None else count
        n_bytes = n_values * (8 if kind == ValueType.STRING else DTYPES[kind].itemsize)
        if n_bytes > self.size - self.at:
            raise self.fail(f"key {quoted(key)} is longer than the file")
        if kind == ValueType.STRING:
            self.strings_left -= n_values
            if self.strings_left < 0:
                raise self.fail(f"key {quoted(key)} holds {n_values} strings")
            self.at = skip_strings(self.buffer, self.at, n_values)
        else:
            self.at += n_bytes
        pairs[key] = Pair(start, value_start, self.at, kind, count)

    def alignment(self, pairs: dict[str, Pair]) -> int:
        pair = pairs.get(ALIGNMENT_KEY)
        if pair is None:
            return DEFAULT_ALIGNMENT
        if pair.type != ValueType.U32 or pair.count is not None:
            raise self.fail(f"{ALIGNMENT_KEY} is not an unsigned 32-bit number")
        alignment: int = _U32.unpack_from(self.buffer, pair.value_start)[0]
        if alignment & (alignment - 1) or not 0 < alignment <= MAX_ALIGNMENT:
            raise self.fail(f"{ALIGNMENT_KEY} is {alignment}, not a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("tensor name", MAX_TENSOR_NAME_BYTES)
        n_dims = self.number(_U32)
        if not 1 <= n_dims <= MAX_DIMS:
            raise self.fail(f"tensor {quoted(name)} has {n_dims} dimensions")
        dims = struct.unpack_from(f"<{n_dims}Q", self.buffer, self.at)
        self.at += 8 * n_dims
        return name, dims[::-1], self.number(_U32), self.number(_U64)

    def place(
        self, raw_infos: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, number, offset in raw_infos:
            if name in tensors:
                raise self.fail(f"tensor {quoted(name)} twice")
            try:
                kind = GGMLQuantizationType(number)
                block, block_bytes = GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                why = f"tensor {quoted(name)} has type number {number}, which is not known here"
                raise GGUFError(f"{self.path}: {why}; use another quantization of the model") from None
            n_values = 1
            for dim in shape:  # Python integers: a product that would wrap stays what it is and is refused below
                n_values *= dim
            if n_values == 0 or shape[-1] % block:
                raise self.fail(f"tensor {quoted(name)} has a shape that {kind.name} cannot have, {list(shape)}")
            n_bytes = n_values // block * block_bytes
            if offset % alignment or data_start + offset + n_bytes > self.size:
                where = "is not aligned" if offset % alignment else "ends past the end of the file"
                raise self.fail(f"tensor {quoted(name)} {where}")
            tensors[name] = TensorInfo(name, shape, kind, data_start + offset, n_bytes)
        end = 0
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self.fail(f"tensor {quoted(info.name)} overlaps another")
            end = info.offset + info.n_bytes
        return tensors


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def skip_strings(buffer: mmap.mmap | bytes, at: int, count: int) -> int:
    """Where `count` strings that begin at `at` end. `struct.error` or OverflowError where that is past the end."""
    unpack = _U64.unpack_from
    for _ in range(count):
        at += 8 + unpack(buffer, at)[0]
    if at > len(buffer):
        raise struct.error("past the end")
    return at
