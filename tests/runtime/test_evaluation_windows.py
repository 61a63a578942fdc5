"""How a text is cut and what is scored: llama-perplexity's protocol, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvrun.errors import KvError
from kvrun.evaluation.windows import Windows, cut


def test_a_window_of_eight_by_hand() -> None:
    """Tokens 0..18, context 8: windows 0..7 and 8..15; positions 4, 5, 6 predict the fifth to the seventh token."""
    windows = cut(range(19), 8, bos=99)
    assert windows.tokens.tolist() == [[99, 1, 2, 3, 4, 5, 6, 7], [99, 9, 10, 11, 12, 13, 14, 15]]
    assert (len(windows), windows.n_ctx, windows.first, windows.n_scored) == (2, 8, 4, 6)
    assert cut(range(19), 8, bos=None).tokens[1].tolist() == list(range(8, 16))


def test_an_odd_window_by_hand() -> None:
    windows = cut(range(7), 7, bos=None)
    assert (windows.first, windows.n_scored) == (3, 3)


def test_limit() -> None:
    assert len(cut(range(100), 10, bos=None, limit=3)) == 3
    assert len(cut(range(100), 10, bos=None, limit=-1)) == len(cut(range(100), 10, bos=None)) == 10
    assert len(cut(range(100), 10, bos=None, limit=50)) == 10


@pytest.mark.parametrize("n_ubatch", [1, 3, 7, 512])
@pytest.mark.parametrize("n_ctx", [4, 9, 64])
def test_chunks_cover_each_token_once_and_score_the_second_half(n_ubatch: int, n_ctx: int) -> None:
    windows = cut(range(100, 100 + 2 * n_ctx), n_ctx, bos=None)
    chunks = list(windows.chunks(n_ubatch, n_vocab=1000))
    assert [t for c in chunks for t in range(c.start, c.stop)] == list(range(n_ctx))
    assert all(c.stop - c.start <= n_ubatch for c in chunks)
    assert [t for c in chunks if c.scored for t in range(c.start, c.stop)] == list(range(n_ctx // 2, n_ctx))
    pairs = [
        (int(windows.tokens[1, position]), int(target))
        for c in chunks
        if c.scored
        for position, target in zip(range(c.start, c.stop), windows.targets(1, c), strict=False)
    ]
    # position i predicts token i + 1, i from n_ctx / 2 to n_ctx - 2
    assert pairs == [(100 + n_ctx + i, 100 + n_ctx + i + 1) for i in range(n_ctx // 2, n_ctx - 1)]
    assert len(pairs) * 2 == windows.n_scored


def test_logits_alive_stay_small_whatever_the_vocabulary() -> None:
    windows = cut(range(8192), 8192, bos=None)
    for n_vocab in (49_152, 262_144, 10**9):
        scored = [c for c in windows.chunks(4096, n_vocab) if c.scored]
        assert max((c.stop - c.start) * n_vocab for c in scored) <= max(1 << 25, n_vocab)


@pytest.mark.parametrize(
    ("n_tokens", "n_ctx", "limit", "says"),
    [
        (511, 512, None, "511 tokens, less than one window of 512.*-c 511"),
        (2, 512, None, "2 tokens, less than one window of 512.*longer text"),
        (0, 512, None, "0 tokens"),
        (512, 3, None, "leaves nothing to score"),
        (512, 512, 0, "--chunks 0"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(n_tokens: int, n_ctx: int, limit: int | None, says: str) -> None:
    with pytest.raises(KvError, match=says) as caught:
        cut(range(n_tokens), n_ctx, bos=None, limit=limit)
    assert "\n" not in str(caught.value)


def test_a_chunk_needs_a_token() -> None:
    with pytest.raises(ValueError, match="positive"):
        list(Windows(np.zeros((1, 8), np.int64)).chunks(0, 10))
