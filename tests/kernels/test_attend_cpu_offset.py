"""Compiled attention with a rotating key offset, against the reference kernel with the scores that it adds."""

from __future__ import annotations

import pytest
import torch

from kvkernels.attend import Side, attend
from kvkernels.attend.cpu import LayerShape, PagedLayer, Turn, Workspace
from kvkernels.attend.cpu_offset import RotatingOffset
from kvkernels.pack.cpu import PAGE
from kvkernels.rope_offset import RopeStyle, offset_scores
from kvkernels.spec import QuantSpec
from kvkernels.store import PackedStore


def tables(n_rot: int, n: int, first: int, magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of positions `first .. first + n - 1` in float64, and the fine ones."""
    frequencies = 10000.0 ** -(torch.arange(0, n_rot, 2, dtype=torch.float64) / n_rot)
    angles = torch.outer(torch.arange(first, first + n, dtype=torch.float64), frequencies)
    fine = torch.outer(frequencies, torch.arange(PAGE, dtype=torch.float64))
    coarse = torch.cat((angles.cos(), angles.sin()), -1) * magnitude
    return coarse, torch.cat((fine.cos(), fine.sin())).float()


def packed_end(n: int, sinks: int, window: int) -> int:
    return sinks + max(n - sinks - window, 0)


@pytest.mark.parametrize(
    ("n_head", "n_kv", "d", "n_rot", "style", "window", "first"),
    [
        (4, 2, 64, 64, "neox", 16, 0),
        (9, 3, 64, 64, "interleaved", 0, 70000),
        (14, 2, 64, 64, "neox", 32, 0),
        (1, 1, 80, 20, "interleaved", 5, 0),
        (6, 3, 96, 48, "neox", 0, 300000),
        (5, 5, 40, 36, "neox", 9, 0),
        (16, 1, 128, 128, "interleaved", 16, 0),
        (8, 1, 256, 128, "neox", 16, 131000),
    ],
)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_references_attention(
    n_head: int, n_kv: int, d: int, n_rot: int, style: RopeStyle, window: int, first: int, n_threads: int
) -> None:
    """`first`: where the table of angles begins, as if so many tokens came before."""
    steps, sinks, scale, d_v = [70, 1, 1, 200, 33, 1], 3, d**-0.5, 24
    n = sum(steps)
    coarse, fine = tables(n_rot, n, first, 1.25)
    offset = torch.randn(n_kv, d) * 4
    offset[1::2] = 0.0  # heads without an offset beside others
    raw, q = torch.randn(n_head, n, d), torch.randn(n_head, n, d) * 3
    k, v = torch.randn(n_kv, n, d), torch.randn(n_kv, n, d_v)
    specs_k = [QuantSpec(4, d) if i % 3 else QuantSpec(3, d // 2) for i in range(n_kv)]
    specs_v = [QuantSpec(4, 8)] * n_kv
    stores = []
    for x, specs in ((k, specs_k), (v, specs_v)):
        n_packed = packed_end(n, sinks, window) - sinks
        store = PackedStore(specs, [1.0] * n_kv, n_packed, x.shape[2])
        store.write(0, x[:, sinks : sinks + n_packed].half())
        stores.append(store)

    work, turn = Workspace(n_threads, max(steps)), Turn()
    layer = PagedLayer(
        LayerShape(n_head, n_kv, d, d_v),
        (specs_k, [1.0] * n_kv),
        (specs_v, [1.0] * n_kv),
        sinks=sinks,
        window=window,
        n_ctx=n,
        scale=scale,
        work=work,
        turn=turn,
        offset=RotatingOffset(offset, coarse.float().contiguous(), fine, style),
    )
    at = 0
    for size in steps:
        piece, last = slice(at, at + size), at + size
        work.begin(at, size, turn)
        got = layer(q[:, piece], k[:, piece], v[:, piece], raw[:, piece])
        turn.change()
        positions = torch.arange(at, last)
        ends = torch.tensor([packed_end(t + 1, sinks, window) for t in range(at, last)])
        sides = [
            Side(s, sinks, ends, x[:, :last].half(), torch.arange(last)) for s, x in zip(stores, (k, v), strict=True)
        ]
        bias = offset_scores(raw[:, piece].double(), offset.double(), coarse[:last], style)
        want = attend(q[:, piece].double(), *sides, positions, scale, bias)
        error, size_of = (got - want).pow(2).mean().sqrt().item(), want.pow(2).mean().sqrt().item()
        assert error < 2e-5 * size_of, f"step of {size} at {at}: RMS error {error:.2e}, RMS {size_of:.2e}"
        at = last


def test_queries_before_the_transform_go_with_the_offset() -> None:
    coarse, fine = tables(16, 8, 0, 1.0)
    offset = RotatingOffset(torch.ones(1, 16), coarse.float(), fine, "neox")
    f16 = [QuantSpec(16)], [1.0]
    shared = {"sinks": 0, "window": 0, "n_ctx": 8, "scale": 1.0, "turn": Turn()}
    shape, x = LayerShape(1, 1, 16, 16), torch.zeros(1, 8, 16)
    for given, raw in ((offset, None), (None, x)):
        layer = PagedLayer(shape, f16, f16, work=Workspace(1, 8), offset=given, **shared)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="rotating offset"):
            layer(x, x, x, raw)
    with pytest.raises(ValueError, match="reach over the context"):
        PagedLayer(shape, f16, f16, work=Workspace(1, 8), offset=offset, **{**shared, "n_ctx": 9})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float32"):
        RotatingOffset(torch.ones(1, 16), coarse, fine, "neox")
