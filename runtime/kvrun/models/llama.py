"""Llama 1 to 3, Mistral, SmolLM2 and the many models that share their graph (arXiv 2302.13971, 2307.09288)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from ..config import ModelConfig, RopeStyle
from ..errors import UnsupportedModelError
from ..gguf_file import GGUFFile
from ..layers import Linear, RMSNorm, Rope, check_shape
from ..weights import Weights
from .base import Attend, Model

_ROPE_FREQS = "rope_freqs.weight"


class Block:
    """The tensors of one layer, `blk.{il}.*`."""

    def __init__(self, weights: Weights, config: ModelConfig, il: int) -> None:
        def linear(name: str, n_out: int, n_in: int) -> Linear:
            return Linear(weights, f"blk.{il}.{name}", n_out, n_in)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights, f"blk.{il}.{name}", config.n_embd, config.rms_eps)

        n_embd, n_ff = config.n_embd, config.n_ff[il]
        self.n_head, self.n_head_kv = config.n_head[il], config.n_head_kv[il]
        self.attn_norm = norm("attn_norm")
        self.attn_q = linear("attn_q", self.n_head * config.head_dim_k, n_embd)
        self.attn_k = linear("attn_k", self.n_head_kv * config.head_dim_k, n_embd)
        self.attn_v = linear("attn_v", self.n_head_kv * config.head_dim_v, n_embd)
        self.attn_output = linear("attn_output", n_embd, self.n_head * config.head_dim_v)
        self.ffn_norm = norm("ffn_norm")
        self.ffn_gate = linear("ffn_gate", n_ff, n_embd)
        self.ffn_up = linear("ffn_up", n_ff, n_embd)
        self.ffn_down = linear("ffn_down", n_embd, n_ff)

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors of this layer."""
        parts = [part for part in vars(self).values() if isinstance(part, (Linear, RMSNorm))]
        return [name for part in parts for name in part.tensors]


class Llama(Model):
    """Pre-norm blocks, grouped-query attention, SwiGLU. GGUF files of this architecture interleave RoPE pairs."""

    arch: ClassVar[tuple[str, ...]] = ("llama",)
    rope_style: ClassVar[RopeStyle] = "interleaved"
    has_rope_freqs: ClassVar[bool] = True

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        if file.get(f"{file.arch}.expert_count", 0):
            raise UnsupportedModelError(
                f"{file.path}: a mixture of experts, which is not supported; choose another model"
            )
        super().__init__(file, weights)
        config = self.config
        self.blk = [Block(weights, config, il) for il in range(config.n_layer)]
        used = {name for block in self.blk for name in block.tensors}
        factors = None
        if self.has_rope_freqs and _ROPE_FREQS in weights:
            check_shape(weights, _ROPE_FREQS, (config.n_rot // 2,))
            factors = weights.get(_ROPE_FREQS)
            used.add(_ROPE_FREQS)
        self._rope = Rope(config.n_rot, config.rope_theta, config.rope_style, scale=config.rope_scale, factors=factors)
        self.check_all_tensors_used(used)

    def rope_of(self, il: int) -> Rope:
        return self._rope

    def qkv(self, il: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blk, n = self.blk[il], x.shape[0]
        x = blk.attn_norm(x)
        q = blk.attn_q(x).view(n, blk.n_head, -1).transpose(0, 1)
        k = blk.attn_k(x).view(n, blk.n_head_kv, -1).transpose(0, 1)
        v = blk.attn_v(x).view(n, blk.n_head_kv, -1).transpose(0, 1)
        return self.rope(il, q, positions).contiguous(), self.rope(il, k, positions).contiguous(), v.contiguous()

    def block(self, il: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        blk = self.blk[il]
        o = attend(il, *self.qkv(il, x, positions))
        x = x + blk.attn_output(o.transpose(0, 1).reshape(x.shape[0], -1))
        h = blk.ffn_norm(x)
        return x + blk.ffn_down(functional.silu(blk.ffn_gate(h)) * blk.ffn_up(h))
