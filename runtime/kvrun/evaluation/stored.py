"""A reference's distributions on disk: about one byte per token of the vocabulary, and KL divergences exact to 1e-5.

A position keeps its `N_TOP` likeliest tokens in float32. Every other probability is a byte: its fourth root on a linear
scale, so that steps are fine where probabilities are large. Beside these rounded probabilities `r` stands one exact
number, `sum(r log p)` over the reference's own `p`. The divergence from a cache's `q` is then taken as
`sum(r log p) - sum(r log q)`: it is 0 where `q` is `p`, whatever the rounding, and wrong by `sum((r - p) log(p / q))`
elsewhere, which grows with the divergence itself. Measured errors stand in docs/evaluation.md.

numpy alone: the child process that runs llama.cpp writes and reads these files too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvrun.errors import KvError
from kvrun.evaluation.metrics import log_softmax

#: Tokens of a position whose probability is kept in float32.
N_TOP = 512
#: Steps of the scale of the others.
N_CODES = 256
#: Root of a probability, as a share of the largest of the others, that each code stands for; its fourth power.
_POWERS = ((np.arange(N_CODES) + 0.5) / N_CODES) ** 4

_MAGIC = b"kvrun.reference 1\n"
_HEADER_BYTES = 256
#: Values handled at once: float64 temporaries stay near the CPU's cache.
_BLOCK_VALUES = 1 << 19


def record_type(n_vocab: int) -> np.dtype[Any]:
    """How a position lies in the file.

    codes: of the tokens that are not among `top`.  top, top_p: the likeliest tokens and their probabilities.
    scale: probability of a code's fourth power.  mean_log_p: `sum(r log p)`.
    log_p_target: log-probability of the right token.  confidence: probability of the likeliest token, `argmax`.
    """
    n_top = min(N_TOP, n_vocab)
    return np.dtype(
        [
            ("codes", "u1", (n_vocab,)),
            ("top", "<u4", (n_top,)),
            ("top_p", "<f4", (n_top,)),
            ("scale", "<f8"),
            ("mean_log_p", "<f8"),
            ("log_p_target", "<f8"),
            ("confidence", "<f8"),
            ("argmax", "<i8"),
        ]
    )


def size_bytes(n_rows: int, n_vocab: int) -> int:
    """Bytes of a file of `n_rows` positions."""
    return _HEADER_BYTES + n_rows * record_type(n_vocab).itemsize


def encode(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Logits [n, n_vocab] with the tokens [n] that follow, as records [n] of `record_type`."""
    n, n_vocab = logits.shape
    records = np.zeros(n, record_type(n_vocab))
    for i in range(n):  # a row at a time: it stays in the cache
        log_p = log_softmax(logits[i : i + 1])[0]
        p = np.exp(log_p)
        record = records[i]
        n_top = len(record["top"])
        top = np.argpartition(p, n_vocab - n_top)[n_vocab - n_top :]
        record["top"], record["top_p"] = top, p[top]
        rest = p.copy()
        rest[top] = 0
        largest, mass = float(rest.max()), float(rest.sum())
        rounded = np.zeros(n_vocab)
        if largest > 0:
            share = np.sqrt(np.sqrt(rest / largest))
            codes = np.minimum((share * N_CODES).astype(np.int64), N_CODES - 1)
            record["codes"] = codes
            rounded = _POWERS[codes]
            rounded[top] = 0
            record["scale"] = mass / float(rounded.sum())
            rounded *= record["scale"]
        rounded[top] = record["top_p"]
        best = int(logits[i].argmax())
        record["mean_log_p"] = float(rounded @ log_p)
        record["log_p_target"] = log_p[targets[i]]
        record["confidence"], record["argmax"] = p[best], best
    return records


class StoredRows:
    """Positions of a reference that were read from a file, in the order of the text."""

    def __init__(self, records: np.ndarray) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, part: slice) -> StoredRows:
        return StoredRows(self._records[part])

    @property
    def n_vocab(self) -> int:
        """Entries of the vocabulary."""
        return int(self._records["codes"].shape[1])

    @property
    def log_p_target(self) -> np.ndarray:
        """Log-probability of the right token, float64 [n], exact."""
        return np.asarray(self._records["log_p_target"])

    @property
    def confidence(self) -> np.ndarray:
        """Probability of the likeliest token, float64 [n], exact."""
        return np.asarray(self._records["confidence"])

    @property
    def argmax(self) -> np.ndarray:
        """The likeliest token, int64 [n]."""
        return np.asarray(self._records["argmax"])

    def kld(self, log_q: np.ndarray) -> np.ndarray:
        """KL divergence in nats of log-probabilities float64 [n, n_vocab] from this reference, float64 [n]."""
        rounded = _POWERS[self._records["codes"]] * self._records["scale"][:, None]
        np.put_along_axis(rounded, self._records["top"].astype(np.int64), self._records["top_p"].astype(float), axis=1)
        return np.asarray(self._records["mean_log_p"] - np.einsum("ij,ij->i", rounded, log_q))


class StoredReference:
    """A file of positions. Raises KvError where it is not one, is cut short, or is of another shape.

    n_rows, n_vocab: what it must hold.
    """

    def __init__(self, path: Path, n_rows: int, n_vocab: int) -> None:
        self.path = path
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
        try:
            shape = json.loads(head.removeprefix(_MAGIC)) if head.startswith(_MAGIC) else None
        except ValueError:
            shape = None
        if shape != [n_rows, n_vocab] or path.stat().st_size != size_bytes(n_rows, n_vocab):
            raise KvError(f"{path} holds no reference of {n_rows} positions; delete it")
        self._records = np.memmap(path, record_type(n_vocab), "r", offset=_HEADER_BYTES, shape=(n_rows,))

    def rows(self, first: int, n: int) -> StoredRows:
        """Positions `first .. first + n - 1`, counted over all windows."""
        return StoredRows(np.array(self._records[first : first + n]))


class Recorder:
    """Writes a reference while it is computed; the file appears under its name when it is whole.

    say: told in one line when it cannot be written (a full disk); what is being measured goes on.
    failed: whether that happened.
    """

    def __init__(self, path: Path, n_rows: int, n_vocab: int, say: Callable[[str], None]) -> None:
        self.path, self.n_rows, self.n_vocab, self.say = path, n_rows, n_vocab, say
        self.failed = False
        self._temporary = ""
        self._file: Any = None
        try:
            handle, self._temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            self._file = os.fdopen(handle, "wb")
            self._file.write((_MAGIC + json.dumps([n_rows, n_vocab]).encode()).ljust(_HEADER_BYTES))
        except OSError as error:
            self._fail(error)

    def add(self, logits: np.ndarray, targets: np.ndarray) -> None:
        """Append positions: logits [n, n_vocab] and the tokens [n] that follow."""
        if self.failed:
            return
        try:
            self._file.write(encode(logits, targets).tobytes())
        except OSError as error:
            self._fail(error)

    def finish(self) -> StoredReference | None:
        """Close the file and give it its name; None where it could not be written."""
        if self.failed:
            return None
        try:
            self._file.close()
            os.replace(self._temporary, self.path)
            return StoredReference(self.path, self.n_rows, self.n_vocab)
        except (OSError, KvError) as error:
            self._fail(error)
            return None

    def discard(self) -> None:
        """Leave nothing behind, after an error or Ctrl-C; harmless after `finish`."""
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        with suppress(OSError):
            if self._temporary:
                os.unlink(self._temporary)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        self.discard()
        why = getattr(error, "strerror", None) or str(error)
        self.say(f"the reference cannot be kept on disk ({why}), so it is computed again where it is needed")
