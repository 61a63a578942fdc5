"""A recipe: how every head of one model's KV cache is stored, and what that was learned from.

This module is the only reader and writer of `kvconv.*` metadata; `kvconv` fills recipes in, `kvrun` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import recipe_format as fmt
from .errors import GGUFError, RecipeError
from .plan import CachePlan, HeadPlan, LayerGeometry

if TYPE_CHECKING:
    from .gguf_file import GGUFFile

VERSION_KEY = fmt.PREFIX + "version"
CHECKSUM_KEY = fmt.PREFIX + "sha256"
SIDECAR_PREFIX = "kvconv-"
#: `general.type` of a sidecar.
SIDECAR_TYPE = "kvconv"

Scores = tuple[tuple[float, ...], ...]
SCORES = ("k_before", "k_after", "v_before", "v_after")


@dataclass(frozen=True)
class Provenance:
    """What a recipe was learned from, and what the choices gained.

    text_name: file names without folders.  text_sha256: hex digest of the text's bytes.  chunk_tokens: per chunk.
    n_ctx: context over whose positions the chunks were spread, in tokens.
    objective: what the scores measure; "roundtrip" is squared error over squared deviation from the channel mean.
    k_before, k_after, v_before, v_after: score per `[layer][head]` with the head stored as it comes, and as chosen.
    """

    tool_version: str
    text_name: str
    text_sha256: str
    n_chunks: int
    chunk_tokens: int
    n_ctx: int
    seed: int
    objective: str
    k_before: Scores = ()
    k_after: Scores = ()
    v_before: Scores = ()
    v_after: Scores = ()

    def __post_init__(self) -> None:
        for name in SCORES:  # scores are stored as float32; a recipe equals itself when it is read back
            rounded = tuple(tuple(float(np.float32(s)) for s in layer) for layer in getattr(self, name))
            object.__setattr__(self, name, rounded)


@dataclass(frozen=True, eq=False)
class Recipe:
    """Storage and transform of every head, for one model.

    fingerprint: `GGUFFile.fingerprint()` of the model.  arch: its `general.architecture`.
    geometry: per layer.  k, v: `[layer][kv head]`.  sinks, window: tokens kept in full precision.
    version: of the file format; 0 takes the oldest that can hold the recipe.
    Learned matrices are rounded to float16, as they are stored.  RecipeError where the parts do not fit together.
    """

    fingerprint: str
    arch: str
    geometry: tuple[LayerGeometry, ...]
    k: tuple[tuple[HeadPlan, ...], ...]
    v: tuple[tuple[HeadPlan, ...], ...]
    sinks: int
    window: int
    provenance: Provenance
    version: int = 0

    def __post_init__(self) -> None:
        needed = fmt.needed_version(self.k, self.v, self.geometry)
        object.__setattr__(self, "version", self.version or needed)
        for side in ("k", "v"):
            object.__setattr__(self, side, tuple(tuple(map(_as_stored, layer)) for layer in getattr(self, side)))
            fmt.check_heads(side, getattr(self, side), self.geometry)
        for name in ("sinks", "window"):
            if not 0 <= getattr(self, name) < 2**32:
                raise RecipeError(f"{name} is {getattr(self, name)}, which is no number of tokens")
        for name in SCORES:
            scores = getattr(self.provenance, name)
            if [len(layer) for layer in scores] != [layer.n_head_kv for layer in self.geometry]:
                raise RecipeError(f"{name} does not hold one score per head")
            if not all(np.isfinite(s) and s >= 0 for layer in scores for s in layer):
                raise RecipeError(f"{name} holds a score that is negative or not a number")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def _content(self) -> dict[str, Any]:
        made = self.provenance
        content: dict[str, Any] = {
            "version": self.version,
            "fingerprint": self.fingerprint,
            "arch": self.arch,
            "sinks": self.sinks,
            "window": self.window,
            "objective": made.objective,
            "tool_version": made.tool_version,
            "calibration.text_name": made.text_name,
            "calibration.text_sha256": made.text_sha256,
            "calibration.chunk_count": made.n_chunks,
            "calibration.chunk_tokens": made.chunk_tokens,
            "calibration.context_length": made.n_ctx,
            "calibration.seed": made.seed,
        }
        for name in SCORES:
            side, when = name.split("_")
            content[f"{side}.score_{when}"] = np.array([s for layer in getattr(made, name) for s in layer], np.float32)
        prefixed = {fmt.PREFIX + name: value for name, value in content.items()}
        sides = fmt.encode_side("k", self.k) | fmt.encode_side("v", self.v)
        return prefixed | fmt.encode_geometry(self.geometry) | sides

    def to_metadata(self) -> dict[str, Any]:
        """Every `kvconv.*` key with its value, for `gguf_write`: int, str or flat numpy array."""
        content = self._content()
        return {**content, CHECKSUM_KEY: fmt.content_sha256(content)}

    @classmethod
    def from_metadata(cls, file: GGUFFile) -> Recipe:
        """The recipe in a file's metadata; RecipeError, one line, where there is none or it is newer or damaged."""
        if VERSION_KEY not in file:
            raise RecipeError(f"{file.path.name} holds no recipe; make one with kvconv calibrate")
        try:
            version = fmt.Fields(file).number("version")
            if version > fmt.FORMAT_VERSION:
                newer = f"format version {version}, and this version reads up to {fmt.FORMAT_VERSION}"
                raise _NewerError(f"{file.path.name}: the recipe has {newer}; upgrade kvconv")
            recipe = cls._decode(fmt.Fields(file))
            if fmt.Fields(file).text("sha256") != recipe.to_metadata()[CHECKSUM_KEY]:
                raise RecipeError("its checksum does not fit")
        except _NewerError:
            raise
        except (RecipeError, GGUFError) as error:
            why = f"{file.path.name}: the recipe is damaged ({error})"
            raise RecipeError(f"{why}; calibrate the model again with kvconv calibrate") from error
        return recipe

    @classmethod
    def _decode(cls, source: fmt.Fields) -> Recipe:
        if source.number("version") < 1:
            raise RecipeError("its version is 0")
        version = source.number("version")
        geometry = fmt.decode_geometry(source, version)
        k, v = (fmt.decode_side(source, side, geometry, version) for side in ("k", "v"))
        n_heads = sum(layer.n_head_kv for layer in geometry)

        def scores(name: str) -> Scores:
            return fmt.by_layer(source.array(name, (np.float32,), n_heads).tolist(), geometry)

        provenance = Provenance(
            tool_version=source.text("tool_version"),
            text_name=source.text("calibration.text_name"),
            text_sha256=source.text("calibration.text_sha256"),
            n_chunks=source.number("calibration.chunk_count"),
            chunk_tokens=source.number("calibration.chunk_tokens"),
            n_ctx=source.number("calibration.context_length"),
            seed=source.number("calibration.seed", limit=2**64 - 1),
            objective=source.text("objective"),
            k_before=scores("k.score_before"),
            k_after=scores("k.score_after"),
            v_before=scores("v.score_before"),
            v_after=scores("v.score_after"),
        )
        return cls(
            fingerprint=source.text("fingerprint"),
            arch=source.text("arch"),
            geometry=geometry,
            k=k,
            v=v,
            sinks=source.number("sinks"),
            window=source.number("window"),
            provenance=provenance,
            version=version,
        )

    def digest(self) -> str:
        """First 12 hex digits of the sha256 over everything the recipe holds."""
        return fmt.content_sha256(self._content())[:12]

    def check_fits(
        self, model: GGUFFile, geometry: Sequence[LayerGeometry] | None = None, *, name: str = "the recipe"
    ) -> None:
        """Raise RecipeError where the recipe was made for another model; `geometry` is the model's, where known."""
        fits = self.fingerprint == model.fingerprint() and self.arch == model.arch
        if not fits or (geometry is not None and self.geometry != tuple(geometry)):
            advice = "calibrate this model with kvconv calibrate, or run it without a recipe (--no-recipe)"
            raise RecipeError(f"{name} was made for another model than {model.path.name}; {advice}")

    def plan(self, *, sinks: int | None = None, window: int | None = None) -> CachePlan:
        """The cache this recipe describes; `sinks` and `window` (tokens) replace the recipe's where given."""
        return CachePlan(
            geometry=self.geometry,
            k=self.k,
            v=self.v,
            sinks=self.sinks if sinks is None else sinks,
            window=self.window if window is None else window,
            type_k="auto",
            type_v="auto",
            recipe=self.digest(),
        )


class _NewerError(RecipeError):
    """A newer version is not damage."""


def _as_stored(head: HeadPlan) -> HeadPlan:
    """The head with numbers as the file will hold them: float32 clip and offset, float16 matrix, uint16 order."""
    t = head.transform
    with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused as such
        transform = replace(
            t,
            order=None if t.order is None else np.asarray(t.order).astype(np.uint16),
            offset=None if t.offset is None else np.asarray(t.offset, np.float32),
            matrix=None if t.matrix is None else np.asarray(t.matrix).astype(np.float16).astype(np.float32),
        )
    return HeadPlan(head.spec, transform, float(np.float32(head.clip)))


def sidecar_path(model: Path) -> Path:
    """Where a recipe beside a model is looked for: `kvconv-<model file name>` in its folder."""
    return model.with_name(SIDECAR_PREFIX + model.name)


def recipe_source(model: GGUFFile, explicit: str | Path | None = None) -> Path | None:
    """The file whose recipe would be used for `model`: the one named, else the model itself, else its sidecar."""
    if explicit is not None:
        return Path(explicit)
    if VERSION_KEY in model:
        return model.path
    beside = sidecar_path(model.path)
    return beside if beside.exists() else None


def find_recipe(
    model: GGUFFile, explicit: str | Path | None = None, *, geometry: Sequence[LayerGeometry] | None = None
) -> Recipe | None:
    """The recipe for `model`, or None where there is none: the file named, else embedded, else the sidecar.

    geometry: of the model's cache; where it is given, a recipe of another shape is refused here.
    Raises RecipeError where it is damaged, of a newer version or for another model, GGUFError where the file is.
    """
    path = recipe_source(model, explicit)
    if path is None:
        return None
    from .gguf_file import GGUFFile

    recipe = Recipe.from_metadata(model if path == model.path else GGUFFile(path))
    recipe.check_fits(model, geometry, name=path.name if path != model.path else "the recipe in this file")
    return recipe


def sidecar_metadata(recipe: Recipe, model_name: str) -> dict[str, Any]:
    """What a sidecar file holds: the recipe, and the standard keys that say what kind of GGUF file it is."""
    general = {"general.type": SIDECAR_TYPE, "general.architecture": recipe.arch, "general.name": model_name}
    return general | recipe.to_metadata()
