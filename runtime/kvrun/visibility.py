"""The one rule for which tokens a query sees packed and which it sees in full precision.

With `n` tokens present, sinks `S`, window `W` and block `B`::

    packed(n) = tokens S .. S + B * floor(max(n - S - W, 0) / B) - 1

and all others are full precision. The query at position `t` sees what `n = t + 1` gives, however it arrived: alone, in
a prefill chunk of any size, or in a parallel evaluation. A token is therefore quantized once and never again, and the
result does not depend on how the text was cut into chunks.
"""

from __future__ import annotations


def packed_end(n: int, sinks: int, window: int, block: int) -> int:
    """First position after the packed region `[sinks, packed_end)` when `n` tokens are present (in tokens)."""
    return sinks + block * (max(n - sinks - window, 0) // block)


def n_packed(n: int, sinks: int, window: int, block: int) -> int:
    """How many tokens are packed when `n` tokens are present."""
    return block * (max(n - sinks - window, 0) // block)


def packed_reads(n_before: int, n_after: int, sinks: int, window: int, block: int) -> int:
    """How many packed tokens the queries at positions `n_before .. n_after - 1` read in all (one layer)."""
    return sum(n_packed(n, sinks, window, block) for n in range(n_before + 1, n_after + 1))
