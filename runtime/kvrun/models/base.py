"""What every model offers to the engines and to the calibrator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..config import ModelConfig, RopeStyle
from ..errors import UnsupportedModelError
from ..gguf_file import GGUFFile
from ..layers import Linear, RMSNorm, Rope, causal_attention, check_shape
from ..weights import Weights

#: `(layer, q [n_head, n, d_k], k [n_head_kv, n, d_k], v [n_head_kv, n, d_v]) -> o [n_head, n, d_v]`
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

_EMBEDDING = "token_embd.weight"


class Model(ABC):
    """A decoder-only transformer read from a GGUF file.

    A subclass names its `arch` (the `general.architecture` values it runs) and `rope_style`, builds its layers in
    `__init__` from `kvrun.layers` under the names of their tensors, and says how one block computes. It is found
    because it lies in `kvrun/models/`; see `kvrun.models`.
    """

    arch: ClassVar[tuple[str, ...]] = ()
    rope_style: ClassVar[RopeStyle] = "neox"
    #: Values of `rope.scaling.type` that the graph can compute.
    rope_scalings: ClassVar[tuple[str, ...]] = ("linear", "yarn")
    #: The last of so many layers sees all tokens, the others slide; 0: none slides.  Tokens where the file says none.
    sliding_period: ClassVar[int] = 0
    sliding_default: ClassVar[int] = 0
    #: Scores are softly limited to this (`kvkernels.attend`); 0 leaves them.
    attention_softcap: float = 0.0

    def __init__(self, file: GGUFFile, weights: Weights) -> None:
        self.file = file
        self.weights = weights
        self.dtype: torch.dtype = weights.dtype
        self.config = config = ModelConfig.from_file(
            file, self.rope_style, self.rope_scalings, (self.sliding_period, self.sliding_default)
        )
        check_shape(weights, _EMBEDDING, (config.n_vocab, config.n_embd))
        self.output_norm = RMSNorm(weights, "output_norm", config.n_embd, config.rms_eps)
        # A file without an output matrix ties it to the embedding.
        head = "output" if "output.weight" in weights else "token_embd"
        self._head = Linear(weights, head, config.n_vocab, config.n_embd)

    def set_context(self, n_ctx: int) -> None:  # noqa: B027
        """Prepare for a context of `n_ctx` tokens; a few models turn their keys otherwise where it is long."""

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [n].  Returns what enters the first block, [n, n_embd]."""
        return self.weights.rows(_EMBEDDING, tokens)

    @abstractmethod
    def qkv(self, il: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of layer `il` as attention takes them: after norms and RoPE.

        x: [n, n_embd], what enters the block.  positions: int64 [n].
        Returns q [n_head, n, head_dim_k], k [n_head_kv, n, head_dim_k], v [n_head_kv, n, head_dim_v].
        """

    @abstractmethod
    def rope_of(self, il: int) -> Rope:
        """The RoPE of layer `il`; layers that turn alike share one, and with it its tables."""

    def rope(self, il: int, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE of layer `il`.  x: [n_head, n, head_dim_k].  positions: int64 [n].  Same shape out."""
        return self.rope_of(il)(x, positions)

    @abstractmethod
    def block(self, il: int, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Layer `il`.  x: [n, n_embd].  positions: int64 [n].  attend: see `Attend`.  Returns [n, n_embd]."""

    def attention_scale(self, il: int) -> float:
        """What the products of queries and keys of layer `il` are multiplied by."""
        return self.config.head_dim_k**-0.5

    def plain_attention(self, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of layer `il` over a sequence's own keys and values, by no cache; shapes as `Attend` has them."""
        sliding = self.config.geometry[il].sliding
        return causal_attention(q, k, v, self.attention_scale(il), sliding=sliding, softcap=self.attention_softcap)

    def output(self, x: Tensor) -> Tensor:
        """x: [n, n_embd], what leaves the last block.  Returns logits [n, n_vocab]."""
        return self._head(self.output_norm(x))

    def check_all_tensors_used(self, used: set[str]) -> None:
        """Raise UnsupportedModelError where the file holds a tensor that this graph would silently ignore."""
        used = used | {_EMBEDDING, *self.output_norm.tensors, *self._head.tensors}
        extra = [name for name in self.file.tensors if name not in used]
        if extra:
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {extra[0]!r} has no place in the graph of architecture {self.config.arch}; "
                "this variant is not supported, choose another model"
            )
