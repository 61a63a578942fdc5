"""Every GPU kernel compiles for devices that are not here, and its machine code is no worse than the table says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.house.files import ROOT

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")


def check(*arguments: str) -> None:
    """Run the tool in a process of its own: here kernels are interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tools" / "kernel_table.py"), "--check", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_few_kernels() -> None:
    check("--targets", "sm_86", "gfx942", "--only", "smollm2-135m")


@pytest.mark.slow
def test_every_kernel_on_every_device() -> None:
    check()
