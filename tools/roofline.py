"""Bytes and operations of the GPU kernels, and the time that no implementation can go below.

    python tools/roofline.py [--shape qwen3-4b] [--kernel decode] [-o md|csv]

A floor is the larger of bytes over bandwidth and operations over the matrix units' rate, in microseconds, for one
layer and one new token (append, decode) or for one matrix (linear). It is arithmetic from data sheets: nothing here was
measured, and a launch alone takes a few microseconds.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if __name__ == "__main__":  # run as a script, none of the packages is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from kvkernels.spec import QuantSpec, default_group

#: Bandwidth (bytes per second) and dense f16 operations per second with f32 sums, from the makers' data sheets.
DEVICES = {
    "H200": (4.8e12, 989e12),
    "A100": (2.039e12, 312e12),
    "RTX 4090": (1.008e12, 165e12),
    "RTX 3060": (0.360e12, 51e12),
}
#: Query heads, KV heads, channels of a head.
SHAPES = {
    "qwen3-4b": (32, 8, 128),
    "llama-3-8b": (32, 8, 128),
    "gemma-3-4b": (8, 4, 256),
    "smollm2-135m": (9, 3, 64),
}
TOKENS = tuple(1024 << i for i in range(9))
#: Bits per weight of llama.cpp's types.
WEIGHTS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5}
#: Rows of a product of the matrix units: query heads of a group are filled up to it.
ROWS = 16


@dataclass(frozen=True)
class Row:
    """One kernel at one size. floor_us: by device, in the order of `DEVICES`."""

    kernel: str
    shape: str
    setting: str
    tokens: int
    bytes: int
    operations: int
    floor_us: tuple[float, ...]


def floors(n_bytes: float, operations: float) -> tuple[float, ...]:
    """Microseconds on every device."""
    return tuple(max(n_bytes / bandwidth, operations / rate) * 1e6 for bandwidth, rate in DEVICES.values())


def decode(shape: str, bits: int, tokens: int) -> Row:
    """One layer's attention of one token: codes, scales and minima once, queries and outputs in f16."""
    n_head, n_kv, d = SHAPES[shape]
    spec = QuantSpec(bits, 0 if bits == 16 else default_group(d))
    n_bytes = 2 * n_kv * tokens * d * spec.bits_per_value(d) / 8 + 2 * n_head * d * 2
    # Both planes of a width take a product of their own.
    planes = 2 if bits in (3, 5, 6, 8) else 1
    operations = 2 * n_kv * tokens * d * 2 * ROWS * planes
    return Row("decode", shape, f"{bits} bits", tokens, round(n_bytes), operations, floors(n_bytes, operations))


def append(shape: str, bits: int) -> Row:
    """One token into one layer: both transforms in float32, the window's token read and written, its codes written."""
    _, n_kv, d = SHAPES[shape]
    stored = QuantSpec(bits, default_group(d)).bits_per_value(d) / 8
    n_bytes = 2 * n_kv * (d * d * 4 + d * (2 + 2 + 2 + stored))
    operations = 2 * n_kv * 2 * ROWS * d * d * 3  # three products of tf32 make one of float32
    return Row("append", shape, f"{bits} bits", 1, round(n_bytes), operations, floors(n_bytes, operations))


def linear(kind: str, n_in: int, n_out: int) -> Row:
    """One token through one matrix whose weights stay in llama.cpp's blocks."""
    n_bytes = n_in * n_out * WEIGHTS[kind] / 8 + 2 * (n_in + n_out)
    operations = 2 * ROWS * n_in * n_out
    return Row("linear", f"{n_in} to {n_out}", kind, 1, round(n_bytes), operations, floors(n_bytes, operations))


def rows() -> Iterator[Row]:
    """Everything."""
    for shape in SHAPES:
        for bits in (16, 4, 3, 2):
            for tokens in TOKENS:
                yield decode(shape, bits, tokens)
        yield append(shape, 4)
    for kind in WEIGHTS:
        yield linear(kind, 4096, 14336)


def main() -> None:
    parser = argparse.ArgumentParser(description="Floors of the GPU kernels, from data sheets.")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--kernel", choices=("decode", "append", "linear"))
    parser.add_argument("-o", dest="output", choices=("md", "csv"), default="md")
    args = parser.parse_args()
    names = [f.name for f in fields(Row)][:-1] + [f"{device} us" for device in DEVICES]
    table = []
    for row in rows():
        if args.kernel in (None, row.kernel) and (args.shape is None or row.shape == args.shape):
            values = asdict(row)
            floor = values.pop("floor_us")
            table.append([*map(str, values.values()), *(f"{us:.2f}" for us in floor)])
    if args.output == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *table])
        return
    for line in [names, ["---"] * len(names), *table]:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
