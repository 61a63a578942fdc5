"""The weights of a model in torch, dequantized when asked for and kept while they fit a budget."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .errors import KvError
from .gguf_file import GGUFFile
from .memory import available_bytes

# A matrix that is not kept is expanded and multiplied in pieces of about this size.
_PIECE_BYTES = 64 << 20


class Weights:
    """Tensors of `file` in `dtype`.

    budget_bytes: how much dequantized weight is kept, first come first kept; the rest is expanded anew each time. None
    takes half of the memory that is available when the model is opened, 0 keeps nothing.
    block_rows: rows that are multiplied at a time, 0 for all at once. A library's product of one row and of many differ
        in the last bit; in blocks of one size, a row's result does not depend on how many rows came with it.
    kept_bytes: what is kept at present.
    """

    def __init__(
        self,
        file: GGUFFile,
        *,
        dtype: torch.dtype = torch.float32,
        budget_bytes: int | None = None,
        block_rows: int = 0,
    ) -> None:
        self.file = file
        self.dtype = dtype
        self.block_rows = block_rows
        self.budget_bytes = available_bytes() // 2 if budget_bytes is None else budget_bytes
        self.kept_bytes = 0
        self._kept: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def get(self, name: str) -> Tensor:
        """The whole tensor, in the shape of the file: [rows, cols] or [cols].

        KvError where it is missing, cannot be dequantized, or holds a value that is not finite.
        """
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        weight = self._expand(name, None)
        n_bytes = weight.numel() * weight.element_size()
        if self._fits(n_bytes):
            self._kept[name] = weight
            self.kept_bytes += n_bytes
        return weight

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Rows `index` (int64 [n]) of a matrix, [n, cols]; no others are read."""
        kept = self._kept.get(name)
        return self._expand(name, index.numpy()) if kept is None else kept[index]

    def linear(self, name: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ W.T + bias` for the matrix `name` [n_out, n_in].

        x: [n, n_in].  Returns [n, n_out]. A large matrix that does not fit the budget never exists whole.
        """
        weight = self._kept.get(name)
        if weight is None:
            n_out, n_in = self.file.tensors[name].shape
            n_rows = max(1, _PIECE_BYTES // (n_in * self.dtype.itemsize))
            if n_rows < n_out and not self._fits(n_out * n_in * self.dtype.itemsize):
                pieces = (slice(first, min(first + n_rows, n_out)) for first in range(0, n_out, n_rows))
                out = torch.cat([self._product(x, self._expand(name, piece)) for piece in pieces], dim=-1)
                return out if bias is None else out + bias
            weight = self.get(name)
        return self._product(x, weight, bias)

    def linear_part(self, name: str, index: int, x: Tensor) -> Tensor:
        """`x @ W[index].T` for a stack of matrices [n, n_out, n_in], of which no other is read unless all are kept.

        x: [n, n_in].  Returns [n, n_out].
        """
        kept = self._kept.get(name)
        if kept is None and self._fits(self.dtype.itemsize * int(np.prod(self.file.tensors[name].shape))):
            kept = self.get(name)
        part = self._expand(name, slice(index, index + 1))[0] if kept is None else kept[index]
        return self._product(x, part)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.block_rows:
            return torch.nn.functional.linear(x, weight, bias)
        n = x.shape[0]
        x = torch.nn.functional.pad(x, (0, 0, 0, -n % self.block_rows))
        blocks = [torch.nn.functional.linear(block, weight, bias) for block in x.split(self.block_rows)]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:n]

    def release(self) -> None:
        """Forget every dequantized tensor."""
        self._kept.clear()
        self.kept_bytes = 0

    def _fits(self, n_bytes: int) -> bool:
        return self.kept_bytes + n_bytes <= self.budget_bytes

    def _expand(self, name: str, rows: slice | np.ndarray | None) -> Tensor:
        values = self.file.dequantize(name, rows)
        # Tensors made in inference mode could not take part in a gradient later on.
        with torch.inference_mode(False):
            weight = torch.from_numpy(values)
            # One pass finds that all is well; only a sum that is not finite is worth a closer look.
            if not torch.isfinite(weight.sum()) and not torch.isfinite(weight).all():
                why = f"tensor {name} holds values that are infinite or not numbers"
                raise KvError(f"{self.file.path}: {why}; the model is damaged, download it again")
            return weight.to(self.dtype)
