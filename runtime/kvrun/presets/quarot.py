"""`quarot`: the KV cache of QuaRot at 4 bits (arXiv 2404.00456).

Settings of the paper: Hadamard rotation of keys (after RoPE) and values over the head, asymmetric codes per token in
groups of 128 channels, clip 0.95, scale and minimum in f16, no sinks and no window.

Ours departs: QuaRot rotates the values through the weights, here it is done when they are stored, which is the same
map; a head that is no multiple of 128 is one group; the rotation is block-diagonal where the head size is no power of
two; the clip narrows a group's range around its middle, QuaRot scales both ends towards 0. Weights and activations stay
as the model file has them.
"""

from __future__ import annotations

from kvkernels.spec import QuantSpec
from kvkernels.transform import hadamard_block

from ..plan import HeadPlan, HeadTransform
from .base import Preset, head_group


def _head(head_dim: int) -> HeadPlan:
    rotation = HeadTransform(hadamard=hadamard_block(head_dim))
    return HeadPlan(QuantSpec(4, head_group(head_dim, 128)), rotation, clip=0.95)


PRESET = Preset("quarot", _head, _head)
