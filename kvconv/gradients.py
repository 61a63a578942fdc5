"""Keys, values and what an error in them costs: gradients of the model's own log-probabilities, layer by layer.

For every position a label is drawn from the model's distribution there. The mean square of the gradient of its
log-probability, times an error, is twice the KL divergence that the error causes, to second order: the Fisher
information (Martens, arXiv 1412.1193). So `0.5 mean (g . d)^2` counts nats per token, whatever layer, head or side.

The gradient is that of what is *packed*: the terms of the attention in which a query reads a key or value in full
precision, because it is a sink or lies in the window, are left out of `g`, as the visibility rule has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkernels.attend import soft_capped
from kvrun.errors import KvError
from kvrun.layers import causal_mask
from kvrun.visibility import packed_end

if TYPE_CHECKING:
    from kvrun.models import Model

#: Logits are computed for so many values at a time (64 MiB in float32).
LOGIT_VALUES = 1 << 24


@dataclass(frozen=True)
class LayerRecord:
    """One layer's attention over some chunks, sinks left out; n = chunk_tokens - sinks.

    k, v, grad_k, grad_v: float32 [n_head_kv, n_chunk, n, head_dim].
    query: float64 [n_head_kv, n_chunk, d_k, d_k], sum over tokens and query heads of the group of `q q^T`.
    """

    il: int
    k: Tensor
    v: Tensor
    grad_k: Tensor
    grad_v: Tensor
    query: Tensor


def records(
    model: Model, tokens: Tensor, positions: Tensor, *, sinks: int, window: int, seeds: list[int]
) -> Iterator[LayerRecord]:
    """Records of all layers, the last one first; each chunk is a sequence of its own in full precision.

    tokens, positions: int64 [n_chunk, chunk_tokens].  seeds: of the labels, one per chunk.
    Memory: the states that enter each block, and one block's graph.
    Raises KvError naming layer and head where a key or value is not a number.
    """
    n_chunk, length = tokens.shape
    flat = positions.flatten()
    packed = _packed_mask(length, sinks, window)
    with torch.no_grad():
        states = [torch.cat([model.embed(row) for row in tokens])]
        for il in range(model.config.n_layer):
            states.append(model.block(il, states[-1], flat, _Attention(model, il, n_chunk, packed).plain))
            model.weights.release()
        last = states.pop()
    gradient = torch.cat(
        [_output_gradient(model, part, seed) for part, seed in zip(last.split(length), seeds, strict=True)]
    )
    model.weights.release()
    for il in range(model.config.n_layer - 1, -1, -1):
        x = states.pop().requires_grad_()
        attention = _Attention(model, il, n_chunk, packed)
        with torch.enable_grad():
            y = model.block(il, x, flat, attention.recorded)
        inner = [*attention.scores, *attention.sums]
        gradient, *inside = torch.autograd.grad(y, [x, *inner], gradient)
        yield attention.record(inside[:n_chunk], inside[n_chunk:], sinks)
        model.weights.release()


class _Attention:
    """Attention of one layer over independent chunks that lie one after the other in one sequence."""

    def __init__(self, model: Model, il: int, n_chunk: int, packed: Tensor) -> None:
        self.il, self.n_chunk, self.packed, self.scale = il, n_chunk, packed, model.attention_scale(il)
        self.model = model
        self.causal = causal_mask(len(packed), model.config.geometry[il].sliding)
        #: Per chunk, with the query heads of a group on an axis of their own: [n_head_kv, group, n, ...].
        self.scores: list[Tensor] = []
        self.sums: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def plain(self, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Only the output; refuses what is not a number."""
        for what, side in (("keys", k), ("values", v)):
            for ih, head in enumerate(side):
                if not bool(torch.isfinite(head).all()):
                    why = f"{what} of layer {il}, KV head {ih} are not numbers (NaN or Inf)"
                    raise KvError(f"{why}: the model is damaged")
        length = len(self.packed)
        chunks = zip(q.split(length, 1), k.split(length, 1), v.split(length, 1), strict=True)
        out = torch.cat([self.model.plain_attention(il, *chunk) for chunk in chunks], 1)
        for ih, head in enumerate(out.unflatten(0, (len(k), -1))):
            if not bool(torch.isfinite(head).all()):
                raise KvError(f"keys of layer {il}, KV head {ih} are so large that attention over them is no number")
        return out

    def recorded(self, il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output, by steps that gradients can be taken at."""
        length, n_kv = len(self.packed), len(k)
        out = []
        for q_, k_, v_ in zip(q.split(length, 1), k.split(length, 1), v.split(length, 1), strict=True):
            grouped = q_.unflatten(0, (n_kv, -1))
            scores = grouped @ k_[:, None].transpose(-1, -2) * self.scale
            masked = scores.masked_fill(~self.causal, -torch.inf)
            weights = torch.softmax(soft_capped(masked, self.model.attention_softcap), -1)
            sums = weights @ v_[:, None]
            self.scores.append(scores)
            self.sums.append(sums)
            self._seen.append((grouped.detach(), k_.detach(), v_.detach(), weights.detach()))
            out.append(sums.flatten(0, 1))
        return torch.cat(out, 1)

    def record(self, of_scores: Sequence[Tensor], of_sums: Sequence[Tensor], sinks: int) -> LayerRecord:
        """From the gradients of scores and sums, per chunk, those of every key and value that is read packed."""
        grad_k, grad_v = [], []
        for (q, _, _, weights), ds, do in zip(self._seen, of_scores, of_sums, strict=True):
            grad_k.append(((ds * self.packed).transpose(-1, -2) @ q).sum(1)[:, sinks:] * self.scale)
            grad_v.append(((weights * self.packed).transpose(-1, -2) @ do).sum(1)[:, sinks:])
        queries = torch.cat([q for q, _, _, _ in self._seen], 2).flatten(1, 2).double()
        return LayerRecord(
            il=self.il,
            k=torch.stack([k[:, sinks:] for _, k, _, _ in self._seen], 1),
            v=torch.stack([v[:, sinks:] for _, _, v, _ in self._seen], 1),
            grad_k=torch.stack(grad_k, 1),
            grad_v=torch.stack(grad_v, 1),
            query=queries.transpose(1, 2) @ queries,
        )


def _packed_mask(length: int, sinks: int, window: int) -> Tensor:
    """Whether the query at row t reads token j packed: bool [length, length]."""
    ends = torch.tensor([packed_end(t + 1, sinks, window, 1) for t in range(length)])
    columns = torch.arange(length)
    return (columns >= sinks) & (columns < ends[:, None])


def _output_gradient(model: Model, x: Tensor, seed: int) -> Tensor:
    """Gradient of the sum of log-probabilities of sampled labels with respect to what leaves the last block.

    x: [n, n_embd], one chunk.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rows in x.split(max(1, LOGIT_VALUES // model.config.n_vocab)):
        rows = rows.detach().requires_grad_()
        with torch.enable_grad():
            logits = torch.log_softmax(model.output(rows), -1)
            labels = torch.multinomial(logits.detach().exp(), 1, generator=generator)
            (gradient,) = torch.autograd.grad(logits.gather(1, labels).sum(), rows)
        parts.append(gradient)
    return torch.cat(parts)
