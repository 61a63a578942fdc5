#!/bin/sh
# Prove and time the GPU kernels on the device at hand: first the tests, then the times, as ratios, into a JSONL.
#
#     tools/device_check.sh [ROWS.jsonl]
#
# Needs torch, triton and numpy; the tests need pytest and are left out with a message where it is missing.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/runtime:$PWD/kernels"
unset TRITON_INTERPRET
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that torch can use: nothing was checked"
    exit 0
fi
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
    # Without conftest.py, which needs more than a bare machine has.
    "$PYTHON" -m pytest -q --noconftest -p no:cacheprovider tests/kernels/test_attend_triton.py tests/kernels/test_append_triton.py
else
    echo "pytest is not installed: the kernels' tests were left out"
fi
"$PYTHON" tools/device_check.py "${1:-device-rows.jsonl}"
