"""One launch of a Triton kernel as a value: it can be run, or compiled for a device that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and arguments.

    arguments: by name, tensors and numbers.  constants: what the kernel is compiled for.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Start the kernel on the current stream."""
        self.kernel[self.grid](
            **self.arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            **self.options,
        )

    def signature(self) -> dict[str, str]:
        """Triton's names for the types of the arguments, as `triton.compiler.ASTSource` takes them."""
        types = {name: _type_name(value) for name, value in self.arguments.items()}
        return types | dict.fromkeys(self.constants, "constexpr")

    def aligned(self) -> list[str]:
        """Arguments that are multiples of 16 (addresses always are): kernels are compiled to rely on it."""
        return [
            name
            for name, value in self.arguments.items()
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        ]


_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"
