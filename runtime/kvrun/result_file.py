"""Results that outlive the run: a JSONL file to which each row is appended when it is finished.

A line is a row (`kvrun.results`) with two more keys: `fingerprint`, the hash of all that the row depends on
(`kvrun.identity`), and `kld_tokens`, its KL divergences token by token (base64 of float32), so that a later row can be
paired with it.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from kvrun.console import printable
from kvrun.errors import KvError
from kvrun.results import ResultRow
from kvrun.tables import plain

#: What is read to see whether a file is one of ours.
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Measured:
    """A row and its KL divergence per token, float [n]; empty where the row has no figures."""

    row: ResultRow
    kld: np.ndarray


class ResultFile:
    """The file of `--results`, read when it is opened and appended to.

    say: told of lines that are damaged, by number, and once when a row cannot be written; neither ends the run.
    Raises KvError where the file holds something else, and KvError or OSError where it can neither be read nor made.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._found: dict[str, Measured] = {}
        self._broken = False
        if path.is_dir():
            raise KvError(f"{printable(str(path))} is a folder; name a file with --results")
        with path.open("a+b") as file:  # made now, so that an unwritable place is known before the long run
            file.seek(0)
            head = file.read(_HEAD_BYTES)
            content = head + file.read() if head.lstrip().startswith(b"{") else b""
        lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        damaged = [text for number, line in lines if (text := self._read(number, line))]
        # A model or a text would be spoilt by what is appended; a first row that was cut short would not.
        if (head.strip() and not lines) or len(damaged) == len(lines) > 1:
            raise KvError(f"{printable(str(path))} holds no rows of a comparison; name another file with --results")
        for text in damaged:
            say(text)

    def _read(self, number: int, line: bytes) -> str:
        """Take up the row of a line; what is wrong with it where it holds none."""
        try:
            values = json.loads(line)
            _check_types(values)
            row = ResultRow.from_dict(values)
            kld = np.frombuffer(base64.b64decode(values["kld_tokens"], validate=True), "<f4").astype(np.float64)
            if len(kld) != row.n_scored or not isinstance(values["fingerprint"], str):
                raise ValueError("it does not hold as many tokens as it says")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            return f"{printable(str(self.path))}: line {number} is damaged and not used ({printable(why)})"
        self._found[values["fingerprint"]] = Measured(row, kld)
        return ""

    def __len__(self) -> int:
        return len(self._found)

    def find(self, fingerprint: str) -> Measured | None:
        """The row of this fingerprint, None where there is none with figures: what failed is tried again."""
        found = self._found.get(fingerprint)
        return None if found is None or found.row.error else found

    def add(self, fingerprint: str, measured: Measured) -> None:
        """Append a finished row and make sure that it is on the disk."""
        self._found[fingerprint] = measured
        if self._broken:
            return
        tokens = base64.b64encode(np.asarray(measured.kld, "<f4").tobytes()).decode()
        values: dict[str, Any] = {**measured.row.as_dict(), "fingerprint": fingerprint, "kld_tokens": tokens}
        line = json.dumps(plain(values), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("a+b", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                if end:
                    file.seek(end - 1)
                    if file.read(1) != b"\n":  # a line that was cut short stays one damaged line
                        line = b"\n" + line
                try:
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        file.truncate(end)
                    raise
        except OSError as error:
            self._broken = True
            why = error.strerror or str(error)
            self._say(f"{printable(str(self.path))}: rows are no longer written ({why}); the run goes on without")


def _check_types(values: dict[str, Any]) -> None:
    """Raise ValueError where a field of a row is of another type than the row's."""
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
    for field in fields(ResultRow):
        kind, _, optional = str(field.type).partition(" | ")
        value = values.get(field.name, field.default)
        if kind in kinds and not (isinstance(value, kinds[kind]) or (optional and value is None)):
            raise ValueError(f"{field.name} is no {kind}")
