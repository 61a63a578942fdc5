"""References on disk: divergences as from the logits themselves, files that are whole or not there, a limit of size."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrun.errors import KvError
from kvrun.evaluation import stored
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.reference_cache import ReferenceCache
from kvrun.evaluation.stored import Recorder, StoredReference, StoredRows, encode, size_bytes

N, VOCAB = 37, 4001


def logits_of(seed: int, spread: float = 3.0) -> np.ndarray:
    """Logits with the long tail that real ones have."""
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal((N, VOCAB)) + rng.gumbel(size=(N, 1)) * 5).astype(np.float32)


REFERENCE = logits_of(1)
TARGETS = np.random.default_rng(2).integers(0, VOCAB, N)


def record(path: Path, said: list[str], *, step: int = N) -> Recorder:
    recorder = Recorder(path, N, VOCAB, said.append)
    for i in range(0, N, step):
        recorder.add(REFERENCE[i : i + step], TARGETS[i : i + step])
    return recorder


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3, 3.0])
def test_divergences_are_those_of_the_logits(noise: float) -> None:
    """To 1e-5 in the mean, from caches that change next to nothing to ones that destroy the model."""
    other = (REFERENCE + noise * np.random.default_rng(3).standard_normal(REFERENCE.shape)).astype(np.float32)
    exact, kept = TokenScores(), TokenScores()
    exact.add(other, TARGETS, REFERENCE)
    kept.add(other, TARGETS, StoredRows(encode(REFERENCE, TARGETS)))
    assert abs(kept.kld.mean() - exact.kld.mean()) < 1e-5
    assert np.abs(kept.kld - exact.kld).max() < 1e-4 * max(noise, 1e-6)
    assert kept.nll_reference == pytest.approx(exact.nll_reference, abs=1e-12)
    assert kept.confidence == pytest.approx(exact.confidence, abs=1e-12)
    assert np.array_equal(kept.same_top, exact.same_top) and np.array_equal(kept.nll, exact.nll)


@pytest.mark.parametrize("vocab", [3, 256, 257, 300])
def test_small_vocabularies(vocab: int) -> None:
    reference, targets = REFERENCE[:, :vocab], TARGETS % vocab
    other = reference + np.float32(0.1) * REFERENCE[:, -vocab:]
    exact, kept = TokenScores(), TokenScores()
    exact.add(other, targets, reference)
    kept.add(other, targets, StoredRows(encode(reference, targets)))
    assert kept.kld == pytest.approx(exact.kld, abs=1e-5)


def test_a_distribution_of_one_token_survives() -> None:
    reference = np.zeros((1, VOCAB), np.float32)
    reference[0, 7] = 1e4
    rows = StoredRows(encode(reference, np.array([7])))
    scores = TokenScores()
    scores.add(np.zeros((1, VOCAB)), np.array([7]), rows)
    assert scores.kld == pytest.approx(np.log(VOCAB)) and rows.confidence[0] == 1.0


def test_a_file_is_what_was_written_in_pieces(tmp_path: Path) -> None:
    said: list[str] = []
    recorder = record(tmp_path / "a", said, step=5)
    assert not (tmp_path / "a").exists(), "nothing under its name before it is whole"
    found = recorder.finish()
    recorder.discard()
    assert found is not None and said == [] and [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").stat().st_size == size_bytes(N, VOCAB)
    whole = StoredRows(encode(REFERENCE, TARGETS))
    log_q = np.full((N, VOCAB), -np.log(VOCAB))
    parts = [found.rows(first, 10).kld(log_q[first : first + 10]) for first in range(0, N, 10)]
    assert np.array_equal(np.concatenate(parts), whole.kld(log_q))


def test_files_that_are_damaged_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    record(path, []).finish()
    for shape in ((N - 1, VOCAB), (N, VOCAB + 1)):
        with pytest.raises(KvError, match="delete it"):
            StoredReference(path, *shape)
    content = path.read_bytes()
    for damaged in (content[:-1], content[:40], b"", b"GGUF" + content[4:], b"kvrun.reference 1\n[" + content[20:]):
        path.write_bytes(damaged)
        with pytest.raises(KvError, match="delete it"):
            StoredReference(path, N, VOCAB)
    said: list[str] = []
    cache = ReferenceCache(said.append, folder=tmp_path)
    path.rename(cache.path_of("key"))
    assert cache.find("key", N, VOCAB) is None and cache.find("key", N, VOCAB) is None
    assert len(said) == 1 and "delete it" in said[0]


class FullDisk:
    """A file on a disk that is full from the second write on."""

    def __init__(self, file: Any) -> None:
        self.file, self.n = file, 0

    def write(self, data: bytes) -> int:
        self.n += 1
        if self.n > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.file.write(data))

    def close(self) -> None:
        self.file.close()


def test_a_full_disk_is_said_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fdopen = os.fdopen
    monkeypatch.setattr(stored.os, "fdopen", lambda handle, mode: FullDisk(fdopen(handle, mode)))
    said: list[str] = []
    recorder = record(tmp_path / "a", said, step=3)
    assert recorder.failed and recorder.finish() is None
    assert len(said) == 1 and "No space left on device" in said[0] and "computed again" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    said: list[str] = []
    size = size_bytes(N, VOCAB)
    cache = ReferenceCache(said.append, limit_bytes=3 * size, folder=tmp_path / "references")
    other = tmp_path / "references" / "somebody's.txt"
    for i, key in enumerate("abc"):
        path = cache.reserve(key, N, VOCAB)
        assert path is not None
        record(path, said).finish()
        os.utime(path, (i, i))
    other.write_text("not ours")
    os.utime(other, (0, 0))
    assert cache.find("a", N, VOCAB) is not None, "used now: it is the youngest"
    assert said == []
    recorder = cache.recorder("d", N, VOCAB)
    assert recorder is not None
    recorder.add(REFERENCE, TARGETS)
    recorder.finish()
    assert [key for key in "abcd" if cache.find(key, N, VOCAB) is not None] == ["a", "c", "d"]
    assert other.exists() and len(said) == 1 and "oldest" in said[0]


def test_a_reference_in_a_folder_that_is_read_only_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cache = ReferenceCache(said.append, folder=tmp_path)
    record(cache.path_of("a"), said).finish()

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.find("a", N, VOCAB) is not None and said == []


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    cache = ReferenceCache(said.append, limit_bytes=1000, folder=tmp_path / "references")
    assert cache.recorder("a", N, VOCAB) is None and cache.reserve("a", N, VOCAB) is None
    assert len(said) == 1 and "--references" in said[0] and not (tmp_path / "references").exists()
    (tmp_path / "file").write_text("")
    cache = ReferenceCache(said.append, folder=tmp_path / "file" / "references")
    assert cache.find("a", N, VOCAB) is None and cache.recorder("a", N, VOCAB) is None
    assert len(said) == 2 and "KVRUN_CACHE" in said[1]
    cache = ReferenceCache(said.append, folder=tmp_path)
    cache.path_of("a").mkdir()
    assert cache.find("a", N, VOCAB) is None and "cannot be read (Is a directory)" in said.pop()
    none = ReferenceCache(said.append, limit_bytes=0, folder=tmp_path)
    assert none.recorder("a", N, VOCAB) is None and none.find("a", N, VOCAB) is None and len(said) == 2
