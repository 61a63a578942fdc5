"""Assertions that every test of an operation shares: floats by RMS ratio, codes bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def _tensor(values: Any) -> torch.Tensor:
    return values.detach().cpu() if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))


def _same_shape(name: str, reference: torch.Tensor, actual: torch.Tensor) -> None:
    assert actual.shape == reference.shape, f"{name}: shape {list(actual.shape)} instead of {list(reference.shape)}"


def assert_rms_ratio(name: str, reference: Any, actual: Any, ratio: float) -> None:
    """The RMS of the error is at most `ratio` times the RMS of the reference; both are in the message.

    reference, actual: tensors or arrays of the same shape, every value finite: an output that a kernel did not write
    is NaN (see `conftest.poisoned_outputs`) and fails here.
    """
    expected, got = _tensor(reference).double(), _tensor(actual).double()
    _same_shape(name, expected, got)
    assert bool(torch.isfinite(expected).all()), f"{name}: the reference itself is not finite"
    n_bad = int((~torch.isfinite(got)).sum())
    assert n_bad == 0, f"{name}: {n_bad} of {got.numel()} values are NaN or infinite"
    error = float((got - expected).square().mean().sqrt())
    scale = float(expected.square().mean().sqrt())
    assert error <= ratio * scale, (
        f"{name}: RMS error {error:.3e} over RMS {scale:.3e} is {error / scale if scale else float('inf'):.3e}, "
        f"more than {ratio:.1e}"
    )


def assert_codes_equal(name: str, reference: Any, actual: Any) -> None:
    """Integer codes, or the bits of f16 scales and minima, are the same one by one; the first difference is named."""
    expected, got = _tensor(reference), _tensor(actual)
    _same_shape(name, expected, got)
    assert got.dtype == expected.dtype, f"{name}: {got.dtype} instead of {expected.dtype}"
    if expected.dtype == torch.float16:
        expected, got = expected.contiguous().view(torch.int16), got.contiguous().view(torch.int16)
    different = (expected != got).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{name}: {len(different)} of {expected.numel()} codes differ, first at {list(at)}: "
            f"{int(got[at])} instead of {int(expected[at])}"
        )
