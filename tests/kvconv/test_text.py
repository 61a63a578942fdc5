"""Texts, chunks and positions."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvconv.text import CHARACTERS_PER_TOKEN, cut, language_reference, place, read_text
from kvrun.errors import KvError


def letters(text: str) -> list[int]:
    """A tokenizer: one token per character."""
    return [ord(c) for c in text]


def test_files_are_joined_and_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.txt").write_text("zwei é", "utf-8")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"three")))
    text = read_text([str(tmp_path / "a.txt"), "-", str(tmp_path / "b.txt")])
    assert text.content == "one\n\nthree\n\nzwei é"
    assert text.name == "a.txt, stdin, b.txt"
    assert text.sha256 == hashlib.sha256(b"\xef\xbb\xbfonethree" + "zwei é".encode()).hexdigest()


def test_without_a_text_python_lends_one() -> None:
    text = read_text([])
    assert text == language_reference()
    assert "pydoc_data.topics" in text.name and len(text.content) > 200_000
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    with pytest.raises(KvError, match="binary is not UTF-8 text"):
        read_text([str(tmp_path / "binary")])
    (tmp_path / "blank.txt").write_text(" \n ")
    with pytest.raises(KvError, match=r"blank\.txt holds no text"):
        read_text([str(tmp_path / "blank.txt")])
    with pytest.raises(KvError, match="named twice"):
        read_text(["-", "-"])
    with pytest.raises(FileNotFoundError):
        read_text([str(tmp_path / "none.txt")])


def test_chunks_come_from_the_whole_text() -> None:
    text = "".join(chr(100 + i) for i in range(1000))
    chunks = cut(text, letters, 4, 100)
    assert chunks.shape == (4, 100) and chunks.dtype == np.int64
    assert chunks[0, 0] == 100 and chunks[-1, -1] == 1099
    assert all((np.diff(row) == 1).all() for row in chunks)
    assert len(np.unique(chunks)) == 400  # no token twice


def test_a_short_text_gives_fewer_chunks_and_never_a_partial_one() -> None:
    text = "".join(chr(100 + i) for i in range(299))
    chunks = cut(text, letters, 8, 100)
    assert chunks.shape == (2, 100) and len(np.unique(chunks)) == 200
    assert cut(text[:100], letters, 8, 100).shape == (1, 100)
    with pytest.raises(KvError, match="the text has 99 tokens, and one chunk is 100"):
        cut(text[:99], letters, 8, 100)
    with pytest.raises(KvError, match="the text has 0 tokens"):
        cut("", letters, 8, 100)


def test_the_first_token_is_the_models_own() -> None:
    chunks = cut("x" * 1000, letters, 3, 50, bos=7)
    assert (chunks[:, 0] == 7).all() and (chunks[:, 1:] == ord("x")).all()


def test_a_huge_text_is_sampled_before_it_is_tokenized() -> None:
    seen: list[int] = []

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return letters(text)

    text = "a" * 400_000 + "b" * 400_000
    chunks = cut(text, counting, 4, 50)
    assert chunks.shape == (4, 50)
    assert max(seen) <= 50 * CHARACTERS_PER_TOKEN and sum(seen) < len(text) // 10
    assert [chr(row[0]) for row in chunks] == ["a", "a", "b", "b"]
    with pytest.raises(KvError, match="tokens, and one chunk is 50"):
        cut(text, lambda piece: [1], 4, 50)


@pytest.mark.parametrize("n_chunks", [1, 3, 8, 40])
def test_positions_are_spread_over_the_context(n_chunks: int) -> None:
    positions = place(n_chunks, 512, 4096, seed=3)
    assert positions.shape == (n_chunks, 512)
    assert positions.min() >= 0 and positions.max() < 4096
    assert (np.diff(positions, axis=1) == 1).all()
    parts = np.sort(positions[:, 0] * n_chunks // (4096 - 512))
    assert (np.abs(parts - np.arange(n_chunks)) <= 1).all()  # one start in every part of the context
    np.testing.assert_array_equal(positions, place(n_chunks, 512, 4096, seed=3))
    assert (positions != place(n_chunks, 512, 4096, seed=4)).any()


def test_a_context_of_one_chunk_leaves_no_choice() -> None:
    assert (place(5, 512, 512, seed=0)[:, 0] == 0).all()
