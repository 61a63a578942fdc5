"""`f16`: nothing is quantized. What every other preset is compared with."""

from __future__ import annotations

from kvkernels.spec import QuantSpec

from ..plan import HeadPlan
from .base import Preset


def _head(head_dim: int) -> HeadPlan:
    return HeadPlan(QuantSpec(16))


PRESET = Preset("f16", _head, _head)
