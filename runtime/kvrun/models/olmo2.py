"""OLMo 2 (arXiv 2501.00656)."""

from __future__ import annotations

from typing import ClassVar

from ..config import RopeStyle
from .llama import HeadNorm, Llama


class Olmo2(Llama):
    """Norms after attention and feed-forward instead of before, and over all heads of queries and keys together."""

    arch: ClassVar[tuple[str, ...]] = ("olmo2",)
    rope_style: ClassVar[RopeStyle] = "neox"
    has_rope_freqs: ClassVar[bool] = False
    has_experts: ClassVar[bool] = False
    pre_norms: ClassVar[bool] = False
    post_norms: ClassVar[bool] = True
    head_norm: ClassVar[HeadNorm] = "all"
