"""Symmetric positive definite matrices: square root, damping, geometric mean. All numpy float64 [d, d]."""

from __future__ import annotations

import numpy as np
import torch

#: Share of the mean diagonal that is added to second moments: directions without energy must not become infinite, and
#: a transform that grows along directions in which the sample happened to have none does not hold on other text
#: (docs/log.md has the figures for 1e-4 to 0.3).
DAMPING = 0.3


def symmetric(a: np.ndarray) -> np.ndarray:
    """The symmetric part."""
    return (a + a.T) / 2


def damped(a: np.ndarray, share: float = DAMPING) -> np.ndarray:
    """`a` with `share` of its mean diagonal on the diagonal; the identity where `a` is zero."""
    mean = float(np.trace(a)) / len(a)
    if not mean > 0:
        return np.eye(len(a))
    return symmetric(a) / mean + share * np.eye(len(a))


def eigen(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, smallest first, and eigenvectors in columns; by torch, whose threads do not spin at small sizes."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(symmetric(a)))
    return values.numpy(), vectors.numpy()


def power(a: np.ndarray, exponent: float) -> np.ndarray:
    """`a ** exponent` by eigenvalues; tiny negative ones count as the smallest positive float."""
    values, vectors = eigen(a)
    return (vectors * np.clip(values, np.finfo(float).tiny, None) ** exponent) @ vectors.T


def geometric_mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a # b = a^1/2 (a^-1/2 b a^-1/2)^1/2 a^1/2` (Pusz and Woronowicz 1975)."""
    root, inverse = power(a, 0.5), power(a, -0.5)
    return symmetric(root @ power(inverse @ b @ inverse, 0.5) @ root)
