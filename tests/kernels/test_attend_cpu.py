"""The compiled CPU kernels against the reference: codes bit for bit, outputs by RMS error over RMS."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvkernels.attend import Side, attend
from kvkernels.attend.cpu import LayerShape, PagedLayer, Turn, Workspace
from kvkernels.pack.cpu import PAGE
from kvkernels.paged_store import PagedHead, PagedStore
from kvkernels.quantize import quantize
from kvkernels.spec import PLANES, QuantSpec
from kvkernels.store import PackedStore
from kvrun.visibility import packed_end

F16 = QuantSpec(16)


def stream_bits(data: np.ndarray, width: int) -> np.ndarray:
    """Codes of `width` bits from little-endian bit streams [..., bytes]."""
    bits = np.unpackbits(data, axis=-1, bitorder="little")
    return (bits.reshape(*data.shape[:-1], -1, width) << np.arange(width)).sum(-1)


def codes_of(head: PagedHead) -> np.ndarray:
    """Codes [tokens, d] of all pages, read from the layout as `kvkernels.pack.cpu` describes it."""
    d, out, at, shift = head.d, 0, 0, 0
    n_pages = len(head.codes)
    for width in PLANES[head.spec.bits]:
        n_bytes = d * width // 8
        plane = head.codes[:, at : at + PAGE * n_bytes]
        if head.side == "k":
            n_words = n_bytes // 4
            words = plane[:, : n_words * 4 * PAGE].reshape(n_pages, n_words, PAGE, 4).transpose(0, 2, 1, 3)
            rest = plane[:, n_words * 4 * PAGE :].reshape(n_pages, -1, PAGE).transpose(0, 2, 1)
            rows = np.concatenate([words.reshape(n_pages, PAGE, -1), rest], 2)
            codes = stream_bits(np.ascontiguousarray(rows), width)
        else:
            rows = plane.reshape(n_pages, width, d, 4).transpose(0, 2, 1, 3).reshape(n_pages, d, -1)
            codes = stream_bits(np.ascontiguousarray(rows), width).transpose(0, 2, 1)
        out = out + (codes << shift)
        at += PAGE * n_bytes
        shift += width
    return np.asarray(out).reshape(n_pages * PAGE, d)


def scales_of(head: PagedHead, table: np.ndarray, n: int) -> np.ndarray:
    """Scales or minima in the reference's shape: [n, d / group] or [n / group, d]."""
    if head.spec.axis == "channel":
        return table[: n // head.spec.group]
    return table.transpose(0, 2, 1).reshape(-1, head.d // head.spec.group)[:n]


@pytest.mark.parametrize(
    ("spec", "d"),
    [
        (QuantSpec(1, 8), 8),
        (QuantSpec(2, 24), 24),
        (QuantSpec(3, 20), 40),
        (QuantSpec(4, 64), 64),
        (QuantSpec(5, 40), 80),
        (QuantSpec(6, 32), 96),
        (QuantSpec(8, 112), 112),
        (QuantSpec(4, 32, "channel"), 64),
        (QuantSpec(3, 24, "channel"), 24),
        (QuantSpec(2, 64, "channel"), 40),
    ],
    ids=str,
)
@pytest.mark.parametrize("side", ["k", "v"])
def test_codes_are_the_references_bit_for_bit(side: str, spec: QuantSpec, d: int) -> None:
    n = 3 * 64 if spec.axis == "channel" else 71
    n -= n % spec.block
    x = torch.randn(n, d) * torch.logspace(-3, 2, d)
    x[5], x[6] = 0.25, 0.0  # constant groups have a step of 0
    x = x.half()
    clip = 0.93
    store = PagedStore(side, [spec], [clip], n + 5 * spec.block, d)  # type: ignore[arg-type]
    # Pieces that end anywhere; the same tokens twice, as after an interruption or a rewind.
    cuts = [0, spec.block, n // 2 // spec.block * spec.block, n]
    store.write(0, x[None, : cuts[2]] * 3)
    for first, last in pairwise(cuts):
        store.write(first, x[None, first:last])
    codes, scale, minimum = quantize(x[None], spec, torch.tensor([clip]))
    head = store.heads[0]
    assert np.array_equal(codes_of(head)[:n], codes[0].numpy())
    assert np.array_equal(scales_of(head, head.scale, n), scale[0].numpy())
    assert np.array_equal(scales_of(head, head.minimum, n), minimum[0].numpy())


def test_a_store_takes_what_its_heads_take() -> None:
    specs = [QuantSpec(4, 64), QuantSpec(3, 32), F16]
    for n in (32, 96, 100):
        paged, reference = PagedStore("k", specs, [1.0] * 3, n, 64), PackedStore(specs, [1.0] * 3, n, 64)
        whole = -(-n // PAGE) * PAGE
        assert paged.n_bytes == reference.n_bytes * whole // n
        assert paged.n_bytes == sum(a.nbytes for h in paged.heads for a in (h.codes, h.scale, h.minimum))


class Reference:
    """Attention by the reference kernel for one layer, whose packed store is filled to the end in advance."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, specs: tuple[list, list], sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.rows = k.half(), v.half()
        self.stores = []
        for x, side in zip(self.rows, specs, strict=True):
            block = max(s.block for s in side)
            n = max(packed_end(x.shape[1], sinks, window, block) - sinks, 0)
            store = PackedStore(side, [1.0] * len(side), n, x.shape[2])
            store.write(0, x[:, sinks : sinks + n])
            self.stores.append(store)

    def __call__(self, q: torch.Tensor, first: int, scale: float) -> torch.Tensor:
        positions = torch.arange(first, first + q.shape[1])
        sides = []
        for store, rows in zip(self.stores, self.rows, strict=True):
            ends = torch.tensor([packed_end(int(t) + 1, self.sinks, self.window, store.block) for t in positions])
            n = int(positions[-1]) + 1
            sides.append(Side(store, self.sinks, ends, rows[:, :n], torch.arange(n)))
        return attend(q.double(), *sides, positions, scale)


def check(
    shape: LayerShape,
    specs_k: Sequence[QuantSpec],
    specs_v: Sequence[QuantSpec],
    *,
    sinks: int,
    window: int,
    steps: Sequence[int],
    n_threads: int,
    max_chunk: int = 0,
) -> None:
    n = sum(steps)
    q = torch.randn(shape.n_head, n, shape.d_k) * 3
    k, v = torch.randn(shape.n_kv, n, shape.d_k), torch.randn(shape.n_kv, n, shape.d_v)
    work, turn = Workspace(n_threads, max_chunk or max(steps)), Turn()
    scale = shape.d_k**-0.5
    sides = [(list(specs), [1.0] * shape.n_kv) for specs in (specs_k, specs_v)]
    layer = PagedLayer(shape, *sides, sinks=sinks, window=window, n_ctx=n, scale=scale, work=work, turn=turn)
    reference = Reference(k, v, (list(specs_k), list(specs_v)), sinks, window)
    at = 0
    for size in steps:
        piece = slice(at, at + size)
        work.begin(at, size, turn)
        got = layer(q[:, piece], k[:, piece], v[:, piece])
        turn.change()
        want = reference(q[:, piece], at, scale)
        error, size_of = (got - want).pow(2).mean().sqrt().item(), want.pow(2).mean().sqrt().item()
        assert error < 1e-5 * size_of, f"step of {size} at {at}: RMS error {error:.2e}, RMS {size_of:.2e}"
        assert not work.bad
        at += size


STEPS = [70, 1, 1, 45, 1, 33, 2, 7, 1]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width(bits: int) -> None:
    spec = QuantSpec(bits, 32)
    check(LayerShape(6, 2, 32, 32), [spec] * 2, [spec] * 2, sinks=4, window=32, steps=STEPS, n_threads=2)


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 32), (3, 0), (0, 7), (5, 13), (200, 0), (0, 200)])
@pytest.mark.parametrize("name", ["tokens", "channels and tokens", "channels of 24 and 16", "f16"])
def test_windows_and_sinks(name: str, sinks: int, window: int) -> None:
    k, v = {
        "tokens": (QuantSpec(4, 32), QuantSpec(4, 8)),
        "channels and tokens": (QuantSpec(2, 32, "channel"), QuantSpec(4, 8)),
        "channels of 24 and 16": (QuantSpec(4, 24, "channel"), QuantSpec(3, 16, "channel")),
        "f16": (F16, F16),
    }[name]
    check(LayerShape(6, 2, 32, 24), [k] * 2, [v] * 2, sinks=sinks, window=window, steps=STEPS, n_threads=2)


def test_widths_mixed_by_head() -> None:
    k = [QuantSpec(2, 80), QuantSpec(3, 40), F16, QuantSpec(8, 80), QuantSpec(5, 16)]
    v = [QuantSpec(6, 56), F16, QuantSpec(4, 112), QuantSpec(2, 8), QuantSpec(3, 28)]
    check(LayerShape(5, 5, 80, 112), k, v, sinks=5, window=9, steps=[130, 1, 60, 1], n_threads=3)


def test_cubic_codes_beside_uniform_ones() -> None:
    k = [QuantSpec(2, 80, code="cubic"), QuantSpec(3, 40), F16, QuantSpec(6, 80, code="cubic"), QuantSpec(4, 16)]
    v = [QuantSpec(4, 56, code="cubic"), F16, QuantSpec(4, 112), QuantSpec(2, 8), QuantSpec(3, 28, code="cubic")]
    check(LayerShape(5, 5, 80, 112), k, v, sinks=5, window=9, steps=[130, 1, 60, 1], n_threads=3)


@pytest.mark.parametrize(
    ("n_head", "n_kv", "d"),
    [(1, 1, 96), (4, 2, 64), (9, 3, 64), (14, 2, 64), (8, 1, 128), (10, 1, 40), (16, 1, 64), (26, 2, 64), (8, 8, 256)],
)
def test_shapes_of_attention(n_head: int, n_kv: int, d: int) -> None:
    spec = QuantSpec(4, 32 if d % 32 == 0 else 8)
    steps = [65, 1, 150, 1]
    check(LayerShape(n_head, n_kv, d, d), [spec] * n_kv, [spec] * n_kv, sinks=4, window=16, steps=steps, n_threads=2)


@pytest.mark.parametrize("n_threads", [1, 2, 7])
def test_a_context_that_is_split_between_threads(n_threads: int) -> None:
    spec = QuantSpec(4, 32)
    steps = [1500, 1, 3, 1, 40]
    check(LayerShape(7, 1, 32, 32), [spec], [spec], sinks=4, window=32, steps=steps, n_threads=n_threads)


def test_scores_that_grow_and_shrink_along_the_context() -> None:
    shape, spec, n = LayerShape(2, 1, 32, 32), QuantSpec(8, 32), 700
    size = torch.cat([torch.linspace(0.01, 12, n // 2), torch.linspace(12, 0.01, n - n // 2)])
    q, k, v = torch.ones(2, n, 32) * 4, torch.randn(1, n, 32).abs() * size[:, None], torch.randn(1, n, 32)
    work, turn = Workspace(2, n), Turn()
    sides = ([spec], [1.0]), ([spec], [1.0])
    layer = PagedLayer(shape, *sides, sinks=0, window=0, n_ctx=n, scale=1.0, work=work, turn=turn)
    work.begin(0, n, turn)
    got = layer(q, k, v)
    want = Reference(k, v, ([spec], [spec]), 0, 0)(q, 0, 1.0)
    assert ((got - want).pow(2).mean() / want.pow(2).mean()).sqrt() < 1e-4


def test_a_step_that_was_given_up_can_be_run_again() -> None:
    shape, spec = LayerShape(4, 2, 32, 32), QuantSpec(4, 32)
    q, k, v = torch.randn(4, 90, 32), torch.randn(2, 90, 32), torch.randn(2, 90, 32)

    def run(give_up: bool) -> torch.Tensor:
        work, turn = Workspace(2, 64), Turn()
        sides = ([spec] * 2, [1.0] * 2), ([spec] * 2, [1.0] * 2)
        layer = PagedLayer(shape, *sides, sinks=2, window=6, n_ctx=90, scale=0.2, work=work, turn=turn)
        work.begin(0, 40, turn)
        layer(q[:, :40], k[:, :40], v[:, :40])
        turn.change()
        if give_up:
            work.begin(40, 45, turn)
            layer(q[:, 40:85], k[:, 40:85] * 9, v[:, 40:85] - 1)
        work.begin(40, 50, turn)
        return layer(q[:, 40:], k[:, 40:], v[:, 40:])

    assert torch.equal(run(give_up=True), run(give_up=False))


def test_numbers_that_do_not_fit_are_noticed() -> None:
    for value in (torch.nan, torch.inf, 1e6):
        work, turn = Workspace(1, 8), Turn()
        sides = ([F16], [1.0]), ([F16], [1.0])
        layer = PagedLayer(
            LayerShape(1, 1, 16, 16), *sides, sinks=1, window=0, n_ctx=8, scale=1.0, work=work, turn=turn
        )
        x = torch.zeros(1, 8, 16)
        work.begin(0, 8, turn)
        layer(x, x, x)
        assert not work.bad
        bad = x.clone()
        bad[0, 3, 15] = value
        layer(x, x, bad)
        assert work.bad


def test_steps_that_are_too_long_are_refused() -> None:
    work = Workspace(1, 8)
    for n in (0, 9):
        with pytest.raises(ValueError, match="1 to 8 tokens"):
            work.begin(0, n, Turn())
