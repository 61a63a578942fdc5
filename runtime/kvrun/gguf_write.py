"""Write GGUF: a copy of a model with other metadata, or a file of metadata alone. All or nothing, never in place."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import KvError
from .gguf_file import GGUFFile
from .gguf_header import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, DTYPES, MAGIC, MAX_KEY_BYTES, ValueType

VERSION = 3
_CHUNK_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ARRAY_TYPES = {dtype: kind for kind, dtype in DTYPES.items()}

#: `(bytes written, bytes in all)`
OnProgress = Callable[[int, int], None]


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    """Type number and value."""
    if isinstance(value, (bool, np.bool_)):
        return struct.pack("<I?", ValueType.BOOL, value)
    if isinstance(value, (int, np.integer)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{value} is not an unsigned 64-bit number")
        wide = value >= 1 << 32
        return struct.pack("<IQ" if wide else "<II", ValueType.U64 if wide else ValueType.U32, int(value))
    if isinstance(value, (float, np.floating)):
        return struct.pack("<If", ValueType.F32, value)
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + _string(value)
    if isinstance(value, np.ndarray) and value.ndim == 1:
        kind = _ARRAY_TYPES.get(value.dtype.newbyteorder("<"))
        if kind is not None:
            head = struct.pack("<IIQ", ValueType.ARRAY, kind, len(value))
            return head + value.astype(DTYPES[kind]).tobytes()
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(value)) + b"".join(map(_string, value))
    raise ValueError(f"GGUF metadata cannot hold {value!r}")


def encode_kv(key: str, value: Any) -> bytes:
    """One key-value pair as it stands in a file.

    value: bool, int (stored as uint32, or uint64 where it needs that), float (as float32), str, a flat numpy array of
    numbers (its dtype is kept), or list[str]. ValueError for anything else.
    """
    if not 0 < len(key) <= MAX_KEY_BYTES or not key.isascii():
        raise ValueError(f"a key is 1 to {MAX_KEY_BYTES} ASCII characters, not {key[:80]!r}")
    return _string(key) + _typed(value)


def rewrite(
    source: GGUFFile,
    out: Path | str,
    *,
    drop_prefix: str,
    add: Mapping[str, Any],
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> None:
    """Copy a model with other metadata.

    Keys that begin with `drop_prefix` are left out (an empty prefix drops none) and `add` comes last; all other keys,
    the tensor infos and the tensor data are copied byte for byte, so that dropping what was added gives the source
    back. A source in several parts becomes one file: the bytes of keys and tensors are the same, their places are not.
    Raises KvError where `out` cannot be written, exists (without `force`) or is the source itself; then, and when
    interrupted, nothing is left behind.
    """
    out = Path(out)
    if out.exists() and any(out.samefile(part.path) for part in source.parts):
        raise KvError(f"{out} is the model that is read, which is never changed; write to another path")
    kept = [key for key in source if not drop_prefix or not key.startswith(drop_prefix)]
    if clash := set(kept) & set(add):
        raise ValueError(f"keys that the file already has: {sorted(clash)}")
    if ALIGNMENT_KEY in add or (ALIGNMENT_KEY in source and ALIGNMENT_KEY not in kept):
        raise ValueError(f"{ALIGNMENT_KEY} belongs to the tensor data and cannot change")
    pairs = [source.raw_kv(key) for key in kept] + [encode_kv(key, value) for key, value in add.items()]
    infos = source.tensor_infos_raw
    n_header = 24 + sum(map(len, pairs)) + len(infos)
    padding = -n_header % source.alignment
    n_bytes = n_header + padding + source.n_data_bytes
    with _new_file(out, n_bytes, force=force) as stream:
        stream.write(MAGIC + struct.pack("<IQQ", source.version, len(source.tensors), len(pairs)))
        stream.writelines(pairs)
        stream.write(infos + bytes(padding))
        for piece in source.data_pieces():
            for first in range(0, len(piece), _CHUNK_BYTES):
                stream.write(piece[first : first + _CHUNK_BYTES].data)
                if on_progress is not None:
                    on_progress(min(n_bytes, stream.tell()), n_bytes)


def write_metadata_file(out: Path | str, kv: Mapping[str, Any], *, force: bool = False) -> None:
    """Write a GGUF file that holds metadata and no tensors (a sidecar). Errors and guarantees as in `rewrite`."""
    pairs = b"".join(encode_kv(key, value) for key, value in kv.items())
    header = MAGIC + struct.pack("<IQQ", VERSION, 0, len(kv))
    padding = bytes(-(len(header) + len(pairs)) % DEFAULT_ALIGNMENT)
    with _new_file(Path(out), len(header) + len(pairs), force=force) as stream:
        stream.write(header + pairs + padding)


@contextmanager
def _new_file(out: Path, n_bytes: int, *, force: bool) -> Iterator[BinaryIO]:
    """A stream whose content becomes `out` in one step when the block ends well, and vanishes when it does not."""
    _check_target(out, force=force)
    # Beside the target, since only within a file system is a rename atomic; created here rather than by `tempfile`,
    # so that the file gets the permissions of any new file.
    temporary = out.with_name(f".kvconv-{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        _check_target(out, force=force)
        os.replace(temporary, out)
    except OSError as error:
        if error.errno in _FULL:
            room = f"free {max(1, n_bytes >> 20)} MiB or write to another disk"
            raise KvError(f"{out}: the disk is full; {room}, nothing was changed") from error
        why = error.strerror or str(error)
        raise KvError(f"{out}: cannot be written ({why}); write to another folder, nothing was changed") from error
    finally:
        with suppress(OSError):  # gone already where all went well, never made where the folder is read-only
            temporary.unlink()
    _sync_folder(out.parent)


def _check_target(out: Path, *, force: bool) -> None:
    if not out.parent.is_dir():
        raise KvError(f"{out}: the folder {out.parent} does not exist; create it or write elsewhere")
    if out.is_dir():
        raise KvError(f"{out} is a folder; give the path of a file")
    if os.path.lexists(out) and not force:
        raise KvError(f"{out} exists; overwrite it with --force or write elsewhere")


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power cut, where the system lets a folder be opened for that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
