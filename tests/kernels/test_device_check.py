"""The device check without a device: it says so, and what it would time runs in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.house.files import ROOT

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")

from kvkernels.attend.triton import decode
from tools.device_check import random_layer, splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("bits", [16, 4, 3, 2])
def test_what_is_timed_gives_numbers(bits: int) -> None:
    layer, q = random_layer("smollm2-135m", bits, 192, DEVICE)
    lengths = torch.tensor([192], dtype=torch.int32, device=DEVICE)
    out = decode(layer, q, lengths, n_splits=splits(3, 192, 4))
    assert bool(torch.isfinite(out).all()) and float(out.abs().max()) > 0


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    rows = tmp_path / "rows.jsonl"
    env = os.environ | {"PYTHON": sys.executable}
    command = [str(ROOT / "tools" / "device_check.sh"), str(rows)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "no GPU that torch can use: nothing was checked\n"
    assert not rows.exists()
