"""The one rule for which tokens a query sees packed and which it sees in full precision.

With `n` tokens present, sinks `S`, window `W` and block `B`::

    packed(n) = tokens S .. S + B * floor(max(n - S - W, 0) / B) - 1

and all others are full precision. The query at position `t` sees what `n = t + 1` gives, however it arrived: alone, in
a prefill chunk of any size, or in a parallel evaluation. A token is therefore quantized once and never again, and the
result does not depend on how the text was cut into chunks.

A layer with a sliding window of `L` tokens shows that query the tokens from position `t - L + 1` on, by the same rule,
and what no later query sees is dropped.
"""

from __future__ import annotations


def packed_end(n: int, sinks: int, window: int, block: int) -> int:
    """First position after the packed region `[sinks, packed_end)` when `n` tokens are present (in tokens)."""
    return sinks + block * (max(n - sinks - window, 0) // block)


def n_packed(n: int, sinks: int, window: int, block: int) -> int:
    """How many tokens are packed when `n` tokens are present."""
    return block * (max(n - sinks - window, 0) // block)


def first_seen(n: int, sliding: int) -> int:
    """Position of the first token that the last of `n` sees; sliding: the layer's window in tokens, 0 is none."""
    return max(n - sliding, 0) if sliding else 0


def dropped_end(n: int, sinks: int, window: int, block: int, sliding: int) -> int:
    """Position of the first packed token that is kept when `n` are present, whole blocks after the sinks.

    Later queries see none of the packed tokens before it, `sinks .. dropped_end - 1`.
    """
    unseen = first_seen(n + 1, sliding) - sinks
    return min(sinks + block * (max(unseen, 0) // block), packed_end(n, sinks, window, block))


def packed_reads(n_before: int, n_after: int, sinks: int, window: int, block: int, sliding: int = 0) -> int:
    """How many packed tokens the queries at positions `n_before .. n_after - 1` read in all (one layer)."""
    steps = range(n_before + 1, n_after + 1)
    return sum(max(packed_end(n, sinks, window, block) - max(first_seen(n, sliding), sinks), 0) for n in steps)
