"""The feed-forward parts of model graphs. Attributes are named as the tensors are: `ffn_gate.weight`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from .layers import Linear, check_shape
from .weights import Weights

#: What goes between the two products, such as `torch.nn.functional.silu`.
Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv 1606.08415), as Gemma has it."""
    return functional.gelu(x, approximate="tanh")


class GatedFFN:
    """`down(act(gate(x)) * up(x))`, SwiGLU or GeGLU (arXiv 2002.05202)."""

    def __init__(self, weights: Weights, il: int, n_embd: int, n_ff: int, act: Activation = functional.silu) -> None:
        self.ffn_gate = Linear(weights, f"blk.{il}.ffn_gate", n_ff, n_embd)
        self.ffn_up = Linear(weights, f"blk.{il}.ffn_up", n_ff, n_embd)
        self.ffn_down = Linear(weights, f"blk.{il}.ffn_down", n_embd, n_ff)
        self.tensors = [*self.ffn_gate.tensors, *self.ffn_up.tensors, *self.ffn_down.tensors]
        self._act = act

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, n_embd].  Same shape out."""
        return self.ffn_down(self._act(self.ffn_gate(x)) * self.ffn_up(x))


class FusedFFN:
    """`GatedFFN` whose gate and up matrices lie in one tensor, `ffn_up`, gate first (Phi-3)."""

    def __init__(self, weights: Weights, il: int, n_embd: int, n_ff: int) -> None:
        self.ffn_up = Linear(weights, f"blk.{il}.ffn_up", 2 * n_ff, n_embd)
        self.ffn_down = Linear(weights, f"blk.{il}.ffn_down", n_embd, n_ff)
        self.tensors = [*self.ffn_up.tensors, *self.ffn_down.tensors]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, n_embd].  Same shape out."""
        gate, up = self.ffn_up(x).chunk(2, -1)
        return self.ffn_down(functional.silu(gate) * up)


class ExpertFFN:
    """A mixture of experts: each token goes through the `n_used` that its router prefers (arXiv 2401.04088).

    Router weights are the softmax over all experts, limited to those that are used and scaled to sum to 1.  Tensors:
    `ffn_gate_inp` [n_expert, n_embd], `ffn_gate_exps` and `ffn_up_exps` [n_expert, n_ff, n_embd], `ffn_down_exps`
    [n_expert, n_embd, n_ff].
    """

    def __init__(self, weights: Weights, il: int, n_embd: int, n_ff: int, n_expert: int, n_used: int) -> None:
        self._weights, self._n_used, self._n_expert = weights, n_used, n_expert
        self.ffn_gate_inp = Linear(weights, f"blk.{il}.ffn_gate_inp", n_expert, n_embd)
        names = self._gate, self._up, self._down = [
            f"blk.{il}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")
        ]
        for name, shape in zip(names, ((n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff)), strict=True):
            check_shape(weights, name, (n_expert, *shape))
        self.tensors = [*self.ffn_gate_inp.tensors, *names]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, n_embd].  Same shape out."""
        shares, chosen = torch.softmax(self.ffn_gate_inp(x), -1).topk(self._n_used, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            part = x[rows]
            gate, up = (self._weights.linear_part(name, expert, part) for name in (self._gate, self._up))
            y = self._weights.linear_part(self._down, expert, functional.silu(gate) * up)
            out = out.index_add(0, rows, y * shares[rows, place, None])
        return out
