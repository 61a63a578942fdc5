"""`skvq-safe`: `skvq` with the order only in heads where it lowers the round-trip error.

Everything else is as in `skvq`; the recipe is made by `kvconv skvq --safe`. The chooser is ours: a
head whose order does not reduce the squared error of quantizing by 2 % keeps its channels as they come.
"""

from __future__ import annotations

from .base import Preset, plain

PRESET = Preset(
    "skvq-safe",
    plain(2, 128),
    plain(2, 128),
    sinks=5,
    window=128,
    recipe_method="skvq-safe",
    recipe_command="kvconv skvq --safe",
)
