"""Bits where they matter: one option for every head, so that the sum of costs is small and the size kept."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvrun.errors import KvError

from .choose import Option


def hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull of cost over bits, narrowest first; each next one costs less."""
    best: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.cost)):
        if best and option.cost >= best[-1].cost:
            continue
        while len(best) >= 2 and _gain(best[-2], best[-1]) <= _gain(best[-2], option):
            best.pop()
        best.append(option)
    return best


def _gain(a: Option, b: Option) -> float:
    """Cost saved per bit from `a` to the wider `b`."""
    return (a.cost - b.cost) / (b.bits - a.bits)


def allocate(heads: Sequence[Sequence[Option]], n_values: Sequence[int], bits: float) -> list[Option]:
    """One option for each head: the mean of bits over all values is at most `bits`, the sum of costs small.

    n_values: channels of each head.  From the narrowest storage of every head on, the step that saves the most cost per
    bit is taken as long as it fits: marginal gains on the convex hull, optimal up to the last step (Shoham and Gersho
    1988).  Raises KvError where the narrowest options already take more.
    """
    hulls = [hull(options) for options in heads]
    at = [0] * len(hulls)
    room = bits * sum(n_values) - sum(h[0].bits * n for h, n in zip(hulls, n_values, strict=True))
    if room < -1e-6:
        least = sum(h[0].bits * n for h, n in zip(hulls, n_values, strict=True)) / sum(n_values)
        raise KvError(f"{bits:g} bits are less than the narrowest storage takes, {least:.2f}; give more with --bits")

    queue: list[tuple[float, int]] = []

    def offer(i: int) -> None:
        if at[i] + 1 < len(hulls[i]):
            heapq.heappush(queue, (-_gain(hulls[i][at[i]], hulls[i][at[i] + 1]) / n_values[i], i))

    for i in range(len(hulls)):
        offer(i)
    while queue:
        _, i = heapq.heappop(queue)
        step = (hulls[i][at[i] + 1].bits - hulls[i][at[i]].bits) * n_values[i]
        if step <= room + 1e-6:
            room -= step
            at[i] += 1
            offer(i)
    return [h[j] for h, j in zip(hulls, at, strict=True)]
