"""Faults that published figures were made with, planted in the cache: the tool's own guard must refuse each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkernels.spec import QuantSpec
from kvkernels.store import PackedStore
from kvrun import cache
from kvrun.cache_types import plan_for
from kvrun.config import RopeStyle
from kvrun.engine import Engine
from kvrun.errors import MeasurementError
from kvrun.evaluation.perplexity import Run, run_plans
from kvrun.evaluation.probe import check_cache_obeys
from kvrun.evaluation.windows import Windows
from kvrun.layers import Rope
from kvrun.models import load_model
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry

N_CTX = 64


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Engine:
    return Engine(load_model(tiny_model("llama", n_layer=2)))


def transformed(geometry: tuple[LayerGeometry, ...], spec: QuantSpec | None = None) -> CachePlan:
    """Every head ordered and rotated, keys with an offset: 4 sinks, a window of 16."""
    rng = np.random.default_rng(0)

    def head(dim: int, keys: bool) -> HeadPlan:
        offset = rng.standard_normal(dim).astype(np.float32) if keys else None
        transform = HeadTransform(order=rng.permutation(dim).astype(np.uint16), hadamard=8, offset=offset)
        return HeadPlan(spec or QuantSpec(3, 8), transform, 0.97)

    k = tuple(tuple(head(g.head_dim_k, True) for _ in range(g.n_head_kv)) for g in geometry)
    v = tuple(tuple(head(g.head_dim_v, False) for _ in range(g.n_head_kv)) for g in geometry)
    return CachePlan(geometry, k, v, 4, 16, "recipe", "recipe")


def run(engine: Engine) -> Run:
    tokens = np.random.default_rng(3).integers(3, engine.model.config.n_vocab, (1, N_CTX))
    (done,) = run_plans(engine, Windows(tokens), [transformed(engine.model.config.geometry)])
    return done


def test_a_right_cache_passes(engine: Engine) -> None:
    run(engine).check()


def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store keeps what it was given beside the codes and returns that: the quantizer runs and changes nothing."""
    kept: dict[int, torch.Tensor] = {}
    write = PackedStore.write

    def keep(self: PackedStore, start: int, x: torch.Tensor) -> None:
        write(self, start, x)
        whole = kept.setdefault(id(self), torch.zeros(self.n_head, self.capacity, self.head_dim))
        whole[:, start : start + x.shape[1]] = x

    monkeypatch.setattr(PackedStore, "write", keep)
    monkeypatch.setattr(PackedStore, "read", lambda self, stop, dtype: kept[id(self)][:, :stop].to(dtype))


def applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a converter has folded the rotation into the weights and the cache does it again."""
    once = cache.apply
    monkeypatch.setattr(cache, "apply", lambda x, t, offset=None: once(once(x, t, offset), t))


def order_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the values is left in the stored order."""
    monkeypatch.setattr(cache.LayerSide, "from_sum", lambda self, o: o)


def queries_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries meet stored keys in the model's order."""
    monkeypatch.setattr(cache.LayerSide, "to_queries", lambda self, q: q)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are packed as soon as they arrive."""
    end = cache.packed_end
    monkeypatch.setattr(cache, "packed_end", lambda n, sinks, window, block: end(n, sinks, 0, block))
    monkeypatch.setattr(cache, "n_packed", lambda n, sinks, window, block: max(n - sinks, 0) // block * block)


STORAGES = (QuantSpec(8, 32), QuantSpec(4, 16, "channel"), QuantSpec(4, 32, code="q4_0"))
FAULTS = (full_precision, applied_twice, order_not_undone, queries_not_ordered, no_window)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_tool_refuses_figures_of_a_faulty_cache(
    fault: Callable[[pytest.MonkeyPatch], None], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    done = run(engine)
    with pytest.raises(MeasurementError, match="refused"):
        done.check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize(
    "spec",
    [QuantSpec(8, 32), QuantSpec(4, 16, "channel"), QuantSpec(4, 32, code="q4_0")],
    ids=["8 bits", "KIVI", "q4_0"],
)
def test_the_probe_alone_sees_it_whatever_the_storage(
    fault: Callable[[pytest.MonkeyPatch], None], spec: QuantSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters of a faulty cache may be right; what it returns is not."""
    plan = transformed((LayerGeometry(2, 64, 32),), spec)
    check_cache_obeys(plan, 512)
    fault(monkeypatch)
    with pytest.raises(MeasurementError, match=r"does not compute what its plan says \(layer 0"):
        check_cache_obeys(plan, 512)


@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_a_right_cache_with_a_rotating_offset_passes(style: RopeStyle) -> None:
    geometry = (LayerGeometry(2, 64, 32),)
    plan = transformed(geometry, QuantSpec(4, 32))
    turning = [replace(h, transform=replace(h.transform, rotating=True)) for h in plan.k[0]]
    rope = Rope(64, 500.0, style)
    check_cache_obeys(replace(plan, k=(tuple(turning),)), 128, lambda il: rope)


@pytest.mark.parametrize("name", ["kv8", "kv5", "kv4", "kv2", "kv1", "emu-q4_0", "emu-q8_0"])
@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (4, 32), (0, 700), (700, 3)])
def test_right_caches_of_all_types_pass(name: str, sinks: int, window: int) -> None:
    geometry = (LayerGeometry(3, 64, 128), LayerGeometry(1, 128, 64))
    check_cache_obeys(plan_for(geometry, name, name, recipe=None, sinks=sinks, window=window), 512)
    one_side = plan_for(geometry, "f16", name, recipe=None, sinks=sinks, window=window)
    check_cache_obeys(one_side, 512)
    check_cache_obeys(replace(one_side, k=one_side.k[:1] + transformed(geometry).k[1:]), 512)
