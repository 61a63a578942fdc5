"""What scores gain from a rotating offset is the product of the query with the turned offset, pair by pair."""

import math

import pytest
import torch

from kvkernels.rope_offset import RopeStyle, offset_scores, turned_offset


def turned_by_hand(mu: torch.Tensor, angles: torch.Tensor, style: RopeStyle) -> torch.Tensor:
    """One vector [d] turned by angles [n_rot / 2], pair by pair."""
    out, half = mu.clone(), len(angles)
    for i, angle in enumerate(angles.tolist()):
        a, b = (2 * i, 2 * i + 1) if style == "interleaved" else (i, i + half)
        out[a] = mu[a] * math.cos(angle) - mu[b] * math.sin(angle)
        out[b] = mu[a] * math.sin(angle) + mu[b] * math.cos(angle)
    return out


@pytest.mark.parametrize("style", ["interleaved", "neox"])
@pytest.mark.parametrize(("d", "n_rot"), [(24, 24), (24, 10), (80, 64)])
def test_scores_are_products_with_the_turned_offset(style: RopeStyle, d: int, n_rot: int) -> None:
    g = torch.Generator().manual_seed(d + n_rot)
    n, n_kv, n_head, n_q = 7, 2, 6, 5
    angles = torch.rand(n, n_rot // 2, generator=g, dtype=torch.float64) * 20
    mu = torch.randn(n_kv, d, generator=g, dtype=torch.float64)
    q = torch.randn(n_head, n_q, d, generator=g, dtype=torch.float64)

    table = torch.cat([angles.cos(), angles.sin()], -1)
    turned = turned_offset(mu, table, style)
    expected = torch.stack(
        [torch.stack([turned_by_hand(mu[h], angles[s], style) for s in range(n)]) for h in range(n_kv)]
    )
    assert torch.allclose(turned, expected, atol=1e-12)

    scores = offset_scores(q, mu, table, style)
    whole = q @ expected.repeat_interleave(n_head // n_kv, 0).transpose(1, 2)
    # Channels that are not turned add the same number at every position, which softmax does not see.
    constant = whole - scores
    assert torch.allclose(constant, constant[..., :1].expand_as(constant), atol=1e-12)
    if d == n_rot:
        assert torch.allclose(scores, whole, atol=1e-12)


def test_no_offset_gives_nothing() -> None:
    table = torch.ones(3, 8)
    assert torch.equal(offset_scores(torch.ones(2, 1, 8), torch.zeros(1, 8), table, "neox"), torch.zeros(2, 1, 3))
