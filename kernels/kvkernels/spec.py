"""How one side (keys or values) of one KV head is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["token", "channel"]
Code = Literal["uniform", "cubic", "q4_0", "q8_0"]

#: Widths that can be stored. 16 is plain f16; 1 exists only as the control that every comparison must fail.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)

#: Which bit planes a width is made of: every width is read by the same code, plane by plane.
PLANES: dict[int, tuple[int, ...]] = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    8: (4, 4),
}

#: llama.cpp's blocks that can be stored, to measure them by our own means: code width and values of a block.
GGML_BLOCKS: dict[Code, tuple[int, int]] = {"q4_0": (4, 32), "q8_0": (8, 32)}


#: Widths of the cubic code: wider ones gain little and would take hundreds of comparisons a value.
CUBIC_WIDTHS = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class QuantSpec:
    """Storage of one side of one KV head.

    bits: code width, one of `WIDTHS`; 16 stores f16 and has no groups.
    group: values that share one f16 scale and one f16 minimum. With axis "token" a group is `group` neighbouring
        channels of one token and must divide the head size; with axis "channel" it is `group` consecutive tokens of one
        channel (KIVI, arXiv 2402.02750), and tokens are packed `group` at a time.
    axis: "token" or "channel".
    code: "uniform" has a scale and a minimum per group; "cubic" has a scale alone and levels that lie closer together
        around 0 (`kvkernels.quantize.cubic`), on the token axis; "q4_0" and "q8_0" are llama.cpp's blocks of 32
        channels, which have a scale alone.
    """

    bits: int
    group: int = 0
    axis: Axis = "token"
    code: Code = "uniform"

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"bits must be one of {WIDTHS}, not {self.bits}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"axis must be 'token' or 'channel', not {self.axis!r}")
        if self.code == "cubic":
            if self.bits not in CUBIC_WIDTHS or self.axis != "token" or self.group <= 0:
                raise ValueError(f"the cubic code has {CUBIC_WIDTHS} bits along the channels, not {self.bits}")
        elif self.code != "uniform":
            if (self.bits, self.group) != GGML_BLOCKS.get(self.code) or self.axis != "token":
                raise ValueError(
                    f"{self.code!r} is no block of {self.group} values of {self.bits} bits along the channels"
                )
        elif self.bits == 16:
            if self.group != 0 or self.axis != "token":
                raise ValueError("16-bit storage has no groups")
        elif self.group <= 0 or (self.axis == "channel" and self.group % 8):
            raise ValueError(f"group must be positive (and a multiple of 8 on the channel axis), not {self.group}")

    @property
    def quantized(self) -> bool:
        """Whether codes are stored (anything but f16)."""
        return self.bits != 16

    @property
    def has_minimum(self) -> bool:
        """Whether groups store a minimum beside the scale."""
        return self.quantized and self.code == "uniform"

    @property
    def emulates(self) -> bool:
        """Whether this is a block of llama.cpp's, to measure its format by our own means."""
        return self.code in GGML_BLOCKS

    @property
    def block(self) -> int:
        """Tokens that are packed at a time: the `B` of the visibility rule."""
        return self.group if self.axis == "channel" else 1

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where a head of `head_dim` channels cannot be stored this way."""
        if self.quantized and head_dim % 8:
            raise ValueError(f"head size {head_dim} is not a multiple of 8")
        if self.quantized and self.axis == "token" and head_dim % self.group:
            raise ValueError(f"group {self.group} does not divide the head size {head_dim}")

    def bits_per_value(self, head_dim: int) -> float:
        """Code bits plus scale and minimum (where there is one), per value; windows and sinks are not in it."""
        if not self.quantized:
            return 16.0
        return self.bits + (32.0 if self.has_minimum else 16.0) / self.group


def default_group(head_dim: int, wanted: int = 64) -> int:
    """The largest of `wanted` and its halves down to 32 that divides the head size, else the whole head."""
    group = wanted
    while group >= 32:
        if head_dim % group == 0:
            return group
        group //= 2
    return head_dim
