"""Rewrite a GGUF model with every weight dequantized to F32, so that two engines can be held to one another.

    python tools/expand_to_f32.py IN.gguf OUT.gguf

llama.cpp rounds activations to 8 bits when it multiplies with quantized weights; with F32 weights nothing but the order
of additions is left to differ. The file grows to four bytes per weight. Run from the repository's root, or installed.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import encode_kv

_F32 = 0
_ALIGNMENT = 32
_REPLACED = ("general.alignment", "general.file_type", "general.quantization_version")


def expand_to_f32(source: GGUFFile, out: Path) -> None:
    """Write `source` with F32 weights to `out`, a tensor at a time."""
    pairs = [source.raw_kv(key) for key in source if key not in _REPLACED] + [encode_kv("general.file_type", 0)]
    infos, offset = [], 0
    for name, info in source.tensors.items():
        raw_name = name.encode()
        n_values = 1
        for dim in info.shape:
            n_values *= dim
        dims = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape[::-1])
        infos.append(struct.pack("<Q", len(raw_name)) + raw_name + dims + struct.pack("<IQ", _F32, offset))
        offset += 4 * n_values + -4 * n_values % _ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    with out.open("wb") as stream:
        stream.write(header + bytes(-len(header) % _ALIGNMENT))
        for name in source.tensors:
            data = source.dequantize(name).tobytes()
            stream.write(data + bytes(-len(data) % _ALIGNMENT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    expand_to_f32(GGUFFile(arguments.source), arguments.out)


if __name__ == "__main__":
    main()
