"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_FALLBACK_BYTES = 4 << 30


def available_bytes() -> int:
    """Memory that can be had without swapping, in bytes: the machine's, or the container's where that is less."""
    return max(0, min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return _FALLBACK_BYTES  # neither Linux nor a Unix that tells: a small machine is the safe guess


def _container_bytes() -> int:
    """What a version 2 control group leaves; a very large number where none limits this process."""
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
