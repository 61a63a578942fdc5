"""`kivi4`: KIVI at 4 bits (arXiv 2402.02750, github.com/jy-yuan/KIVI).

Settings of the paper: keys per channel in groups of 32 tokens, values per token in groups of 32 channels, asymmetric
with a scale and a minimum in f16, 128 latest tokens in full precision, no sinks. That is 5 bits per packed value.

Ours departs: KIVI keeps 0 to 127 latest keys and packs all of them when there are 128; here 128 to 159 keys stay in
full precision and 32 are packed at a time. KIVI attends to unquantized keys and values while it reads the prompt; here
every query sees what it would see in decoding.
"""

from __future__ import annotations

from .base import Preset, by_channel, plain

PRESET = Preset("kivi4", by_channel(4, 32), plain(4, 32), window=128)
