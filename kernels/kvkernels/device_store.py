"""What the GPU kernels read: one side (keys or values) of one layer, for a batch of sequences, whatever widths it has.

Everything lies in three tensors, so that one launch reaches every head: packed codes, scales with minima (and the f16
rows of heads that are not quantized), and the tokens in full precision. A table says where each head begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pack.device import check_device_spec, store_codes
from .quantize import quantize
from .spec import QuantSpec

#: Tokens that a tile of a kernel takes at most; capacities are rounded up to it, so that tiles need no mask for codes.
TILE = 128


class DeviceSide:
    """Storage of one side of one layer.

    specs, clips: one per KV head.  capacity: packed tokens.  d: channels.  slots: tokens in full precision beyond the
    sinks, at least one, a ring: the token at position `j >= sinks` lies in slot `sinks + (j - sinks) % slots`.

    codes: int16 [batch, units], see `pack.device`.  params: float16 [batch, halves]: for each head scales and then
    minima, `[d / group, capacity]` (axis "token") or `[capacity / group, d]` (axis "channel"), or rows `[capacity, d]`
    of a head that is not quantized.  full: float16 [batch, n_head, sinks + slots, d].
    table: int64 [n_head, 2]: where a head begins in `codes` and in `params`.
    """

    def __init__(
        self,
        specs: Sequence[QuantSpec],
        clips: Sequence[float],
        capacity: int,
        d: int,
        *,
        sinks: int = 0,
        slots: int = 0,
        batch: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        for spec in specs:
            check_device_spec(spec, d)
        self.specs, self.clips = tuple(specs), tuple(clips)
        self.block = max(spec.block for spec in specs)
        self.d, self.sinks, self.slots = d, sinks, max(slots, 1)
        self.capacity = -(-capacity // TILE) * TILE
        units = halves = 0
        starts = []
        for spec in specs:
            starts.append((units, halves))
            if spec.quantized:
                units += self.capacity * d * spec.bits // 16
            halves += self._halves(spec)
        self.table = torch.tensor(starts, dtype=torch.int64, device=device)
        self._starts = starts
        self.codes = torch.empty(batch, max(units, 8), dtype=torch.int16, device=device)
        self.params = torch.empty(batch, max(halves, 8), dtype=torch.float16, device=device)
        self.full = torch.empty(batch, len(specs), sinks + self.slots, d, dtype=torch.float16, device=device)

    def _halves(self, spec: QuantSpec) -> int:
        if not spec.quantized:
            return self.capacity * self.d
        return 2 * self.capacity * self.d // spec.group

    @property
    def n_head(self) -> int:
        """KV heads."""
        return len(self.specs)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.codes.shape[0]

    @property
    def n_bytes(self) -> int:
        """Bytes allocated: codes, scales, minima, sinks and window."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.params, self.full))

    def write(self, sequence: int, first: int, x: Tensor) -> None:
        """Quantize and pack x, float16 [n_head, n, d], as packed tokens `first ..`; both are multiples of the block.

        Torch and slow: the definition of what the append kernel writes.
        """
        for head, spec in enumerate(self.specs):
            rows = x[head : head + 1]
            at_codes, at_params = self._starts[head]
            params = self.params[sequence, at_params : at_params + self._halves(spec)]
            if not spec.quantized:
                params.view(self.capacity, self.d)[first : first + x.shape[1]] = rows[0]
                continue
            clip = torch.tensor([self.clips[head]], dtype=torch.float32, device=x.device)
            codes, scale, minimum = quantize(rows, spec, clip)
            n_units = self.capacity * self.d * spec.bits // 16
            memory = self.codes[sequence, at_codes : at_codes + n_units].view(torch.uint8)
            store_codes(codes[0], memory, first, spec)
            for part, values in zip(params.view(2, -1), (scale[0], minimum[0]), strict=True):
                if spec.axis == "token":
                    part.view(-1, self.capacity)[:, first : first + x.shape[1]] = values.T
                else:
                    row = first // spec.group
                    part.view(-1, self.d)[row : row + len(values)] = values

    def write_full(self, sequence: int, first: int, x: Tensor) -> None:
        """Keep x, float16 [n_head, n, d], as the tokens at positions `first ..` in full precision."""
        positions = torch.arange(first, first + x.shape[1], device=x.device)
        ring = self.sinks + (positions - self.sinks) % self.slots
        self.full[sequence, :, torch.where(positions < self.sinks, positions, ring)] = x
