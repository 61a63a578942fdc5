"""What this CPU can do, as far as the kernels need to know."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A CPU to compile for.

    cpu, features: as LLVM names them.  lanes: float32 values in one vector register.  n_registers: vector registers.
    vnni: whether 512-bit dot products of bytes exist (`vpdpbusd`).
    """

    cpu: str
    features: str
    lanes: int
    n_registers: int
    vnni: bool


def _describe(cpu: str, features: dict[str, bool]) -> Target:
    # Where 512-bit vectors exist the kernels want them: LLVM would halve them on CPUs whose clock once suffered.
    text = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
    has = {name for name, on in features.items() if on}
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has:
        return Target(cpu, text + ",-prefer-256-bit", 16, 32, "avx512vnni" in has)
    if "avx2" in has:
        return Target(cpu, text, 8, 16, False)
    if "neon" in has or platform.machine().lower() in ("arm64", "aarch64"):
        return Target(cpu, text, 4, 32, False)
    return Target(cpu, text, 4, 16, False)


@functools.cache
def host_target() -> Target:
    """The CPU that this process runs on.

    `KVRUN_CPU_FEATURES=avx2` restricts an x86 CPU to what all of the last ten years have, to test or to compare.
    """
    import llvmlite.binding as llvm

    features = dict(llvm.get_host_cpu_features())
    if os.environ.get("KVRUN_CPU_FEATURES") == "avx2":
        features = {name: on and "avx512" not in name and "avx10" not in name for name, on in features.items()}
    return _describe(llvm.get_host_cpu_name(), features)
