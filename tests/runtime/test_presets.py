"""The systems that the field compares with: what each stores, and that both paths through it are one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkernels.spec import QuantSpec
from kvrun.cache import KVCache
from kvrun.cache_types import EMULATED_TYPES, plan_for
from kvrun.engine import Engine
from kvrun.errors import KvError
from kvrun.evaluation.verify import verify_paths
from kvrun.models import load_model
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.presets import preset_names, preset_plan
from kvrun.recipe import Provenance, Recipe

GEOMETRY = (LayerGeometry(2, 128, 64), LayerGeometry(3, 64, 64))
NAMES = ("f16", "had-v2-kivi4", "kivi2", "kivi4", "quarot", "skvq", "skvq-safe")


def ordered(geometry: tuple[LayerGeometry, ...], method: str) -> Recipe:
    """A recipe with a random channel order in every head, as `kvconv skvq` writes it."""
    rng = np.random.default_rng(1)

    def heads(dims: list[tuple[int, int]]) -> tuple[tuple[HeadPlan, ...], ...]:
        return tuple(
            tuple(
                HeadPlan(QuantSpec(2, 16), HeadTransform(order=rng.permutation(dim).astype(np.uint16)), 0.96)
                for _ in range(n)
            )
            for n, dim in dims
        )

    scores = tuple((0.0,) * shape.n_head_kv for shape in geometry)
    made = Provenance("kvconv 0", "t", "0" * 64, 1, 8, 8, 0, method, scores, scores, scores, scores)
    return Recipe(
        "0" * 64, "llama", geometry,
        heads([(g.n_head_kv, g.head_dim_k) for g in geometry]), heads([(g.n_head_kv, g.head_dim_v) for g in geometry]),
        5, 128, made,
    )  # fmt: skip


def plan_of(name: str, geometry: tuple[LayerGeometry, ...]) -> CachePlan:
    if name in EMULATED_TYPES:
        return plan_for(geometry, name, name, recipe=None)
    return preset_plan(name, geometry, ordered(geometry, name) if name.startswith("skvq") else None)


def test_all_are_found() -> None:
    assert preset_names() == NAMES


@pytest.mark.parametrize(
    ("name", "k", "v", "bits", "sinks", "window"),
    [
        ("f16", QuantSpec(16), QuantSpec(16), 16.0, 0, 0),
        ("kivi2", QuantSpec(2, 32, "channel"), QuantSpec(2, 32), 3.0, 0, 128),
        ("kivi4", QuantSpec(4, 32, "channel"), QuantSpec(4, 32), 5.0, 0, 128),
        ("quarot", QuantSpec(4, 128), QuantSpec(4, 64), 4.0 + (32 / 128 * 256 + 32 / 64 * 512) / 768, 0, 0),
        ("had-v2-kivi4", QuantSpec(4, 32, "channel"), QuantSpec(2, 32), 3 + 2 * 448 / 768, 0, 128),
    ],
)
def test_settings_and_sizes(name: str, k: QuantSpec, v: QuantSpec, bits: float, sinks: int, window: int) -> None:
    plan = plan_of(name, GEOMETRY)
    assert (plan.k[0][0].spec, plan.v[0][0].spec, plan.sinks, plan.window) == (k, v, sinks, window)
    assert (plan.type_k, plan.type_v) == (name, name)
    packed = sum(side.store.n_bytes for layer in KVCache(plan, 1024 + window + sinks).layers for side in layer)
    assert packed * 8 / (1024 * (2 * 192 + 3 * 128)) == pytest.approx(bits)


def test_rotations_and_clips() -> None:
    quarot, mixed = plan_of("quarot", GEOMETRY), plan_of("had-v2-kivi4", GEOMETRY)
    assert [h.transform.hadamard for h in (quarot.k[0][0], quarot.v[0][0], quarot.k[1][0])] == [128, 64, 64]
    assert quarot.k[0][0].clip == 0.95
    assert mixed.v[0][0].transform.hadamard == 64 and mixed.k[0][0].transform.is_identity


def test_skvq_takes_orders_from_a_recipe_of_its_method() -> None:
    recipe = ordered(GEOMETRY, "skvq")
    plan = preset_plan("skvq", GEOMETRY, recipe)
    assert (plan.k, plan.v, plan.sinks, plan.window, plan.recipe) == (recipe.k, recipe.v, 5, 128, recipe.digest())
    with pytest.raises(KvError, match="there is no recipe"):
        preset_plan("skvq", GEOMETRY)
    with pytest.raises(KvError, match=r"`kvconv skvq --safe`, this one was made for skvq"):
        preset_plan("skvq-safe", GEOMETRY, recipe)


def test_errors_are_one_line_with_advice() -> None:
    with pytest.raises(KvError, match="choose one of f16, had-v2-kivi4"):
        preset_plan("kivi3", GEOMETRY)
    with pytest.raises(KvError, match="kivi4 cannot store this model: head size 36"):
        preset_plan("kivi4", (LayerGeometry(1, 36, 36),))


def test_emulated_types_are_stored_as_llama_cpp_stores_them() -> None:
    geometry = [LayerGeometry(2, dim, dim) for dim in (64, 96, 128, 192, 256)]
    for name, bits in (("emu-q4_0", 4.5), ("emu-q8_0", 8.5)):
        plan = plan_for(geometry, name, name, recipe=None)
        assert (plan.sinks, plan.window) == (0, 0)
        assert KVCache(plan, 64).bits_per_value == bits
        assert [layer[0].transform.hadamard for layer in plan.k] == [64, 0, 128, 64, 256]
        assert [layer[0].transform.hadamard for layer in plan.v] == [64, 0, 64, 64, 64]
    with pytest.raises(KvError, match="multiple of 32 channels"):
        plan_for([LayerGeometry(1, 80, 80)], "emu-q4_0", "f16", recipe=None)


def test_a_head_size_that_cannot_be_packed_is_said_to_be_one() -> None:
    with pytest.raises(KvError, match="preset quarot cannot store this model: head size 50"):
        preset_plan("quarot", (LayerGeometry(1, 50, 50),), None)


@pytest.mark.parametrize("name", [*NAMES, *EMULATED_TYPES])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_parallel_and_decode_are_one_in_float64(name: str, arch: str, tiny_model: Callable[..., Path]) -> None:
    """Past the window and several packed blocks."""
    engine = Engine(load_model(tiny_model(arch, n_layer=2), dtype=torch.float64), dtype=torch.float64)
    plan = plan_of(name, engine.model.config.geometry)
    tokens = np.random.default_rng(0).integers(3, engine.model.config.n_vocab, 230).tolist()
    found = verify_paths(engine, plan, tokens)
    assert found.decisive and found.max_log_prob < 1e-9


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", [*NAMES, *EMULATED_TYPES])
@pytest.mark.parametrize("which", ["smollm2", "qwen"])
def test_parallel_and_decode_are_one_on_real_models(name: str, which: str, request: pytest.FixtureRequest) -> None:
    """The window is cut to 16 tokens where the preset has 128, so that 80 tokens go well past a packed block."""
    from kvrun.evaluation.texts import default_text
    from kvrun.tokenizer import Tokenizer

    path = request.getfixturevalue(which)
    engine = Engine(load_model(path, dtype=torch.float64), dtype=torch.float64)
    plan = plan_of(name, engine.model.config.geometry)
    plan = replace(plan, window=min(plan.window, 16))
    found = verify_paths(engine, plan, Tokenizer(path).encode(default_text().text[:2000])[:80])
    assert found.max_log_prob < 1e-9
