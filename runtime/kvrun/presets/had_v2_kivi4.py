"""`had-v2-kivi4`: values rotated and stored in 2 bits, keys as KIVI stores them in 4.

Keys are per channel in groups of 32 tokens (arXiv 2402.02750). Values are rotated by a Hadamard matrix over the head
(arXiv 2404.00456) and quantized per token in 2 bits, asymmetric, in groups of 32 channels. 128 latest tokens in full
precision, no sinks, as `kivi4`: 5 bits per packed key channel, 3 per value channel.

The combination comes from public reports that call it as good as 4-bit KIVI; they do not agree on a group for the
values, so it is KIVI's. The rest departs from KIVI as `kivi4` does.
"""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvkernels.transform import hadamard_block

from ..plan import HeadPlan, HeadTransform
from .base import Preset, by_channel, head_group


def _value(head_dim: int) -> HeadPlan:
    return HeadPlan(QuantSpec(2, head_group(head_dim, 32)), HeadTransform(hadamard=hadamard_block(head_dim)))


PRESET = Preset("had-v2-kivi4", by_channel(4, 32), _value, window=128)
