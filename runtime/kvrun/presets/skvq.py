"""`skvq`: SKVQ at 2 bits (arXiv 2405.06219, github.com/cat538/SKVQ), in our per-head form.

Settings of the paper: channels ordered by clusters of their calibrated minimum and maximum, asymmetric codes per token
in groups of 128 channels, clip 0.96, 128 latest tokens and 5 sinks in full precision. Orders, clip and width come from
a recipe made by `kvconv skvq`, which writes these settings.

Ours departs: SKVQ clusters the channels of all heads of a layer together, before RoPE, into groups of unequal size;
here each head is ordered by itself, after RoPE, into groups of equal size, so that a group is at most one head. Where
the group is the whole head the order changes nothing: calibrate with a smaller --group to see it act. Sinks are left
out of the calibrated ranges. Scales and minima are f16, not FP8: 0.25 bits more per value at a group of 64.
"""

from __future__ import annotations

from .base import Preset, plain

PRESET = Preset(
    "skvq", plain(2, 128), plain(2, 128), sinks=5, window=128, recipe_method="skvq", recipe_command="kvconv skvq"
)
