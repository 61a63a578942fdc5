"""The pieces that model graphs are made of. Attributes are named as the tensors are: `attn_q.weight`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvkernels.attend import soft_capped

from .config import RopeStyle
from .errors import GGUFError
from .rope_scaling import RopeScaling
from .weights import Weights


def check_shape(weights: Weights, name: str, shape: tuple[int, ...]) -> None:
    """Raise GGUFError where a tensor is missing or has another shape than the metadata implies."""
    info = weights.file.tensors.get(name)
    if info is None:
        raise GGUFError(f"{weights.file.path}: tensor {name!r} is missing; the model is incomplete, download it again")
    if info.shape != shape:
        found, wanted = list(info.shape), list(shape)
        why = f"tensor {name!r} has shape {found} where the metadata says {wanted}"
        raise GGUFError(f"{weights.file.path}: {why}; convert the model again")


class Linear:
    """`x @ weight.T + bias` for the tensors `name.weight` [n_out, n_in] and, where the file has it, `name.bias`."""

    def __init__(self, weights: Weights, name: str, n_out: int, n_in: int) -> None:
        self._weights = weights
        self._weight_name = f"{name}.weight"
        self._bias_name = f"{name}.bias" if f"{name}.bias" in weights else None
        self.tensors = [n for n in (self._weight_name, self._bias_name) if n is not None]
        check_shape(weights, self._weight_name, (n_out, n_in))
        if self._bias_name is not None:
            check_shape(weights, self._bias_name, (n_out,))

    @property
    def weight(self) -> Tensor:
        """[n_out, n_in]"""
        return self._weights.get(self._weight_name)

    @property
    def bias(self) -> Tensor | None:
        """[n_out], or None where the file has none."""
        return None if self._bias_name is None else self._weights.get(self._bias_name)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, n_in].  Returns [n, n_out]."""
        return self._weights.linear(self._weight_name, x, self.bias)


class RMSNorm:
    """Root mean square norm over the last axis with the tensor `name.weight` [dim] (arXiv 1910.07467)."""

    def __init__(self, weights: Weights, name: str, dim: int, eps: float) -> None:
        self._weights = weights
        self._weight_name = f"{name}.weight"
        self.tensors = [self._weight_name]
        self._dim = (dim,)
        self._eps = eps
        check_shape(weights, self._weight_name, (dim,))

    @property
    def weight(self) -> Tensor:
        """[dim]"""
        return self._weights.get(self._weight_name)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., dim].  Same shape out."""
        return functional.rms_norm(x, self._dim, self.weight, self._eps)


class Rope:
    """Rotary position embedding (arXiv 2104.09864) of the first `n_rot` channels of a head.

    factors: [n_rot / 2], frequencies are divided by them (Llama 3's `rope_freqs.weight`).
    scaling: how it is stretched; `magnitude` is what vectors grow by when they are turned, 1 for most models.
    still: layers without RoPE: every angle is 0.
    Angles are computed in float64 whatever the dtype of the activations, since float32 loses 1e-3 of a turn at
    position 10,000; the table of the latest positions is kept, as every layer asks for the same one.
    """

    def __init__(
        self,
        n_rot: int,
        theta: float,
        style: RopeStyle,
        *,
        scaling: RopeScaling | None = None,
        factors: Tensor | None = None,
        still: bool = False,
    ) -> None:
        scaling = scaling or RopeScaling()
        self._frequencies = scaling.frequencies(n_rot, theta, factors) * (not still)
        self.magnitude = 1.0 if still else scaling.stretch
        self.n_rot = n_rot
        self.style = style
        self._positions: Tensor | None = None
        self._table: tuple[Tensor, ...] = ()
        self._angles: Tensor | None = None

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [n_head, n, head_dim].  positions: int64 [n].  Same shape and dtype out."""
        table = self._tables(positions, x.dtype)
        if x.shape[-1] == self.n_rot:
            return self._rotate(x, table)
        turned, rest = x[..., : self.n_rot], x[..., self.n_rot :]
        return torch.cat((self._rotate(turned, table), rest), dim=-1)

    def angles(self, n: int, dtype: torch.dtype) -> Tensor:
        """Cosines, then sines of the angles at positions 0 to n - 1, times `magnitude`: [n, n_rot].

        The longest table so far is kept.
        """
        if self._angles is None or self._angles.dtype != dtype or len(self._angles) < n:
            with torch.inference_mode(False):
                size = 1 << max(n - 1, 255).bit_length()  # so that decoding does not make it anew for every token
                angles = torch.outer(torch.arange(size, dtype=torch.float64), self._frequencies)
                self._angles = (torch.cat((angles.cos(), angles.sin()), -1) * self.magnitude).to(dtype)
        return self._angles[:n]

    def fine_angles(self, n: int) -> Tensor:
        """Cosines, then sines, of the angles at positions 0 to n - 1 without `magnitude`: float32 [n_rot, n]."""
        with torch.inference_mode(False):
            angles = torch.outer(self._frequencies, torch.arange(n, dtype=torch.float64))
            return torch.cat((angles.cos(), angles.sin())).float()

    def _rotate(self, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
        if self.style == "interleaved":  # a pair is one complex number
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * table[0]).flatten(-2)
        cos, sin = table
        return torch.addcmul(x * cos, x.roll(self.n_rot // 2, -1), sin)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        known = self._positions is not None and torch.equal(self._positions, positions)
        if known and self._table[0].dtype.to_real() == dtype:
            return self._table
        with torch.inference_mode(False):
            angles = torch.outer(positions.double(), self._frequencies)
            cos, sin = ((part * self.magnitude).to(dtype) for part in (angles.cos(), angles.sin()))
            if self.style == "interleaved":
                self._table = (torch.complex(cos, sin),)
            else:
                self._table = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
            self._positions = positions.clone()
        return self._table


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, sliding: int = 0, softcap: float = 0.0
) -> Tensor:
    """Plain causal attention in the inputs' dtype, grouped queries.

    q: [n_head, n, d_k].  k: [n_head_kv, n, d_k].  v: [n_head_kv, n, d_v].  sliding: latest tokens that a query sees, 0
    is all.  softcap: see `kvkernels.attend`.  Returns [n_head, n, d_v].
    """
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    n = q.shape[1]
    if not softcap and not 0 < sliding < n:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~causal_mask(n, sliding), -torch.inf)
    return torch.softmax(soft_capped(scores, softcap), -1) @ v


def causal_mask(n: int, sliding: int = 0) -> Tensor:
    """Which tokens each of `n` queries sees: bool [n, n]; sliding: the latest so many, 0 is all."""
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    return seen.triu(1 - sliding) if sliding else seen
