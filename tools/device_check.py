"""Time the GPU kernels on the device at hand; `tools/device_check.sh` runs their tests first.

    python tools/device_check.py ROWS.jsonl

One line per kernel, shape, storage and context: median time in microseconds, bytes that must move, the share of this
device's own copy bandwidth that they moved at, and how many times faster than our f16 kernel and torch's attention it
was. Rows are added to the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script, none of the packages is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from kvkernels.attend.triton import DeviceLayer, decode_launches
from kvkernels.device_store import DeviceSide
from kvkernels.spec import QuantSpec, default_group
from tools import roofline

STORAGES = (16, 4, 3, 2)
CONTEXTS = (4096, 32768, 131072)


def random_layer(shape: str, bits: int, tokens: int, device: str) -> tuple[DeviceLayer, torch.Tensor]:
    """A layer whose `tokens` tokens are all packed and hold random codes, and one query per head."""
    n_head, n_kv, d = roofline.SHAPES[shape]
    spec = QuantSpec(bits, 0 if bits == 16 else default_group(d))
    sides = []
    for _ in range(2):
        side = DeviceSide([spec] * n_kv, [1.0] * n_kv, tokens, d, device=device)
        side.codes.random_(-(2**15), 2**15)
        side.params.uniform_(-0.1, 0.1)
        if spec.quantized:
            half = side.params.shape[1] // n_kv // 2
            side.params.view(n_kv, 2, half)[:, 0].abs_()
        sides.append(side)
    layer = DeviceLayer(*sides, window=0, scale=d**-0.5)
    return layer, torch.randn(1, n_head, d, device=device, dtype=torch.float16)


def splits(n_kv: int, tokens: int, processors: int) -> int:
    """Parts that fill the device twice over, each of two tiles or more."""
    return max(1, min(2 * processors // n_kv, tokens // 128))


def bandwidth(time_us: Callable[[Callable[[], Any]], float]) -> float:
    """Bytes per second that a copy of 1 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_us(lambda: target.copy_(source)) * 1e6


def rows(processors: int) -> Iterator[dict[str, Any]]:
    """Measure everything."""

    def time_us(run: Callable[[], Any]) -> float:
        return float(triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")) * 1e3

    copy = bandwidth(time_us)
    yield {"kernel": "copy", "bytes_per_s": copy}
    for shape, (n_head, n_kv, d) in roofline.SHAPES.items():
        for tokens in CONTEXTS:
            q = torch.randn(1, n_head, 1, d, device="cuda", dtype=torch.float16)
            k, v = (torch.randn(1, n_kv, tokens, d, device="cuda", dtype=torch.float16) for _ in range(2))
            sdpa = time_us(
                lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            )
            f16 = float("nan")
            for bits in STORAGES:
                layer, query = random_layer(shape, bits, tokens, "cuda")
                lengths = torch.tensor([tokens], dtype=torch.int32, device="cuda")
                parts = splits(n_kv, tokens, processors)
                launches = decode_launches(layer, query, lengths, torch.empty_like(query), n_splits=parts)
                took = time_us(lambda launches=launches: [launch.run() for launch in launches])
                f16 = took if bits == 16 else f16
                n_bytes = roofline.decode(shape, bits, tokens).bytes
                yield {
                    "kernel": "decode",
                    "shape": shape,
                    "bits": bits,
                    "tokens": tokens,
                    "parts": parts,
                    "us": took,
                    "bytes": n_bytes,
                    "share_of_copy": n_bytes / took * 1e6 / copy,
                    "times_f16": f16 / took,
                    "times_sdpa": sdpa / took,
                }


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the GPU kernels on the device at hand.")
    parser.add_argument("rows", type=Path, help="JSONL that rows are added to")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was measured")
        return 0
    properties = torch.cuda.get_device_properties(0)
    where = {"device": properties.name, "torch": torch.__version__, "triton": triton.__version__}
    with args.rows.open("a", encoding="utf-8") as file:
        for row in rows(properties.multi_processor_count):
            print(json.dumps(row), flush=True)
            file.write(json.dumps(where | row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
