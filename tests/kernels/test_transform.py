"""Transforms keep scores and restore values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.transform import apply, hadamard_block, hadamard_matrix, invert, transform_matrix


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128])
def test_hadamard_is_its_own_inverse(n: int) -> None:
    h = hadamard_matrix(n)
    assert torch.allclose(h @ h, torch.eye(n, dtype=torch.float64), atol=1e-13)
    assert h.abs().unique().numel() == 1


def test_hadamard_of_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        hadamard_matrix(96)


@pytest.mark.parametrize(("d", "block"), [(64, 64), (80, 16), (96, 32), (112, 16), (128, 128), (256, 256), (192, 64)])
def test_block_is_the_largest_power_of_two_that_divides(d: int, block: int) -> None:
    assert hadamard_block(d) == block
    assert hadamard_block(d, 32) == min(block, 32)


def test_order_moves_channels_exactly() -> None:
    d = 24
    order = torch.randperm(d)
    x = torch.randn(2, 5, d)
    t = transform_matrix(d, order=order).float().expand(2, d, d)
    assert torch.equal(apply(x, t), x[..., order])
    assert torch.equal(apply(apply(x, t), invert(t)), x)


@given(
    d=st.sampled_from([8, 24, 40, 64]),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["order", "had", "both", "matrix"]),
)
def test_scores_and_sums_survive_any_transform(d: int, seed: int, kind: str) -> None:
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(d, generator=g) if kind in ("order", "both") else None
    matrix = torch.randn(d, d, generator=g, dtype=torch.float64) + 3 * torch.eye(d) if kind == "matrix" else None
    hadamard = hadamard_block(d) if kind in ("had", "both") else 0
    t = transform_matrix(d, order=order, hadamard=hadamard, matrix=matrix)[None]
    x = torch.randn(1, 7, d, generator=g, dtype=torch.float64)
    q = torch.randn(1, 3, d, generator=g, dtype=torch.float64)
    offset = torch.randn(1, d, generator=g, dtype=torch.float64)
    stored = apply(x, t, offset)
    queries = q @ invert(t)  # T^-T q, as rows
    scores, plain = queries @ stored.transpose(1, 2), q @ x.transpose(1, 2)
    # The offset shifts all keys' scores alike, so differences between keys are what must survive.
    assert torch.allclose(scores - scores[..., :1], plain - plain[..., :1], atol=1e-6)
    assert torch.allclose(apply(apply(x, t), invert(t)), x, atol=1e-7)


@pytest.mark.parametrize(
    "arguments",
    [
        {"order": torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])},
        {"hadamard": 16},
        {"matrix": torch.eye(4)},
        {"matrix": torch.eye(8), "hadamard": 8},
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict) -> None:
    with pytest.raises(ValueError):
        transform_matrix(8, **arguments)
