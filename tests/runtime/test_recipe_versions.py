"""Versions of the recipe format: each is written only where it is needed, and knows what it added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrun.errors import RecipeError
from kvrun.recipe import Recipe
from tests.runtime.test_recipe import GEOMETRY, array, plain_recipe, written


def rotating_recipe() -> Recipe:
    base = plain_recipe()
    first = base.k[0][0]
    turned = replace(first, transform=replace(first.transform, rotating=True))
    return plain_recipe(k=((turned, base.k[0][1]), base.k[1]))


def test_a_recipe_is_written_in_the_oldest_version_that_holds_it(tmp_path: Path) -> None:
    assert plain_recipe().to_metadata()["kvconv.version"] == 1
    recipe = rotating_recipe()
    metadata = recipe.to_metadata()
    assert metadata["kvconv.version"] == 2 and metadata["kvconv.k.transform"].tolist() == [26, 1, 0]
    assert metadata["kvconv.k.offset"].tolist() == plain_recipe().to_metadata()["kvconv.k.offset"].tolist()
    assert Recipe.from_metadata(written(tmp_path / "r.gguf", metadata)) == recipe != plain_recipe()
    metadata = cubic_recipe().to_metadata()
    assert metadata["kvconv.version"] == 3 and metadata["kvconv.k.code"].tolist() == [1, 0, 0]
    assert "kvconv.v.code" not in metadata


def cubic_recipe() -> Recipe:
    base = rotating_recipe()
    first = replace(base.k[0][0], spec=replace(base.k[0][0].spec, code="cubic"))
    return plain_recipe(k=((first, base.k[0][1]), base.k[1]))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"k.code": array([2, 0, 0], np.uint8)}, "a code that this version does not know"),
        ({"k.code": array([1, 0, 1], np.uint8)}, "cubic code has"),  # the last one has 8 bits
        ({"k.code": array([1, 0], np.uint8)}, "has 2 entries, not 3"),
        ({"k.code": array([1, 0, 0], np.uint16)}, "is not an array of uint8"),
        ({"version": 2}, "its checksum does not fit"),
    ],
)
def test_a_code_that_does_not_add_up_is_damage(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    metadata = cubic_recipe().to_metadata() | {f"kvconv.{key}": value for key, value in changes.items()}
    with pytest.raises(RecipeError, match=why):
        Recipe.from_metadata(written(tmp_path / "bad.gguf", metadata))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 1}, "a transform that this version does not know"),
        ({"k.transform": array([18, 1, 0], np.uint8), "k.offset": None}, "needs an offset"),
        ({"k.transform": array([32, 1, 0], np.uint8), "k.offset": None}, "a transform that this version does not know"),
    ],
)
def test_a_rotation_that_does_not_add_up_is_damage(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    metadata = rotating_recipe().to_metadata() | {f"kvconv.{key}": value for key, value in changes.items()}
    file = written(tmp_path / "bad.gguf", {key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(RecipeError, match=why):
        Recipe.from_metadata(file)


def test_sliding_windows_are_part_of_the_shape(tmp_path: Path) -> None:
    sliding = (replace(GEOMETRY[0], sliding=512), GEOMETRY[1])
    recipe = plain_recipe(geometry=sliding)
    metadata = recipe.to_metadata()
    assert metadata["kvconv.version"] == 3 and metadata["kvconv.sliding_window"].tolist() == [512, 0]
    read = Recipe.from_metadata(written(tmp_path / "s.gguf", metadata))
    assert read == recipe and read.geometry == sliding and read.plan().geometry == sliding
    assert "kvconv.sliding_window" not in plain_recipe().to_metadata()
    short = metadata | {"kvconv.sliding_window": metadata["kvconv.sliding_window"][:1]}
    with pytest.raises(RecipeError, match="sliding_window has 1 entries, not 2"):
        Recipe.from_metadata(written(tmp_path / "short.gguf", short))
