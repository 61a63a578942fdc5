"""The text that a model is calibrated on, and how it is cut into chunks and placed over the context."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvrun.errors import KvError

#: A text of more characters than this per wanted token is sampled at even distances before it is tokenized.
CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True)
class Text:
    """A text with its name (no folders) and the sha256 of its bytes."""

    name: str
    content: str
    sha256: str


def read_text(files: Sequence[str]) -> Text:
    """The files one after the other, UTF-8, `-` is stdin; without any, the language reference inside Python.

    Raises KvError where one is not UTF-8 text or all are empty, OSError where one cannot be read.
    """
    if not files:
        return language_reference()
    if list(files).count("-") > 1:
        raise KvError("standard input was named twice with -f -; name it once")
    names, parts, digest = [], [], hashlib.sha256()
    for file in files:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        name = "stdin" if file == "-" else Path(file).name
        try:
            parts.append(data.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise KvError(f"{name} is not UTF-8 text (byte {error.start}); convert it or name another file") from error
        names.append(name)
        digest.update(data)
    content = "\n\n".join(parts)
    if not content.strip():
        raise KvError(f"{', '.join(names)} holds no text; name another file with -f")
    return Text(", ".join(names), content, digest.hexdigest())


def language_reference() -> Text:
    """The Python language reference that ships with the interpreter (`pydoc_data.topics`): prose about code."""
    from pydoc_data.topics import topics

    content = "\n\n".join(topics[name] for name in sorted(topics))
    version = ".".join(map(str, sys.version_info[:3]))
    return Text(f"pydoc_data.topics of Python {version}", content, hashlib.sha256(content.encode()).hexdigest())


def cut(
    text: str, encode: Callable[[str], Sequence[int]], n_chunks: int, chunk_tokens: int, *, bos: int | None = None
) -> np.ndarray:
    """Chunks from even distances over the whole text: int64 [at most n_chunks, chunk_tokens].

    bos: the first token of each chunk is replaced by this one, as llama-perplexity does; None replaces nothing.
    Fewer chunks than wanted where the text is short.  Raises KvError where it does not fill a single one.
    """
    limit = n_chunks * chunk_tokens * CHARACTERS_PER_TOKEN
    if len(text) <= limit:
        tokens = np.asarray(encode(text), np.int64)
        n_fit = min(n_chunks, len(tokens) // chunk_tokens)
        starts = np.linspace(0, max(len(tokens) - chunk_tokens, 0), n_fit).astype(int)
        rows = [tokens[start : start + chunk_tokens] for start in starts]
    else:
        width = chunk_tokens * CHARACTERS_PER_TOKEN
        starts = np.linspace(0, len(text) - width, n_chunks).astype(int)
        rows = [np.asarray(encode(text[start : start + width])[:chunk_tokens], np.int64) for start in starts]
        rows = [row for row in rows if len(row) == chunk_tokens]
        tokens = np.concatenate(rows) if rows else np.empty(0, np.int64)
    if not rows:
        short = f"the text has {len(tokens)} tokens, and one chunk is {chunk_tokens}"
        raise KvError(f"{short}; give more text with -f, or smaller chunks with --chunk-tokens")
    chunks = np.stack(rows)
    if bos is not None:
        chunks[:, 0] = bos
    return chunks


def held_out(n_chunks: int, n_held: int) -> list[int]:
    """Which of the chunks of a text are held out: `n_held` from even distances, and none where there are no more."""
    if not 0 < n_held < n_chunks:
        return []
    return [int((i + 0.5) * n_chunks / n_held) for i in range(n_held)]


def place(n_chunks: int, chunk_tokens: int, n_ctx: int, seed: int) -> np.ndarray:
    """Positions of every token: int64 [n_chunks, chunk_tokens], chunks spread at random over `0 .. n_ctx - 1`.

    RoPE turns the mean of the keys with the position: what is learned at the first positions alone is wrong further on.
    The context is cut into as many parts as there are chunks, and one chunk starts at random within each.
    """
    rng = np.random.default_rng(seed)
    room = max(n_ctx - chunk_tokens, 0)
    starts = (rng.permutation(n_chunks) + rng.random(n_chunks)) * (room / n_chunks)
    return starts.astype(np.int64)[:, None] + np.arange(chunk_tokens)
