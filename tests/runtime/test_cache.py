"""The cache against a definition that knows no chunks: every query computed from scratch, token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvkernels.quantize import dequantize, dequantize_cubic, quantize, quantize_cubic
from kvkernels.spec import QuantSpec
from kvrun.cache import KVCache, head_matrix
from kvrun.cache_types import plan_for
from kvrun.config import RopeStyle
from kvrun.errors import KvError
from kvrun.layers import Rope
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.visibility import n_packed, packed_end

N_HEAD, N_KV, D_K, D_V = 6, 2, 32, 24
GEOMETRY = (LayerGeometry(N_KV, D_K, D_V), LayerGeometry(N_KV, D_K, D_V))
SCALE = D_K**-0.5


def transforms(seed: int, d: int, keys: bool) -> HeadTransform:
    rng = np.random.default_rng(seed)
    return HeadTransform(
        order=rng.permutation(d).astype(np.uint16),
        hadamard=8,
        offset=rng.standard_normal(d).astype(np.float32) if keys else None,
    )


def plan(k: QuantSpec, v: QuantSpec, sinks: int, window: int, transformed: bool = True) -> CachePlan:
    def heads(spec: QuantSpec, d: int, keys: bool) -> tuple[HeadPlan, ...]:
        # Head 0 is transformed and clipped, head 1 is not: both must come out right side by side.
        first = HeadPlan(spec, transforms(3, d, keys), 0.95) if transformed and spec.quantized else HeadPlan(spec)
        return (first, HeadPlan(spec))

    layers = range(len(GEOMETRY))
    return CachePlan(
        GEOMETRY,
        tuple(heads(k, D_K, True) for _ in layers),
        tuple(heads(v, D_V, False) for _ in layers),
        sinks,
        window,
    )


def offset_at(head: HeadPlan, n: int, rope: Rope | None) -> torch.Tensor | None:
    """What is subtracted from each of a head's keys, float64 [n, d]."""
    if head.transform.offset is None:
        return None
    offset = torch.from_numpy(head.transform.offset).double().expand(n, -1)
    if not head.transform.rotating:
        return offset
    assert rope is not None
    return rope(offset[None].contiguous(), torch.arange(n))[0]


def stored(x: torch.Tensor, head: HeadPlan, d: int, rope: Rope | None = None) -> torch.Tensor:
    """What one head's tokens [n, d] look like in the cache, in full precision (f16)."""
    offset = offset_at(head, len(x), rope)
    if offset is not None:
        x = x - offset
    t = head_matrix(head.transform, d)
    return (x if t is None else x @ t.T).half()


def restored(x: torch.Tensor, head: HeadPlan, d: int) -> torch.Tensor:
    """All tokens of one head [n, d] (f16, a whole number of blocks) quantized and restored."""
    if not head.spec.quantized:
        return x.double()
    clip = torch.tensor([head.clip]) if head.clip != 1 else None
    if head.spec.code == "cubic":
        return dequantize_cubic(*quantize_cubic(x[None], head.spec, clip), head.spec, torch.float64)[0]
    codes, scale, minimum = quantize(x[None], head.spec, clip)
    return dequantize(codes, scale, minimum, head.spec, torch.float64)[0]


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: CachePlan, rope: Rope | None = None
) -> torch.Tensor:
    """Attention outputs [n_head, n, d_v], one query and one head at a time, straight from the rule."""
    n = q.shape[1]
    out = torch.empty(N_HEAD, n, D_V, dtype=torch.float64)

    def view(x: torch.Tensor, head: HeadPlan, d: int, t: int) -> torch.Tensor:
        full = stored(x, head, d, rope)
        end = packed_end(t + 1, p.sinks, p.window, head.spec.block)
        seen = full[: t + 1].double()
        if end > p.sinks:
            seen[p.sinks : end] = restored(full[p.sinks : end], head, d)
        return seen

    for h in range(N_HEAD):
        kv = h // (N_HEAD // N_KV)
        head_k, head_v = p.k[0][kv], p.v[0][kv]
        t_k, t_v = head_matrix(head_k.transform, D_K), head_matrix(head_v.transform, D_V)
        for t in range(n):
            query = q[h, t] if t_k is None else torch.linalg.inv(t_k).T @ q[h, t]
            scores = view(k[kv], head_k, D_K, t) @ query
            offset = offset_at(head_k, t + 1, rope)
            if offset is not None and head_k.transform.rotating:
                scores += offset @ q[h, t]
            weights = torch.softmax(scores * SCALE, 0)
            o = weights @ view(v[kv], head_v, D_V, t)
            out[h, t] = o if t_v is None else torch.linalg.inv(t_v) @ o
    return out


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: CachePlan, chunks: list[int], rope: Rope | None = None
) -> tuple[torch.Tensor, KVCache]:
    cache = KVCache(p, q.shape[1], q.dtype, rope_of=None if rope is None else lambda il: rope)
    parts, at = [], 0
    for size in chunks:
        piece = slice(at, at + size)
        parts.append(cache.attend(0, q[:, piece], k[:, piece], v[:, piece], SCALE))
        cache.attend(1, q[:, piece], k[:, piece], v[:, piece], SCALE)
        cache.commit(size)
        at += size
    return torch.cat(parts, 1), cache


def inputs(n: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    make = lambda h, d: torch.randn(h, n, d, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(N_HEAD, D_K) * 2, make(N_KV, D_K), make(N_KV, D_V)


def cut(n: int, size: int) -> list[int]:
    return [min(size, n - at) for at in range(0, n, size)]


SPECS = {
    "f16": (QuantSpec(16), QuantSpec(16)),
    "4 bits": (QuantSpec(4, 32), QuantSpec(4, 8)),
    "3 and 2 bits": (QuantSpec(3, 8), QuantSpec(2, 24)),
    "5 and 6 bits": (QuantSpec(5, 16), QuantSpec(6, 24)),
    "cubic": (QuantSpec(2, 32, code="cubic"), QuantSpec(5, 8, code="cubic")),
    "8 bits and f16": (QuantSpec(8, 32), QuantSpec(16)),
    "KIVI": (QuantSpec(2, 32, "channel"), QuantSpec(2, 8)),
    "channels of 16": (QuantSpec(4, 16, "channel"), QuantSpec(3, 16, "channel")),
}


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 32), (3, 0), (0, 7), (5, 13), (200, 0), (0, 200)])
@pytest.mark.parametrize("name", SPECS)
def test_every_way_to_cut_the_text_gives_the_definition(name: str, sinks: int, window: int) -> None:
    n = 83
    q, k, v = inputs(n)
    p = plan(*SPECS[name], sinks, window)
    expected = definition(q, k, v, p)
    for chunks in (cut(n, 1), cut(n, 7), cut(n, 64), [n], [1, 50, 2, 30]):
        got, cache = run(q, k, v, p, chunks)
        error = ((got - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()
        assert error < 1e-12, f"{name} S={sinks} W={window} chunks {chunks[:3]}..: RMS ratio {error:.2e}"
        side = p.k[0][0].spec if p.k[0][0].spec.quantized else p.v[0][0].spec
        reads = sum(n_packed(t + 1, sinks, window, side.block) for t in range(n)) * len(GEOMETRY)
        assert cache.packed_read == (reads if side.quantized else 0)


def rotating(p: CachePlan) -> CachePlan:
    """The plan with a rotating offset on the keys of head 0, and a constant one on those of head 1."""

    def turn(heads: tuple[HeadPlan, ...]) -> tuple[HeadPlan, ...]:
        offset = np.random.default_rng(8).standard_normal(D_K).astype(np.float32) * 2
        constant = HeadTransform(offset=offset[::-1].copy())
        return replace(heads[0], transform=replace(heads[0].transform, rotating=True)), HeadPlan(
            heads[1].spec, constant
        )

    return replace(p, k=tuple(map(turn, p.k)))


@pytest.mark.parametrize("n_rot", [D_K, 20])
@pytest.mark.parametrize("style", ["interleaved", "neox"])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (5, 13)])
@pytest.mark.parametrize("name", ["4 bits", "KIVI"])
def test_a_rotating_offset_gives_the_definition(
    name: str, sinks: int, window: int, style: RopeStyle, n_rot: int
) -> None:
    n, rope = 83, Rope(n_rot, 500.0, style)
    q, k, v = inputs(n)
    p = rotating(plan(*SPECS[name], sinks, window))
    assert p.rotates
    expected = definition(q, k, v, p, rope)
    for chunks in (cut(n, 1), cut(n, 7), [n], [1, 50, 2, 30]):
        got, _ = run(q, k, v, p, chunks, Rope(n_rot, 500.0, style))
        error = ((got - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()
        assert error < 1e-12, f"{name} S={sinks} W={window} chunks {chunks[:3]}..: RMS ratio {error:.2e}"


def test_a_rotating_offset_changes_rounding_alone_and_costs_no_bytes() -> None:
    n, rope = 60, Rope(D_K, 500.0, "neox")
    q, k, v = inputs(n)
    mean = 20 * torch.randn(N_KV, 1, D_K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    k = k + rope(mean.expand(-1, n, -1).contiguous(), torch.arange(n))

    def plan_with(transform: HeadTransform, spec: QuantSpec) -> CachePlan:
        keys = tuple(
            HeadPlan(
                spec,
                replace(transform, offset=mean[h, 0].numpy().astype(np.float32)) if transform.rotating else transform,
            )
            for h in range(N_KV)
        )
        return CachePlan(GEOMETRY, (keys, keys), tuple((HeadPlan(QuantSpec(16)),) * N_KV for _ in GEOMETRY))

    turns = HeadTransform(rotating=True, offset=np.zeros(D_K, np.float32))
    exact, _ = run(q, k, v, plan_with(HeadTransform(), QuantSpec(16)), [n])
    held, _ = run(q, k, v, plan_with(turns, QuantSpec(16)), [n], rope)
    assert (held - exact).abs().max() < 0.03 * exact.abs().max()  # f16 of keys that the offset makes large or small

    plain, cache = run(q, k, v, plan_with(HeadTransform(), QuantSpec(4, 32)), [n])
    turned, cache_turned = run(q, k, v, plan_with(turns, QuantSpec(4, 32)), [n], rope)
    assert cache_turned.n_bytes == cache.n_bytes
    assert (turned - exact).pow(2).mean() < 0.05 * (plain - exact).pow(2).mean()


def test_a_rotating_offset_needs_the_models_rope() -> None:
    p = rotating(plan(*SPECS["4 bits"], 0, 0))
    with pytest.raises(ValueError, match="RoPE"):
        KVCache(p, 8)
    with pytest.raises(ValueError, match="needs an offset"):
        HeadTransform(rotating=True)


def test_mixed_widths_and_axes_in_one_layer() -> None:
    n = 75
    q, k, v = inputs(n)
    p = plan(QuantSpec(4, 32), QuantSpec(4, 8), 2, 5)
    mixed = (HeadPlan(QuantSpec(2, 8)), HeadPlan(QuantSpec(16)))
    p = replace(p, v=(mixed, mixed))
    expected = definition(q, k, v, p)
    for size in (1, 9, 75):
        got, _ = run(q, k, v, p, cut(n, size))
        assert torch.allclose(got, expected, atol=1e-12)


def test_scores_in_slices_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 90
    q, k, v = inputs(n)
    p = plan(QuantSpec(4, 32, "channel"), QuantSpec(4, 8), 4, 9)
    whole, _ = run(q, k, v, p, [n])
    monkeypatch.setattr("kvrun.cache.SCORE_BUDGET_BYTES", 20_000)
    sliced, _ = run(q, k, v, p, [n])
    assert torch.allclose(whole, sliced, atol=1e-13)


@pytest.mark.parametrize("name", SPECS)
def test_size_is_what_is_allocated_and_depends_on_nothing_else(name: str) -> None:
    n = 96
    q, k, v = inputs(n)
    p = plan(*SPECS[name], 4, 32)
    _, by_one = run(q, k, v, p, cut(n, 1))
    _, at_once = run(q, k, v, p, [n])
    tensors = set()
    for side in (s for layer in by_one.layers for s in layer):
        buffers = [side.sink_part, side.recent]
        for band in side.store.bands:
            buffers += [t for t in (band.codes, band.scale, band.minimum) if t is not None]
        tensors |= {(t.data_ptr(), t.untyped_storage().nbytes()) for t in buffers if t.numel()}
    assert by_one.n_bytes == at_once.n_bytes == sum(size for _, size in tensors)
    assert by_one.bits_per_value == pytest.approx(by_one.n_bytes * 8 / (n * 2 * N_KV * (D_K + D_V)))


def test_four_bits_without_window_cost_what_they_say() -> None:
    geometry = [LayerGeometry(2, 64, 64)] * 3
    p = plan_for(geometry, "kv4", "kv4", recipe=None, sinks=0, window=0)
    assert KVCache(p, 128).bits_per_value == 4.5
    p = plan_for(geometry, "kv4", "kv4", recipe=None)
    assert (p.sinks, p.window) == (4, 32)
    assert KVCache(p, 128).bits_per_value == pytest.approx(4.5 + 36 * (16 - 4.5) / 128)


def test_rewinding_gives_what_never_happened() -> None:
    n = 120
    q, k, v = inputs(n)
    p = plan(QuantSpec(4, 32, "channel"), QuantSpec(3, 8), 3, 10)
    straight, _ = run(q, k, v, p, [50, 70])
    cache = KVCache(p, n, torch.float64)

    def step(tensors: tuple[torch.Tensor, ...], piece: slice) -> torch.Tensor:
        out = [cache.attend(il, *(t[:, piece] for t in tensors), SCALE) for il in range(2)]
        cache.commit(piece.stop - piece.start)
        return out[0]

    step((q, k, v), slice(0, 50))
    mark = cache.mark()
    step((q * 0.5, k + 1, v - 1), slice(50, 110))  # a branch that packs other tokens over the same place
    cache.rewind(mark)
    assert torch.equal(step((q, k, v), slice(50, n)), straight[:, 50:])
    with pytest.raises(ValueError, match="ahead"):
        cache.clear()
        cache.rewind(mark)


def test_an_interrupted_chunk_leaves_the_cache_as_it_was() -> None:
    n = 90
    q, k, v = inputs(n)
    p = plan(QuantSpec(4, 32), QuantSpec(4, 8), 2, 6)
    straight, _ = run(q, k, v, p, [40, 50])
    cache = KVCache(p, n, torch.float64)
    for il in range(2):
        cache.attend(il, q[:, :40], k[:, :40], v[:, :40], SCALE)
    cache.commit(40)
    cache.attend(0, q[:, 40:80] * 2, k[:, 40:80] - 1, v[:, 40:80], SCALE)  # layer 1 never ran: no commit
    again = cache.attend(0, q[:, 40:], k[:, 40:], v[:, 40:], SCALE)
    assert torch.equal(again, straight[:, 40:])


def test_full_context_and_numbers_that_do_not_fit_are_errors() -> None:
    q, k, v = inputs(10)
    cache = KVCache(plan(QuantSpec(4, 32), QuantSpec(4, 8), 0, 0), 8, torch.float64)
    with pytest.raises(KvError, match="larger -c"):
        cache.attend(0, q, k, v, SCALE)
    bad = k[:, :4].clone()
    bad[0, 1, 2] = torch.nan
    with pytest.raises(KvError, match="not a number"):
        cache.attend(0, q[:, :4], bad, v[:, :4], SCALE)


def test_a_head_size_that_cannot_be_packed_is_said_to_be_one() -> None:
    odd = (LayerGeometry(2, 64, 50),)
    with pytest.raises(KvError, match="kv4 cannot store this model: head size 50 is not a multiple of 8; use f16"):
        plan_for(odd, "f16", "kv4", recipe=None)
    assert not plan_for(odd, "f16", "f16", recipe=None).quantizes


def test_names_of_cache_types() -> None:
    with pytest.raises(KvError, match=r"format of llama\.cpp"):
        plan_for(GEOMETRY, "q4_0", "f16", recipe=None)
    with pytest.raises(KvError, match="kvconv calibrate"):
        plan_for(GEOMETRY, "auto", "f16", recipe=None)
    with pytest.raises(KvError, match="choose one of"):
        plan_for(GEOMETRY, "kv7", "f16", recipe=None)
    p = plan_for(GEOMETRY, "f16", "f16", recipe=None)
    assert not p.quantizes and (p.sinks, p.window) == (0, 0)
