"""Change headers of real GGUF files at random and see that each reads in full or is refused with one line.

    python tools/fuzz_gguf.py --minutes 10 [--seed 0] [--keep FOLDER]

Anything but a parsed file or a `KvError` is a finding: another exception, a message of several lines, more than
200 MiB or more than 2 seconds. A finding is printed with its seed, from which `mutated` makes the same file again;
exit status 1 if there was one.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

if __name__ == "__main__":  # run as a script, the folder of `tools` is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvrun.errors import KvError
from kvrun.gguf_file import GGUFFile
from tools.make_tiny_model import make_tiny_model

MAX_BYTES = 200 << 20
MAX_S = 2.0
#: Numbers at which readers go wrong: ends of ranges, sizes that wrap, type numbers just past the known ones.
NUMBERS = (0, 1, 3, 4, 5, 8, 9, 13, 31, 33, 64, 2**16, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**62 + 1, 2**63, 2**64 - 1)


def real_header(folder: Path, arch: str = "qwen2") -> tuple[bytes, int]:
    """A tiny model's bytes, and how many of them are its header."""
    path = make_tiny_model(arch, folder / f"{arch}.gguf", n_embd=32, head_dim=32, n_ff=32, n_layer=1)
    return path.read_bytes(), GGUFFile(path).data_start


def mutated(content: bytes, header_end: int, seed: int) -> bytes:
    """The file with one to four changes within its header, and sometimes an end too early; the same for a seed."""
    rng, changed = random.Random(seed), bytearray(content)
    # Most of a header is vocabulary, where a change says little: half of the changes go to its first and last part.
    places = (
        lambda: rng.randrange(header_end),
        lambda: rng.randrange(400),
        lambda: header_end - rng.randrange(1, 1200),
    )
    for _ in range(rng.randint(1, 4)):
        at, kind = max(0, rng.choice(places)()), rng.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 2:
            changed[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 3:
            del changed[at : at + rng.randint(1, 16)]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            start = rng.randrange(header_end)
            changed[at:at] = changed[start : start + rng.randint(1, 200)]
    if rng.randrange(8) == 0:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed)


def outcome(path: Path) -> str:
    """`read` or `refused`; whatever else the reader does is raised. AssertionError for a message of several lines."""
    try:
        file = GGUFFile(path)
        for key in file:
            file.get(key)
            file.raw_kv(key)
        for name in file.tensors:
            file.dequantize(name)
        file.fingerprint()
    except KvError as error:
        assert str(error).isprintable(), f"not one printable line: {error!r}"
        return "refused"
    return "read"


def main() -> int:
    """Run for a while; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--keep", type=Path, help="folder for the files that were findings")
    args = parser.parse_args()
    counts, findings, seed = {"read": 0, "refused": 0}, 0, args.seed
    with tempfile.TemporaryDirectory() as folder:
        bases = [real_header(Path(folder), arch) for arch in ("qwen2", "llama")]
        path, end = Path(folder) / "mutated.gguf", time.monotonic() + 60 * args.minutes
        tracemalloc.start()
        while time.monotonic() < end:
            content = mutated(*bases[seed % len(bases)], seed)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            start = time.monotonic()
            try:
                counts[outcome(path)] += 1
                took_s, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1]
                assert took_s < MAX_S and peak < MAX_BYTES, f"{took_s:.1f} s, {peak >> 20} MiB"
            except Exception as error:
                findings += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                if args.keep is not None:
                    (args.keep / f"seed-{seed}.gguf").write_bytes(content)
            seed += 1
    print(f"{seed - args.seed} files: {counts['read']} read, {counts['refused']} refused, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
