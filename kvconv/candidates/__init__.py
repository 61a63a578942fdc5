"""Candidates for a head's transform, one small class per file; a new file in this folder is found by itself.

`rank` says how much a candidate asks of the cache: the chooser goes through them from the simplest on, and a later one
must beat the best so far by a margin.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from .base import Candidate

__all__ = ["Candidate", "candidates"]


@cache
def candidates() -> tuple[Candidate, ...]:
    """One instance of every candidate in this folder, simplest first."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    found = (cls() for cls in Candidate.__subclasses__())
    return tuple(sorted(found, key=lambda candidate: (candidate.rank, candidate.name)))
