"""Layers with a sliding window against a definition that keeps every token and looks at the latest ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from kvkernels.quantize import dequantize, quantize
from kvkernels.spec import QuantSpec
from kvrun.cache import KVCache, head_matrix
from kvrun.errors import KvError
from kvrun.evaluation.guard import expected_packed_reads
from kvrun.evaluation.probe import check_cache_obeys
from kvrun.layers import Rope, causal_attention, causal_mask
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.visibility import dropped_end, first_seen, packed_end, packed_reads

N_KV, GROUP, D = 2, 3, 32
SCALE = D**-0.5
N = 110

SPECS = {
    "f16": (QuantSpec(16), QuantSpec(16)),
    "4 and 3 bits": (QuantSpec(4, 32), QuantSpec(3, 8)),
    "channels and tokens": (QuantSpec(2, 32, "channel"), QuantSpec(2, 8)),
    "channels of 16, f16": (QuantSpec(4, 16, "channel"), QuantSpec(16)),
}


def transform(keys: bool, rotating: bool) -> HeadTransform:
    rng = np.random.default_rng(1)
    offset = rng.standard_normal(D).astype(np.float32)
    order = rng.permutation(D).astype(np.uint16)
    return HeadTransform(order=order, hadamard=8, offset=offset if keys else None, rotating=keys and rotating)


def plan(name: str, sliding: int, sinks: int, window: int, *, rotating: bool = False, layers: int = 1) -> CachePlan:
    heads = [
        (HeadPlan(spec, transform(keys, rotating)), HeadPlan(spec))
        for spec, keys in zip(SPECS[name], (True, False), strict=True)
    ]
    return CachePlan(
        (LayerGeometry(N_KV, D, D, sliding),) * layers, (heads[0],) * layers, (heads[1],) * layers, sinks, window
    )


def inputs(n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(heads, n, D, generator=g, dtype=torch.float64) for heads in (N_KV * GROUP, N_KV, N_KV))
    return 2 * q, k, v


def stored(x: torch.Tensor, head: HeadPlan, plan: CachePlan, rope: Rope | None) -> torch.Tensor:
    """The tokens of one head [n, d] as the last of them sees them, in the model's own space."""
    offset = torch.zeros(x.shape, dtype=torch.float64)
    if head.transform.offset is not None:
        offset += torch.from_numpy(head.transform.offset)
    if head.transform.rotating and rope is not None:
        offset = rope(offset[None], torch.arange(len(x)))[0]
    t = head_matrix(head.transform, D)
    t = torch.eye(D, dtype=torch.float64) if t is None else t
    held = ((x - offset) @ t.T).half()
    seen, end = held.double(), packed_end(len(x), plan.sinks, plan.window, head.spec.block)
    if head.spec.quantized and end > plan.sinks:
        seen[plan.sinks : end] = dequantize(
            *quantize(held[None, plan.sinks : end], head.spec, None), head.spec, torch.float64
        )[0]
    return seen @ torch.linalg.inv(t).T + offset


def definition(plan: CachePlan, rope: Rope | None, softcap: float) -> torch.Tensor:
    q, k, v = inputs()
    out = torch.empty_like(q)
    first = [max(t - plan.geometry[0].sliding + 1, 0) for t in range(N)]
    for h in range(len(q)):
        ih = h // GROUP
        for t in range(N):
            keys = stored(k[ih, : t + 1], plan.k[0][ih], plan, rope)[first[t] :]
            values = stored(v[ih, : t + 1], plan.v[0][ih], plan, None)[first[t] :]
            scores = keys @ q[h, t] * SCALE
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[h, t] = torch.softmax(scores, 0) @ values
    return out


def run(cache: KVCache, start: int, stop: int, size: int, softcap: float = 0.0) -> torch.Tensor:
    q, k, v = inputs()
    parts = []
    for first, last in pairwise([*range(start, stop, size), stop]):
        parts.append(cache.attend(0, q[:, first:last], k[:, first:last], v[:, first:last], SCALE, softcap))
        cache.commit(last - first)
    return torch.cat(parts, 1)


def ratio(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got - wanted).square().mean() / wanted.square().mean()).sqrt())


@pytest.mark.parametrize("sliding", [1, 40, 400])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (3, 9), (60, 20)])
@pytest.mark.parametrize("name", SPECS)
def test_every_way_to_cut_the_text_gives_the_definition(name: str, sliding: int, sinks: int, window: int) -> None:
    chosen = plan(name, sliding, sinks, window)
    wanted = definition(chosen, None, 0.0)
    for size in (1, 13, 64, N):
        cache = KVCache(chosen, N, torch.float64)
        error = ratio(run(cache, 0, N, size), wanted)
        assert error < 1e-12, f"{size} at a time: RMS ratio {error:.1e}"
        assert cache.packed_read == expected_packed_reads(chosen, N)
        assert cache.tokens_read == sum(min(t + 1, sliding) for t in range(N))


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize(("rotating", "n_rot"), [(True, D), (True, D // 2), (False, D)])
def test_offsets_and_soft_caps(size: int, rotating: bool, n_rot: int) -> None:
    """A cap sees what softmax does not: a number that is the same for all tokens."""
    rope = Rope(n_rot, 1000.0, "neox")
    chosen = plan("4 and 3 bits", 30, 4, 8, rotating=rotating)
    cache = KVCache(chosen, N, torch.float64, rope_of=lambda il: rope)
    assert ratio(run(cache, 0, N, size, softcap=1.5), definition(chosen, rope, 1.5)) < 1e-12
    assert ratio(definition(chosen, rope, 1.5), definition(chosen, rope, 0.0)) > 1e-2


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sliding", [20, 33, 64])
def test_memory_is_that_of_the_window_whatever_the_context(name: str, sliding: int) -> None:
    chosen = plan(name, sliding, 4, 8)
    short, long = (KVCache(chosen, n) for n in (200, 20000))
    assert short.n_bytes == long.n_bytes
    slide = long.layers[0][0]
    assert slide.store.capacity <= sliding + slide.store.block
    assert long.n_values == sliding * N_KV * 2 * D


def test_a_longer_window_in_full_precision_takes_no_more_than_the_sliding_one() -> None:
    wide, narrow = (KVCache(plan("4 and 3 bits", 20, 4, window), 20000) for window in (5000, 20))
    assert wide.n_bytes == narrow.n_bytes


def test_going_back_past_what_was_dropped_gives_what_never_happened() -> None:
    chosen = plan("channels and tokens", 40, 4, 8)
    cache, fresh = (KVCache(chosen, N, torch.float64) for _ in range(2))
    run(cache, 0, 60, 7)
    mark = cache.mark()
    assert mark.n_bytes > sum(t.numel() * 2 for pair in mark.recent for t in pair)
    run(cache, 60, N, 9)
    cache.rewind(mark)
    run(fresh, 0, 60, 60)
    assert torch.equal(run(cache, 60, N, 5), run(fresh, 60, N, 5))


def test_a_chunk_that_fails_leaves_the_cache_as_it_was() -> None:
    chosen = plan("4 and 3 bits", 40, 4, 8)
    cache, fresh = (KVCache(chosen, N, torch.float64) for _ in range(2))
    q, k, v = inputs()
    for one in (cache, fresh):
        run(one, 0, 60, 60)
    bad = v[:, 60:100].clone()
    bad[0, 30, 0] = torch.inf
    with pytest.raises(KvError, match="does not fit f16"):
        cache.attend(0, q[:, 60:100], k[:, 60:100], bad, SCALE)
    assert torch.equal(run(cache, 60, N, 30), run(fresh, 60, N, 30))


@pytest.mark.parametrize("name", [name for name in SPECS if name != "f16"])
def test_the_probe_takes_it_and_would_not_take_another_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrun import sliding
    from kvrun.errors import MeasurementError

    chosen = plan(name, 20, 4, 8)
    check_cache_obeys(chosen, N)
    monkeypatch.setattr(sliding, "first_seen", lambda n, latest: max(n - latest + 3, 0))
    with pytest.raises(MeasurementError, match="does not compute what its plan says"):
        check_cache_obeys(chosen, N)


def test_what_is_dropped_is_seen_by_no_later_query() -> None:
    for n in range(120):
        for sinks, window, block, sliding in ((0, 0, 1, 1), (4, 8, 1, 30), (4, 32, 32, 40), (3, 5, 16, 7)):
            end = dropped_end(n, sinks, window, block, sliding)
            assert sinks <= end <= max(packed_end(n, sinks, window, block), sinks) and (end - sinks) % block == 0
            assert end == sinks or end <= first_seen(n + 1, sliding)
            assert dropped_end(n, sinks, window, block, 10**6) == sinks
    assert packed_reads(0, 10, 0, 0, 1, 3) == 1 + 2 + 3 * 8
    assert packed_reads(0, 10, 0, 2, 1, 3) == 8


def test_plain_attention_slides() -> None:
    q, k, v = inputs(50)
    assert torch.equal(causal_mask(4, 2).int(), torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]))
    got = causal_attention(q, k, v, SCALE, sliding=9)
    alone = causal_attention(q[:, 41:], k[:, 41:], v[:, 41:], SCALE)
    assert ratio(got[:, -1], alone[:, -1]) < 1e-12
    assert torch.equal(causal_attention(q, k, v, SCALE, sliding=50), causal_attention(q, k, v, SCALE))
    assert ratio(causal_attention(q, k, v, SCALE, softcap=1e6), causal_attention(q, k, v, SCALE)) < 1e-9
