"""The recipe format: what is written is read back, and whatever does not add up is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkernels.spec import QuantSpec
from kvrun.cache_types import plan_for
from kvrun.errors import RecipeError
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import write_metadata_file
from kvrun.plan import CachePlan, HeadPlan, HeadTransform, LayerGeometry
from kvrun.recipe import Provenance, Recipe, find_recipe, recipe_source, sidecar_metadata, sidecar_path

GEOMETRY = (LayerGeometry(2, 64, 32), LayerGeometry(1, 64, 32))


def provenance(geometry: tuple[LayerGeometry, ...], seed: int = 0) -> Provenance:
    rng = np.random.default_rng(seed)
    scores = [tuple(tuple(rng.random(layer.n_head_kv).tolist()) for layer in geometry) for _ in range(4)]
    return Provenance("kvconv test", "text.txt", "ab" * 32, 8, 512, 4096, seed, "roundtrip", *scores)


def plain_recipe(fingerprint: str = "0" * 64, **changes: Any) -> Recipe:
    """Two layers: an offset with a rotation, a bare order, an 8-bit head; values in 3 bits, one of them f16."""
    rng = np.random.default_rng(5)
    order = rng.permutation(64).astype(np.uint16)
    offset = rng.standard_normal(64).astype(np.float32)
    k = (
        (
            HeadPlan(QuantSpec(4, 64), HeadTransform(hadamard=64, offset=offset)),
            HeadPlan(QuantSpec(2, 32), HeadTransform(order=order), clip=0.95),
        ),
        (HeadPlan(QuantSpec(8, 64)),),
    )
    v = ((HeadPlan(QuantSpec(3, 32)), HeadPlan(QuantSpec(3, 32))), (HeadPlan(QuantSpec(16)),))
    parts: dict[str, Any] = {
        "fingerprint": fingerprint,
        "arch": "llama",
        "geometry": GEOMETRY,
        "k": k,
        "v": v,
        "sinks": 4,
        "window": 32,
        "provenance": provenance(GEOMETRY),
    }
    return Recipe(**(parts | changes))


def written(path: Path, metadata: dict[str, Any]) -> GGUFFile:
    write_metadata_file(path, {"general.architecture": "llama", **metadata}, force=True)
    return GGUFFile(path)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    def head(dim: int, side: str) -> HeadPlan:
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        bits = draw(st.sampled_from((2, 3, 4, 5, 6, 8, 16)))
        axis = draw(st.sampled_from(("token", "channel")))
        group = draw(st.sampled_from([g for g in (8, 16, 32, dim) if dim % g == 0])) if axis == "token" else 32
        offset = rng.standard_normal(dim).astype(np.float32) if side == "k" and draw(st.booleans()) else None
        kinds = ("identity", "order", "hadamard", "order+hadamard", *(("matrix",) if dim <= 96 else ()))
        kind = draw(st.sampled_from(kinds))
        transform = HeadTransform(
            order=rng.permutation(dim).astype(np.uint16) if "order" in kind else None,
            hadamard=draw(st.sampled_from([b for b in (2, 8, dim & -dim) if dim % b == 0])) if "hada" in kind else 0,
            matrix=np.linalg.qr(rng.standard_normal((dim, dim)))[0] if kind == "matrix" else None,
            offset=offset,
            rotating=offset is not None and draw(st.booleans()),
        )
        cubic = axis == "token" and bits <= 6 and draw(st.booleans())
        spec = QuantSpec(16) if bits == 16 else QuantSpec(bits, group, axis, "cubic" if cubic else "uniform")
        return HeadPlan(spec, transform, draw(st.floats(0.5, 1.0)))

    geometry = tuple(
        LayerGeometry(draw(st.integers(1, 3)), draw(st.sampled_from((16, 96, 264))), draw(st.sampled_from((8, 48))))
        for _ in range(draw(st.integers(1, 3)))
    )
    return Recipe(
        fingerprint=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        arch=draw(st.sampled_from(("llama", "qwen2"))),
        geometry=geometry,
        k=tuple(tuple(head(g.head_dim_k, "k") for _ in range(g.n_head_kv)) for g in geometry),
        v=tuple(tuple(head(g.head_dim_v, "v") for _ in range(g.n_head_kv)) for g in geometry),
        sinks=draw(st.integers(0, 100)),
        window=draw(st.integers(0, 2**32 - 1)),
        provenance=provenance(geometry, seed=draw(st.integers(0, 2**64 - 1))),
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recipe=recipes())
def test_a_written_recipe_reads_back_equal(recipe: Recipe, tmp_path: Path) -> None:
    read = Recipe.from_metadata(written(tmp_path / "r.gguf", recipe.to_metadata()))
    assert read == recipe
    assert read.provenance == recipe.provenance
    assert read.plan().k[0][0].spec == recipe.k[0][0].spec
    for side in ("k", "v"):
        for a, b in zip(getattr(read, side), getattr(recipe, side), strict=True):
            for x, y in zip(a, b, strict=True):
                assert (x.spec, x.clip, x.transform.hadamard) == (y.spec, y.clip, y.transform.hadamard)
                assert x.transform.rotating == y.transform.rotating
                for part in ("order", "offset", "matrix"):
                    np.testing.assert_array_equal(getattr(x.transform, part), getattr(y.transform, part))


def test_arrays_are_flat_and_small(tmp_path: Path) -> None:
    kv = plain_recipe().to_metadata()
    assert kv["kvconv.k.bits"].dtype == np.uint8 and kv["kvconv.k.bits"].tolist() == [4, 2, 8]
    assert kv["kvconv.k.group"].dtype == np.uint16
    assert kv["kvconv.k.order"].dtype == np.uint8 and len(kv["kvconv.k.order"]) == 64  # one head of three has one
    assert kv["kvconv.k.offset"].dtype == np.float32 and len(kv["kvconv.k.offset"]) == 64
    assert "kvconv.v.offset" not in kv and "kvconv.k.matrix" not in kv
    assert all(key.startswith("kvconv.") for key in kv)


def test_matrices_are_f16_in_uint16(tmp_path: Path) -> None:
    matrix = np.linalg.qr(np.random.default_rng(0).standard_normal((32, 32)))[0]
    v = ((HeadPlan(QuantSpec(4, 32), HeadTransform(matrix=matrix)),) * 2, (HeadPlan(QuantSpec(4, 32)),))
    recipe = plain_recipe(v=v)
    stored = recipe.to_metadata()["kvconv.v.matrix"]
    assert stored.dtype == np.uint16 and len(stored) == 2 * 32 * 32
    np.testing.assert_array_equal(recipe.v[0][0].transform.matrix, matrix.astype(np.float16).astype(np.float32))
    assert Recipe.from_metadata(written(tmp_path / "r.gguf", recipe.to_metadata())) == recipe


def test_the_digest_follows_every_part() -> None:
    base = plain_recipe()
    others = [
        plain_recipe(sinks=5),
        plain_recipe(window=0),
        plain_recipe(fingerprint="1" * 64),
        plain_recipe(provenance=replace(base.provenance, seed=1)),
        plain_recipe(k=(base.k[0][::-1], base.k[1])),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 6
    assert base != others[0] and base == plain_recipe() and hash(base) == hash(plain_recipe())


def test_the_plan_carries_the_recipe() -> None:
    recipe = plain_recipe()
    plan = recipe.plan()
    assert (plan.k, plan.v, plan.sinks, plan.window, plan.recipe) == (recipe.k, recipe.v, 4, 32, recipe.digest())
    assert (recipe.plan(sinks=0, window=7).sinks, recipe.plan(sinks=0, window=7).window) == (0, 7)


def test_auto_is_the_recipe_on_the_side_that_asks_for_it() -> None:
    recipe = plain_recipe()

    def plan(type_k: str, type_v: str) -> CachePlan:
        return plan_for(recipe.geometry, type_k, type_v, recipe=recipe)

    both, keys, values, neither = plan("auto", "auto"), plan("auto", "f16"), plan("f16", "auto"), plan("kv4", "kv4")
    assert both.k is keys.k is recipe.k and both.v is values.v is recipe.v
    assert not any(head.spec.quantized for side in (keys.v, values.k) for layer in side for head in layer)
    assert [p.recipe for p in (both, keys, values, neither)] == [recipe.digest()] * 3 + [""]
    assert all(head.transform.is_identity for side in (neither.k, neither.v) for layer in side for head in layer)


def array(values: list[int] | list[float], dtype: type) -> np.ndarray:
    return np.array(values, dtype)


ORDER = list(range(64))
DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no bits": ({"k.bits": None}, "k.bits is missing"),
    "bits of a type": ({"k.bits": array([4, 2, 8], np.float32)}, "k.bits is not an array of uint8"),
    "bits short": ({"k.bits": array([4, 2], np.uint8)}, "k.bits has 2 entries for 3 heads"),
    "values short": ({"v.bits": array([4, 2], np.uint8)}, "v.bits has 2 entries, not 3"),
    "one bit": ({"k.bits": array([1, 2, 8], np.uint8)}, "1 bits is none of"),
    "seven bits": ({"k.bits": array([7, 2, 8], np.uint8)}, "bits must be one of"),
    "group that does not divide": ({"k.group": array([48, 32, 64], np.uint16)}, "group 48 does not divide"),
    "group of nothing": ({"k.group": array([0, 32, 64], np.uint16)}, "group must be positive"),
    "group of f16": ({"v.group": array([32, 32, 32], np.uint16)}, "16-bit storage has no groups"),
    "axis": ({"k.axis": array([2, 0, 0], np.uint8)}, "an axis that this version does not know"),
    "blocks": (
        {"k.axis": array([1, 1, 0], np.uint8), "k.group": array([24, 32, 64], np.uint16)},
        "do not divide one another",
    ),
    "transform": ({"k.transform": array([16, 1, 0], np.uint8)}, "a transform that this version does not know"),
    "hadamard without block": ({"k.hadamard": array([0, 0, 0], np.uint16)}, "k.hadamard does not fit"),
    "hadamard of no power": ({"k.hadamard": array([48, 0, 0], np.uint16)}, "Hadamard block 48"),
    "hadamard too large": ({"k.hadamard": array([128, 0, 0], np.uint16)}, "Hadamard block 128"),
    "order short": ({"k.order": array(ORDER[:-1], np.uint8)}, "k.order has 63 entries, not 64"),
    "order missing": ({"k.order": None}, "k.order is missing"),
    "order twice": ({"k.order": array([0, *ORDER[:-1]], np.uint8)}, "not a permutation"),
    "order too far": ({"k.order": array([64, *ORDER[1:]], np.uint8)}, "not a permutation"),
    "order unused": ({"v.order": array(ORDER, np.uint8)}, "no head uses it"),
    "offset NaN": ({"k.offset": np.full(64, np.nan, np.float32)}, "64 finite numbers"),
    "offset long": ({"k.offset": np.zeros(65, np.float32)}, "k.offset has 65 entries, not 64"),
    "offset of values": (
        {"v.transform": array([8, 0, 0], np.uint8), "v.offset": np.zeros(32, np.float32)},
        "values cannot have an offset",
    ),
    "clip NaN": ({"k.clip": array([np.nan, 1, 1], np.float32)}, "clip nan is outside"),
    "clip of nothing": ({"k.clip": array([0, 1, 1], np.float32)}, "clip 0.0 is outside"),
    "clip above one": ({"v.clip": array([1.5, 1, 1], np.float32)}, "clip 1.5 is outside"),
    "matrix singular": (
        {"v.transform": array([4, 0, 0], np.uint8), "v.matrix": np.ones(32 * 32, np.float16).view(np.uint16)},
        "cannot be inverted",
    ),
    "matrix infinite": (
        {"v.transform": array([4, 0, 0], np.uint8), "v.matrix": np.full(32 * 32, np.inf, np.float16).view(np.uint16)},
        "finite numbers",
    ),
    "matrix and block": (
        {
            "v.transform": array([6, 0, 0], np.uint8),
            "v.hadamard": array([2, 0, 0], np.uint16),
            "v.matrix": np.eye(32, dtype=np.float16).ravel().view(np.uint16),
        },
        "takes no order and no Hadamard block",
    ),
    "geometry": ({"n_head_kv": array([2, 2], np.uint32)}, "k.bits has 3 entries for 4 heads"),
    "geometry huge": ({"n_head_kv": array([2**32 - 1, 4], np.uint32)}, "has 3 entries for 4294967299 heads"),
    "head size 0": ({"head_dim_k": array([0, 64], np.uint32)}, "a head size is outside"),
    "head size huge": ({"head_dim_v": array([2**31, 32], np.uint32)}, "a head size is outside"),
    "layers": ({"head_dim_k": array([64], np.uint32)}, "head_dim_k has 1 entries, not 2"),
    "sinks": ({"sinks": "four"}, "sinks is not a whole number"),
    "fingerprint": ({"fingerprint": 7}, "fingerprint is not a string"),
    "version 0": ({"version": 0}, "its version is 0"),
    "version as text": ({"version": "1"}, "version is not a whole number"),
    "scores": ({"k.score_before": array([0.1, 0.2], np.float32)}, "k.score_before has 2 entries, not 3"),
    "score NaN": ({"v.score_after": np.full(3, np.nan, np.float32)}, "not a number"),
    "score negative": ({"v.score_after": np.full(3, -1, np.float32)}, "negative"),
    "a changed offset": ({"k.offset": np.ones(64, np.float32)}, "checksum"),
    "a changed text": ({"calibration.text_name": "other"}, "checksum"),
    "no checksum": ({"sha256": None}, "sha256 is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    changes, why = DAMAGE[name]
    metadata = plain_recipe().to_metadata() | {f"kvconv.{key}": value for key, value in changes.items()}
    file = written(tmp_path / "bad.gguf", {key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(RecipeError, match=r"^bad\.gguf: the recipe is damaged") as raised:
        Recipe.from_metadata(file)
    assert why in str(raised.value) and "\n" not in str(raised.value)
    assert "kvconv calibrate" in str(raised.value)


VALUES = st.one_of(
    st.none(),
    st.integers(0, 2**64 - 1),
    st.booleans(),
    st.floats(width=32),
    st.text("kv0\n", max_size=8),
    st.builds(
        lambda values, dtype: np.array(values).astype(dtype),
        st.lists(st.integers(0, 255), max_size=130),
        st.sampled_from((np.uint8, np.uint16, np.int32, np.uint32, np.float32, np.uint64)),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_under_any_key_is_a_recipe_or_an_error_of_one_line(data: st.DataObject, tmp_path: Path) -> None:
    base = plain_recipe().to_metadata()
    keys = st.sampled_from([*base, "kvconv.k.matrix", "kvconv.v.order", "kvconv.v.offset"])
    changes = data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))
    file = written(tmp_path / "any.gguf", {k: v for k, v in (base | changes).items() if v is not None})
    try:
        assert Recipe.from_metadata(file) == plain_recipe()
    except RecipeError as error:
        assert "\n" not in str(error) and "any.gguf" in str(error)


def test_the_stock_reader_reads_it(tmp_path: Path) -> None:
    import gguf

    recipe = plain_recipe()
    write_metadata_file(tmp_path / "r.gguf", sidecar_metadata(recipe, "m"))
    reader = gguf.GGUFReader(tmp_path / "r.gguf")
    for key, value in recipe.to_metadata().items():
        stored = reader.fields[key].contents()
        assert stored == (value.tolist() if isinstance(value, np.ndarray) else value), key


def test_a_newer_version_is_refused_as_such(tmp_path: Path) -> None:
    metadata = plain_recipe().to_metadata()
    file = written(tmp_path / "new.gguf", {"kvconv.version": 4, "kvconv.something": "else"} | {"general.name": "x"})
    with pytest.raises(RecipeError, match=r"format version 4.*upgrade kvconv"):
        Recipe.from_metadata(file)
    with pytest.raises(RecipeError, match="holds no recipe"):
        Recipe.from_metadata(written(tmp_path / "none.gguf", {}))
    # Keys that this version does not know, at the same version, are left alone.
    assert Recipe.from_metadata(written(tmp_path / "more.gguf", metadata | {"kvconv.note": "hello"})) == plain_recipe()


@pytest.mark.parametrize(
    "changes",
    [
        {"sinks": -1},
        {"window": 2**32},
        {"geometry": GEOMETRY[:1]},
        {"k": ((HeadPlan(QuantSpec(4, 64)),), (HeadPlan(QuantSpec(4, 64)),))},
        {"v": ((HeadPlan(QuantSpec(4, 64)),) * 2, (HeadPlan(QuantSpec(4, 64)),))},
        {"k": ((HeadPlan(QuantSpec(1, 64)),) * 2, (HeadPlan(QuantSpec(4, 64)),))},
        {"provenance": Provenance("t", "x", "0", 1, 512, 4096, 0, "roundtrip")},
    ],
)
def test_a_recipe_that_does_not_fit_together_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        plain_recipe(**changes)


def model_file(path: Path, recipe: Recipe | None = None, arch: str = "llama") -> GGUFFile:
    """A file that stands in for a model: the search looks at metadata, fingerprint and path only."""
    embedded = recipe.to_metadata() if recipe else {}
    write_metadata_file(path, {"general.architecture": arch, "general.name": "m", **embedded}, force=True)
    return GGUFFile(path)


def test_recipes_are_found_explicit_then_embedded_then_beside(tmp_path: Path) -> None:
    bare = model_file(tmp_path / "m.gguf")
    print_of = bare.fingerprint()
    assert recipe_source(bare) is None and find_recipe(bare) is None

    beside = plain_recipe(print_of, window=1)
    write_metadata_file(sidecar_path(bare.path), sidecar_metadata(beside, "m"))
    assert sidecar_path(bare.path).name == "kvconv-m.gguf"
    assert find_recipe(bare) == beside

    embedded = plain_recipe(print_of, window=2)
    model = model_file(tmp_path / "m.gguf", embedded)
    assert model.fingerprint() == print_of
    assert find_recipe(model) == embedded and recipe_source(model) == model.path

    explicit = plain_recipe(print_of, window=3)
    write_metadata_file(tmp_path / "other.gguf", sidecar_metadata(explicit, "m"))
    assert find_recipe(model, str(tmp_path / "other.gguf")) == explicit
    assert GGUFFile(tmp_path / "other.gguf").get("general.type") == "kvconv"


def test_a_recipe_for_another_model_is_refused(tmp_path: Path) -> None:
    other = model_file(tmp_path / "m.gguf", plain_recipe("f" * 64))
    with pytest.raises(RecipeError, match="another model") as raised:
        find_recipe(other)
    assert "--no-recipe" in str(raised.value) and "\n" not in str(raised.value)
    bare = model_file(tmp_path / "n.gguf")
    write_metadata_file(tmp_path / "r.gguf", sidecar_metadata(plain_recipe("f" * 64), "m"))
    with pytest.raises(RecipeError, match=r"r\.gguf was made for another model"):
        find_recipe(bare, str(tmp_path / "r.gguf"))
    with pytest.raises(RecipeError, match="holds no recipe"):
        find_recipe(bare, str(bare.path))
