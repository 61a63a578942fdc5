"""What the steps of `cpu_ops` are called with: arrays of int64 with named fields, read from compiled code."""

from __future__ import annotations

from ..jit import F32, I32, I64, PTR, Emitter, Val
from ..quantize.cpu import SideName

OP_ARGS = (PTR, I32, I32, PTR)

#: Fields of `call`. Pointers are addresses; strides are in bytes.
#: q_*: float32 queries and their strides.  out_*: float32 results.  k_*, v_*: float32 new keys and values.
#: heads_k, heads_v: `HEAD` rows.  parts: partial results.  work: scratch memory, `work_bytes` per thread.
#: raw: queries after RoPE and before any transform, which a rotating offset meets (`cpu_offset`), with its tables
#: angles and fine, and the core for heads that have one.
CALL = (
    "step", "heads_k", "heads_v", "block_k", "block_v", "sinks", "window", "n_kv", "group", "chunk",
    "q", "q_head", "q_token", "out", "out_head", "out_token",
    "k", "k_head", "k_token", "v", "v_head", "v_token",
    "raw", "raw_head", "raw_token", "angles", "fine", "core_turned",
    "core", "load_k", "load_v", "work", "work_bytes", "parts", "counter", "scale",
)  # fmt: skip
#: Fields of a head of one side. recent_0, recent_1: float16 tokens that are not packed yet, before and after the step,
#: in turns.  tail: float16 tokens of this chunk and those before it that are not packed yet.  mean: of a rotating
#: offset, `RotatingOffset.means`, or 0.
HEAD = ("codes", "scale", "minimum", "unpack", "pack", "clip", "sinks", "recent_0", "recent_1", "tail", "mean")
#: Fields of a step: tokens present before it, new tokens, which of `recent_0` and `recent_1` holds what is before the
#: step, whether a value was not finite (set by `append`).
STEP = ("n_before", "n", "turn", "bad")


class Fields:
    """Reads fields of an array of int64 in the function being written."""

    def __init__(self, e: Emitter, base: Val, names: tuple[str, ...]) -> None:
        self.e, self.base, self.names = e, base, names

    def at(self, name: str) -> Val:
        """Where the field lies."""
        return self.base + 8 * self.names.index(name)

    def int(self, name: str) -> Val:
        """The field as an int64."""
        return self.e.load(I64, self.at(name))

    def ptr(self, name: str) -> Val:
        """The field as a pointer."""
        return self.e.load(PTR, self.at(name))

    def float(self, name: str) -> Val:
        """The field's first four bytes as a float32."""
        return self.e.load(F32, self.at(name))


def packed_end(e: Emitter, n: Val, call: Fields, side: SideName) -> Val:
    """`kvrun.visibility.packed_end`: the position after the packed tokens with `n` tokens present."""
    block = call.int(f"block_{side}")
    sinks = call.int("sinks")
    return sinks + block * (e.smax(n - sinks - call.int("window"), 0) // block)
