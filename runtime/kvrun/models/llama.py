"""Llama 1 to 3, Mistral, Mixtral, SmolLM2 and others of their graph (arXiv 2302.13971, 2307.09288, 2401.04088)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional

from ..config import Keys, ModelConfig, RopeStyle
from ..feed_forward import Activation, ExpertFFN, FusedFFN, GatedFFN
from ..gguf_file import GGUFFile
from ..layers import Linear, RMSNorm, Rope, check_shape
from ..weights import Weights
from .base import Attend, Model

_ROPE_FREQS = "rope_freqs.weight"

#: Norms of queries and keys after their projections: none, over each head, or over all heads together.
HeadNorm = Literal["none", "head", "all"]


class Block:
    """The tensors of one layer, `blk.{il}.*`, as a subclass of `Llama` says they are.

    What a model has no tensor for is None; `attn_qkv` holds queries, keys and values in one matrix.
    """

    def __init__(self, model: Llama, weights: Weights, config: ModelConfig, il: int) -> None:
        n_embd, prefix = config.n_embd, f"blk.{il}."

        def norm(name: str, dim: int = n_embd, *, wanted: bool = True) -> RMSNorm | None:
            return RMSNorm(weights, prefix + name, dim, config.rms_eps) if wanted else None

        self.n_head, self.n_head_kv = config.n_head[il], config.n_head_kv[il]
        self.head_dim_k, self.head_dim_v = config.head_dim_k, config.head_dim_v
        sizes = self.n_head * self.head_dim_k, self.n_head_kv * self.head_dim_k, self.n_head_kv * self.head_dim_v
        self.sizes = sizes
        self.attn_norm = norm("attn_norm", wanted=model.pre_norms)
        self.attn_qkv = self.attn_q = self.attn_k = self.attn_v = None
        if f"{prefix}attn_qkv.weight" in weights:
            self.attn_qkv = Linear(weights, f"{prefix}attn_qkv", sum(sizes), n_embd)
        else:
            names = ("attn_q", "attn_k", "attn_v")
            linears = [Linear(weights, prefix + name, size, n_embd) for name, size in zip(names, sizes, strict=True)]
            self.attn_q, self.attn_k, self.attn_v = linears
        dims = (self.head_dim_k, self.head_dim_k) if model.head_norm == "head" else sizes[:2]
        self.attn_q_norm = norm("attn_q_norm", dims[0], wanted=model.head_norm != "none")
        self.attn_k_norm = norm("attn_k_norm", dims[1], wanted=model.head_norm != "none")
        self.attn_output = Linear(weights, f"{prefix}attn_output", n_embd, self.n_head * self.head_dim_v)
        self.post_attention_norm = norm("post_attention_norm", wanted=model.post_norms)
        self.ffn_norm = norm("ffn_norm", wanted=model.pre_norms)
        self.ffn = model.feed_forward(il)
        self.post_ffw_norm = norm("post_ffw_norm", wanted=model.post_norms)

    @property
    def tensors(self) -> list[str]:
        """Names of all tensors of this layer."""
        return [name for part in vars(self).values() for name in getattr(part, "tensors", ())]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before norms and RoPE: each [n, all heads' channels].  x: [n, n_embd]."""
        if self.attn_qkv is not None:
            q, k, v = self.attn_qkv(x).split(self.sizes, -1)
            return q, k, v
        assert self.attn_q is not None and self.attn_k is not None and self.attn_v is not None
        return self.attn_q(x), self.attn_k(x), self.attn_v(x)


class Llama(Model):
    """Pre-norm blocks, grouped-query attention, SwiGLU or experts. GGUF files of `llama` interleave RoPE pairs.

    Architectures that differ in norms, scales or the feed-forward part say so by the attributes below.
    pre_norms: norms before attention and feed-forward.  post_norms: norms after them, before the residual is added.
    """

    arch: ClassVar[tuple[str, ...]] = ("llama",)
    rope_style: ClassVar[RopeStyle] = "interleaved"
    has_rope_freqs: ClassVar[bool] = True
    has_experts: ClassVar[bool] = True
    pre_norms: ClassVar[bool] = True
    post_norms: ClassVar[bool] = False
    head_norm: ClassVar[HeadNorm] = "none"
    #: What the residual stream is multiplied by when tokens enter, and what leaves each half of a block.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        super().__init__(file, weights)
        config = self.config
        self.blk = [Block(self, weights, config, il) for il in range(config.n_layer)]
        used = {name for block in self.blk for name in block.tensors}
        factors = None
        if self.has_rope_freqs and _ROPE_FREQS in weights:
            check_shape(weights, _ROPE_FREQS, (config.n_rot // 2,))
            factors = weights.get(_ROPE_FREQS)
            used.add(_ROPE_FREQS)
        self._rope = self.make_rope(factors=factors)
        self.check_all_tensors_used(used)

    def make_rope(self, *, theta: float | None = None, factors: Tensor | None = None) -> Rope:
        """RoPE as the metadata has it; theta: instead of the file's."""
        config = self.config
        theta = config.rope_theta if theta is None else theta
        return Rope(config.n_rot, theta, config.rope_style, scaling=config.rope_scaling, factors=factors)

    def feed_forward(self, il: int) -> GatedFFN | FusedFFN | ExpertFFN:
        """The second half of layer `il`."""
        config, keys = self.config, Keys(self.file)
        n_expert = keys.count("expert_count") if self.has_experts and keys.get("expert_count", 0) != 0 else 0
        if n_expert:
            n_used = keys.count("expert_used_count", limit=n_expert)
            n_ff = keys.count("expert_feed_forward_length", default=self.expert_width(il, n_used))
            return ExpertFFN(self.weights, il, config.n_embd, n_ff, n_expert, n_used)
        return GatedFFN(self.weights, il, config.n_embd, config.n_ff[il], self.activation())

    def activation(self) -> Activation:
        """What the gate goes through."""
        return functional.silu

    def expert_width(self, il: int, n_used: int) -> int:
        """Channels of an expert where the file does not say; n_used: experts that a token goes through."""
        return self.config.n_ff[il]

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def rope_of(self, il: int) -> Rope:
        return self._rope

    def qkv(self, il: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blk, n = self.blk[il], x.shape[0]
        q, k, v = blk.project(x if blk.attn_norm is None else blk.attn_norm(x))
        norms = blk.attn_q_norm, blk.attn_k_norm
        if self.head_norm == "all":
            q, k = (x if norm is None else norm(x) for norm, x in zip(norms, (q, k), strict=True))
        q, k, v = q.view(n, blk.n_head, -1), k.view(n, blk.n_head_kv, -1), v.view(n, blk.n_head_kv, -1)
        if self.head_norm == "head":
            q, k = (x if norm is None else norm(x) for norm, x in zip(norms, (q, k), strict=True))
        q, k = (self.rope(il, x.transpose(0, 1), positions).contiguous() for x in (q, k))
        return q, k, v.transpose(0, 1).contiguous()

    def block(self, il: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        blk = self.blk[il]
        o = attend(il, *self.qkv(il, x, positions))
        x = self._added(x, blk.attn_output(o.transpose(0, 1).reshape(x.shape[0], -1)), blk.post_attention_norm)
        return self._added(x, blk.ffn(x if blk.ffn_norm is None else blk.ffn_norm(x)), blk.post_ffw_norm)

    def _added(self, x: Tensor, y: Tensor, norm: RMSNorm | None) -> Tensor:
        y = y if norm is None else norm(y)
        return x + (y if self.residual_scale == 1.0 else y * self.residual_scale)
