"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115)."""

from __future__ import annotations

from typing import ClassVar

from ..config import RopeStyle
from ..gguf_file import GGUFFile
from ..layers import check_shape
from ..weights import Weights
from .llama import Llama


class Qwen2(Llama):
    """Llama's graph with biases on queries, keys and values, and RoPE pairs half a head apart."""

    arch: ClassVar[tuple[str, ...]] = ("qwen2",)
    rope_style: ClassVar[RopeStyle] = "neox"
    has_rope_freqs: ClassVar[bool] = False

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        super().__init__(file, weights)
        dim_k, dim_v = self.config.head_dim_k, self.config.head_dim_v
        for il, blk in enumerate(self.blk):  # `Linear` takes a bias where there is one; here there must be
            heads = {"attn_q": blk.n_head * dim_k, "attn_k": blk.n_head_kv * dim_k, "attn_v": blk.n_head_kv * dim_v}
            for name, n_out in heads.items():
                check_shape(weights, f"blk.{il}.{name}.bias", (n_out,))
