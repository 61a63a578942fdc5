"""Compile every GPU kernel for devices that are not there, and say what the machine code uses.

    python tools/kernel_table.py [--targets sm_86 gfx942] [--only decode] [--write | --check]

--write puts the rows into docs/kernel-table.csv, in place of the same ones; --check compares with it and exits with 1
where something got worse. Without either the table is printed. Needs Triton alone, no GPU.

registers: per thread.  spill_bytes: stack frame per thread.  shared_bytes: per block.  warps: that fit one
multiprocessor at a time (waves per SIMD on AMD).  wide_loads: loads of 16 bytes.  matrix_ops: instructions of the
matrix units.  instructions: all of them. The last three count machine code, not what runs.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if __name__ == "__main__":  # run as a script, none of the packages is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvkernels.launch import Launch
from tools.kernel_cases import cases

TABLE = Path(__file__).resolve().parent.parent / "docs" / "kernel-table.csv"
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = {"gfx942": 64, "gfx1100": 32}
#: Where decode attention is known to spill. The kernels run there, slowly; nobody has tuned them for it.
MAY_SPILL = ("gfx1100",)


@dataclass(frozen=True)
class Part:
    """Limits of a device. shared: bytes per block.  shared_all: bytes per multiprocessor.  warps, blocks: at a time."""

    shared: int
    shared_all: int
    warps: int
    blocks: int


PARTS = {
    "sm_80": Part(163 << 10, 164 << 10, 64, 32),
    "sm_86": Part(99 << 10, 100 << 10, 48, 16),
    "sm_89": Part(99 << 10, 100 << 10, 48, 24),
    "sm_90": Part(227 << 10, 228 << 10, 64, 32),
    "sm_100": Part(227 << 10, 228 << 10, 64, 32),
    "sm_120": Part(99 << 10, 100 << 10, 48, 24),
    "gfx942": Part(64 << 10, 64 << 10, 8, 16),
    "gfx1100": Part(64 << 10, 64 << 10, 16, 16),
}


@dataclass(frozen=True)
class Row:
    """One kernel on one device."""

    kernel: str
    case: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    wide_loads: int
    matrix_ops: int
    instructions: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What a row is found by."""
        return self.kernel, self.case, self.target


def compile_launch(launch: Launch, target: str) -> triton.compiler.CompiledKernel:
    """The kernel of a launch as binary for `target`."""
    if target in AMD:
        where = GPUTarget("hip", target, AMD[target])
    else:
        where = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    names = launch.kernel.arg_names
    signature = launch.signature()
    constants = dict(launch.constants)
    if "PRECISION" in constants:
        constants["PRECISION"] = "ieee" if target in AMD else "tf32x3"
    source = ASTSource(
        launch.kernel,
        signature={name: signature[name] for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned()},
    )
    num_warps = 4 if target in AMD else launch.num_warps
    options = {"num_warps": num_warps, "num_stages": launch.num_stages, **launch.options}
    return triton.compile(source, target=where, options=options)


def occupancy(part: Part, registers: int, shared: int, num_warps: int) -> int:
    """Warps at a time on one multiprocessor of NVIDIA's."""
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // per_warp // num_warps
    by_shared = part.shared_all // (shared + 1024)
    return min(by_registers, by_shared, part.blocks, part.warps // num_warps) * num_warps


def _cuobjdump(option: str, binary: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def _nvidia(kernel: triton.compiler.CompiledKernel, target: str, num_warps: int) -> dict[str, int]:
    binary = kernel.asm["cubin"]
    usage = {
        name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump("--dump-resource-usage", binary))
    }
    code = _cuobjdump("-sass", binary)
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_.]+)", code, re.MULTILINE)
    shared = kernel.metadata.shared
    return {
        "registers": usage["REG"],
        "spill_bytes": usage["STACK"] + usage["LOCAL"] + sum(n.startswith(("STL", "LDL")) for n in names),
        "shared_bytes": shared,
        "warps": occupancy(PARTS[target], usage["REG"], shared, num_warps),
        "wide_loads": sum(bool(re.match(r"LDG(STS)?\..*\b(128|256)", n)) for n in names),
        "matrix_ops": sum(bool(re.match(r"(H|HG|UTCH|WG)MMA", n)) for n in names),
        "instructions": len(names),
    }


def _amd(kernel: triton.compiler.CompiledKernel, target: str) -> dict[str, int]:
    text = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.findall(rf"\.{name}:\s+(\d+)", text)
        return max(map(int, found), default=0)

    registers = field("vgpr_count") + field("agpr_count") * (target != "gfx942")
    per_simd, grain = (512, 8) if target == "gfx942" else (1536, 24)
    waves = per_simd // max(-(-registers // grain) * grain, grain)
    names = re.findall(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", text, re.MULTILINE)
    return {
        "registers": registers,
        "spill_bytes": field("private_segment_fixed_size"),
        "shared_bytes": kernel.metadata.shared,
        "warps": min(waves, PARTS[target].warps),
        "wide_loads": sum(bool(re.match(r"(global|buffer)_load\w*(b128|dwordx4)$", n)) for n in names),
        "matrix_ops": sum(n.startswith(("v_mfma", "v_wmma")) for n in names),
        "instructions": len(names),
    }


def rows(targets: list[str], only: str = "") -> Iterator[Row]:
    """Compile and look. only: words that kernel and case together must contain."""
    for kernel, case, launch in cases():
        if only not in f"{kernel} {case}":
            continue
        for target in targets:
            binary = compile_launch(launch, target)
            found = _amd(binary, target) if target in AMD else _nvidia(binary, target, launch.num_warps)
            yield Row(kernel, case, target, **found)


def read_table(path: Path = TABLE) -> dict[tuple[str, str, str], Row]:
    """The committed table."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    out = {}
    for line in csv.DictReader(lines):
        row = Row(**{f.name: line[f.name] if f.type == "str" else int(line[f.name]) for f in fields(Row)})  # type: ignore[arg-type]
        out[row.key] = row
    return out


def table_version(path: Path = TABLE) -> str:
    """The Triton that the committed table was made with."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# triton ")


def faults(row: Row, before: Row | None) -> list[str]:
    """What is wrong with a row by itself, and worse than in the table. before: None where versions differ."""
    out = []
    if row.spill_bytes and row.target not in MAY_SPILL:
        out.append(f"spills {row.spill_bytes} bytes per thread")
    if row.shared_bytes > PARTS[row.target].shared:
        out.append(f"needs {row.shared_bytes} bytes of shared memory, {PARTS[row.target].shared} are there")
    if row.kernel == "decode" and not row.matrix_ops:
        out.append("does not use the matrix units")
    if row.kernel == "decode" and not row.wide_loads:
        out.append("has no loads of 16 bytes")
    if before is not None:
        if row.spill_bytes > before.spill_bytes * 1.05:
            out.append(f"spills {row.spill_bytes} bytes per thread, {before.spill_bytes} before")
        if row.warps < before.warps:
            out.append(f"{row.warps} warps fit at a time, {before.warps} did")
        if row.shared_bytes > before.shared_bytes * 1.05:
            out.append(f"{row.shared_bytes} bytes of shared memory, {before.shared_bytes} before")
        if row.instructions > before.instructions * 1.05:
            out.append(f"{row.instructions} instructions, {before.instructions} before")
        if row.wide_loads < before.wide_loads or row.matrix_ops > before.matrix_ops:
            out.append("other loads or products than before")
    return [f"{' '.join(row.key)}: {what}" for what in out]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the GPU kernels' machine code uses.")
    parser.add_argument("--targets", nargs="+", default=[*NVIDIA, *AMD], choices=[*NVIDIA, *AMD])
    parser.add_argument("--only", default="", help="words of the kernel and case to compile")
    parser.add_argument("--write", action="store_true", help="put the rows into the committed table")
    parser.add_argument("--check", action="store_true", help="compare with the committed table")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("kernels that are interpreted cannot be compiled; unset TRITON_INTERPRET")
    same = args.check and table_version() == triton.__version__
    table = read_table() if args.check else {}
    out, bad = [], []
    for row in rows(args.targets, args.only):
        out.append(row)
        bad += faults(row, table.get(row.key) if same else None)
        if args.check and row.key not in table:
            bad.append(f"{' '.join(row.key)}: is not in {TABLE.name}; run tools/kernel_table.py --write")
        if not args.write and not args.check:
            print(*(f"{name}={value}" for name, value in asdict(row).items()), flush=True)
    if args.write:
        kept = read_table() if TABLE.exists() and table_version() == triton.__version__ else {}
        out = sorted((kept | {row.key: row for row in out}).values(), key=lambda row: row.key)
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            file.write(f"# triton {triton.__version__}\n")
            writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in out)
    for line in bad:
        print(f"error: {line}", file=sys.stderr)
    print(f"{len(out)} kernels compiled, {len(bad)} faults")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
