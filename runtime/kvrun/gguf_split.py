"""A model split into several GGUF files, read as the one file that they would be if they were joined.

Parts are named `NAME-00001-of-00003.gguf` and say in `split.no` (from 0), `split.count` and `split.tensors.count` what
they are part of (llama.cpp tools/gguf-split). The metadata stands in the first part, which may hold no tensors.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .errors import GGUFError
from .gguf_file import GGUFFile
from .gguf_header import TensorInfo, quoted

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL)


def open_model(path: Path | str) -> GGUFFile:
    """The model that a file is, or is a part of: any part of a split model opens all of it.

    Raises GGUFError, one line that names the part, where one is missing or belongs to another model.
    """
    named = GGUFFile(path)
    count = named.get(_COUNT, 1)
    return SplitFile(named) if type(count) is int and count > 1 else named


def whole_stem(path: Path) -> str:
    """The model file's name without `.gguf`, and without `-00001-of-00003` where it is a part."""
    match = _PART_NAME.fullmatch(path.name)
    return match[1] if match else path.stem


class SplitFile(GGUFFile):
    """All parts of a split model as one file: keys of the first without `split.*`, tensors of all in their order.

    path: of the first part.  A tensor's `offset` is its place in the part that holds it.
    """

    def __init__(self, named: GGUFFile) -> None:
        """named: any of the parts."""
        paths = _part_paths(named)
        parts = []
        for i, path in enumerate(paths):
            if path == named.path:
                parts.append(named)
            elif path.exists():
                parts.append(_part(path, i, len(paths)))
            else:
                what = f"part {i + 1} of {len(paths)} of this model is missing"
                raise GGUFError(f"{path}: {what}; download it into the same folder")
        first, n_tensors = parts[0], _n_tensors(parts)
        self.path, self.version, self.alignment = first.path, first.version, first.alignment
        self.data_start, self._map, self._infos = first.data_start, first._map, first._infos
        self._pairs = {key: pair for key, pair in first._pairs.items() if key not in (_NUMBER, _COUNT, _TENSORS)}
        self._parts = tuple(parts)
        self.tensors: dict[str, TensorInfo] = {}
        self._holder: dict[str, GGUFFile] = {}
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    why = f"it holds tensor {quoted(name)}, as {self._holder[name].path.name} does"
                    raise GGUFError(f"{part.path}: not a part of this model ({why}); download it again")
                self.tensors[name], self._holder[name] = info, part
        if len(self.tensors) != n_tensors:
            why = f"the parts hold {len(self.tensors)} tensors where their headers say {n_tensors}"
            raise GGUFError(f"{self.path}: the model is not whole ({why}); download all parts again")

    @property
    def parts(self) -> tuple[GGUFFile, ...]:
        return self._parts

    def tensor_bytes(self, name: str) -> np.ndarray:
        self._info(name)
        return self._holder[name].tensor_bytes(name)

    @property
    def tensor_infos_raw(self) -> bytes:
        """The tensor infos as the joined file has them."""
        raw, offset = [], 0
        for name, info in self.tensors.items():
            text = name.encode("utf-8")
            dims = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape[::-1])
            raw.append(struct.pack("<Q", len(text)) + text + dims + struct.pack("<IQ", info.type, offset))
            offset += info.n_bytes + -info.n_bytes % self.alignment
        return b"".join(raw)

    def data_pieces(self) -> Iterator[np.ndarray]:
        for name, info in self.tensors.items():
            yield self.tensor_bytes(name)
            yield np.zeros(-info.n_bytes % self.alignment, np.uint8)

    @property
    def n_data_bytes(self) -> int:
        return sum(info.n_bytes + -info.n_bytes % self.alignment for info in self.tensors.values())


def _part_paths(named: GGUFFile) -> list[Path]:
    """Where all parts must lie, by the name of one of them."""
    number, count = named.require(_NUMBER, int), named.require(_COUNT, int)
    what = f"part {number + 1} of {count} of a model"
    match = _PART_NAME.fullmatch(named.path.name)
    if match is None:
        wanted = f"...-{number + 1:05d}-of-{count:05d}.gguf"
        raise GGUFError(f"{named.path}: {what}, whose others cannot be found by this name; name it {wanted} again")
    if (int(match[2]) - 1, int(match[3])) != (number, count):
        raise GGUFError(f"{named.path}: {what} under the name of another part; download it again")
    stem, suffix = match[1], match[4]
    return [named.path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}") for i in range(count)]


def _part(path: Path, number: int, count: int) -> GGUFFile:
    """One more part, which must say that it is part `number` (from 0) of `count`."""
    part = GGUFFile(path)
    found = part.get(_NUMBER), part.get(_COUNT)
    if found != (number, count):
        says = f"its header says split.no {found[0]!r} and split.count {found[1]!r}"
        raise GGUFError(f"{path}: not part {number + 1} of {count} of a model ({says}); download it again")
    return part


def _n_tensors(parts: list[GGUFFile]) -> int:
    """Tensors of the whole, which every part names; a part that disagrees with most is from another model."""
    says = [part.require(_TENSORS, int) for part in parts]
    most = max(says, key=says.count)
    for part, number in zip(parts, says, strict=True):
        if number != most:
            why = f"it is of a model of {number} tensors, the others are of one of {most}"
            raise GGUFError(f"{part.path}: not a part of this model ({why}); download it again")
    return most
