"""A GGUF file, memory-mapped: metadata decoded when asked for, tensors dequantized when asked for.

The stock `gguf.GGUFReader` makes one object per vocabulary entry (seconds), and follows hostile counts without end.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from .errors import GGUFError, UnsupportedModelError
from .gguf_header import DTYPES, Pair, TensorInfo, ValueType, parse_header, quoted

__all__ = ["GGUFFile", "TensorInfo"]

T = TypeVar("T")
ARCH_KEY = "general.architecture"
SAMPLE_BYTES = 4096
_FINGERPRINTED = re.compile(r"(token_embd|.*\.attn_(k|v|qkv))\.(weight|bias)")
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list of texts"}
_ROWS_AT_A_TIME = 2048  # gguf's dequantizer holds its result twice, so large tensors go through it in pieces


class GGUFFile:
    """An open GGUF file, versions 2 and 3, little-endian.

    path, version.  alignment: of the tensor data, in bytes.  tensors: by name, in the order of the file.
    data_start: absolute offset of the tensor data, in bytes.
    Raises GGUFError, one line that names the file, where it cannot be read or anything in its header is wrong.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise GGUFError(f"{self.path}: not a file; give the path of a model in GGUF format")
            with self.path.open("rb") as stream:
                if self.path.stat().st_size == 0:
                    raise GGUFError(f"{self.path}: the file is empty; download it again")
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise GGUFError(f"{self.path}: no such file; check the path") from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise GGUFError(f"{self.path}: cannot be opened ({why}); check the path and its permissions") from None
        header = parse_header(self._map, str(self.path))
        self.version = header.version
        self.alignment = header.alignment
        self.tensors = header.tensors
        self.data_start = header.data_start
        self._pairs = header.pairs
        self._infos = slice(header.infos_start, header.infos_end)

    @property
    def arch(self) -> str:
        """`general.architecture`."""
        return self.require(ARCH_KEY, str)

    @property
    def tensor_infos_raw(self) -> bytes:
        """The tensor infos byte for byte as in the file, without the padding that follows."""
        return self._map[self._infos]

    @property
    def parts(self) -> tuple[GGUFFile, ...]:
        """The files that the model lies in: this one, or several (`kvrun.gguf_split`)."""
        return (self,)

    def data_raw(self) -> np.ndarray:
        """Everything from the first tensor to the end of the file: uint8, read-only, mapped."""
        return np.frombuffer(self._map, np.uint8, offset=self.data_start) if self.tensors else np.empty(0, np.uint8)

    def data_pieces(self) -> Iterator[np.ndarray]:
        """What follows the header of a copy, piece by piece, padding included: uint8, mapped."""
        yield self.data_raw()

    @property
    def n_data_bytes(self) -> int:
        """Bytes of all `data_pieces`."""
        return len(self.data_raw())

    @property
    def n_bytes(self) -> int:
        """Bytes of all files that the model lies in."""
        return sum(len(part._map) for part in self.parts)

    def __contains__(self, key: str) -> bool:
        return key in self._pairs

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def keys(self) -> list[str]:
        """All metadata keys, in the order of the file."""
        return list(self._pairs)

    def raw_kv(self, key: str) -> bytes:
        """The pair (key, type and value) byte for byte as in the file."""
        pair = self._pairs[key]
        return self._map[pair.start : pair.end]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: int, float, bool, str, numpy array (arrays of numbers), list[str]; else `default`."""
        pair = self._pairs.get(key)
        return default if pair is None else self._decode(pair)

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a key, which must be of `kind` (a whole number passes as float); GGUFError where it is not."""
        if key not in self._pairs:
            raise GGUFError(f"{self.path}: key {quoted(key)} is missing; convert the model again")
        value = self.get(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            wanted = _KIND_NAMES.get(kind, "an array of numbers")
            raise GGUFError(f"{self.path}: key {quoted(key)} is not {wanted}; convert the model again")
        return value

    def _decode(self, pair: Pair) -> Any:
        if pair.type == ValueType.STRING:
            texts = self._strings(pair)
            return texts[0] if pair.count is None else texts
        dtype = DTYPES[pair.type]
        n_values = 1 if pair.count is None else pair.count
        values = np.frombuffer(self._map, np.uint8, n_values * dtype.itemsize, pair.value_start)
        # A byte other than 0 and 1 is true, as in llama.cpp; numpy leaves it undefined.
        values = values != 0 if pair.type == ValueType.BOOL else values.view(dtype).copy()
        return values[0].item() if pair.count is None else values

    def _strings(self, pair: Pair) -> list[str]:
        raw, at, texts = self._map[pair.value_start : pair.end], 0, []
        for _ in range(1 if pair.count is None else pair.count):
            begin = at + 8
            at = begin + int.from_bytes(raw[at:begin], "little")
            texts.append(raw[begin:at].decode("utf-8", errors="replace"))
        return texts

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: tensor {quoted(name)} is missing; download the model again")
        return info

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor as it lies in the file: uint8 [n_bytes], read-only, mapped."""
        info = self._info(name)
        return np.frombuffer(self._map, np.uint8, info.n_bytes, info.offset)

    def dequantize(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        """The tensor in float32, in its shape; `rows` selects along the first axis and reads no other rows.

        UnsupportedModelError where the tensor's type cannot be dequantized here.
        """
        info = self._info(name)
        raw = self.tensor_bytes(name).reshape(*info.shape[:-1], -1)
        if rows is not None:
            if len(info.shape) < 2:
                raise ValueError(f"{name} has one dimension: there are no rows to select")
            raw = raw[rows]
        out = np.empty((*raw.shape[:-1], info.shape[-1]), np.float32)
        flat_raw, flat_out = raw.reshape(-1, raw.shape[-1]), out.reshape(-1, info.shape[-1])
        with np.errstate(all="ignore"):  # whoever uses the values checks that they are finite
            for first in range(0, len(flat_raw), _ROWS_AT_A_TIME):
                part = slice(first, first + _ROWS_AT_A_TIME)
                flat_out[part] = self._dequantize_rows(flat_raw[part], info)
        return out

    def _dequantize_rows(self, raw: np.ndarray, info: TensorInfo) -> np.ndarray:
        if info.type == GGMLQuantizationType.F64:
            return raw.view("<f8")
        try:
            return dequantize(raw, info.type)
        except NotImplementedError:
            why = f"tensor {quoted(info.name)} has type {info.type.name}, which cannot be read here"
            raise UnsupportedModelError(f"{self.path}: {why}; use another quantization of the model") from None

    def fingerprint(self) -> str:
        """Identity of the model, unchanged by metadata: sha256 in hex, in milliseconds.

        Over the architecture, every tensor's name, shape and type, and the first, middle and last 4 KiB of the
        embedding and of every key and value projection.
        """
        digest = hashlib.sha256(self.arch.encode())
        for name, info in sorted(self.tensors.items()):
            digest.update(f"\n{name} {info.shape} {info.type.name}".encode())
            if _FINGERPRINTED.fullmatch(name):
                raw, middle = self.tensor_bytes(name), max(0, (info.n_bytes - SAMPLE_BYTES) // 2)
                for first in (0, middle, max(0, info.n_bytes - SAMPLE_BYTES)):
                    digest.update(raw[first : first + SAMPLE_BYTES].tobytes())
        return digest.hexdigest()
