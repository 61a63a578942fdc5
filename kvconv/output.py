"""Where a recipe goes, and whether it can go there: asked before the long pass, not after it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvrun.errors import KvError
from kvrun.gguf_split import whole_stem
from kvrun.recipe import Recipe, sidecar_metadata, sidecar_path

if TYPE_CHECKING:
    from kvrun.gguf_file import GGUFFile

#: More than any recipe of today's models takes.
SIDECAR_BYTES = 32 << 20


def output_path(model: Path, out: str | None, *, sidecar: bool) -> Path:
    """What was asked for, else `kvconv-<model file name>` beside the model, or `<stem>-kvconv.gguf` in this folder."""
    if out is not None:
        return Path(out)
    return sidecar_path(model) if sidecar else Path(f"{whole_stem(model)}-kvconv.gguf")


def check_output(out: Path, model: GGUFFile, *, sidecar: bool, force: bool) -> None:
    """Raise KvError where writing `out` would fail or destroy something."""
    folder = out.parent
    if out.is_dir():
        raise KvError(f"{out} is a folder; name a file with -o")
    if not folder.is_dir():
        raise KvError(f"the folder {folder} does not exist; create it or write elsewhere with -o")
    if out.exists():
        if any(out.samefile(part.path) for part in model.parts):
            raise KvError(f"{out} is the model itself, which is never changed; write elsewhere with -o")
        if not out.is_file():
            raise KvError(f"{out} is not a file; write elsewhere with -o")
        if not force:
            raise KvError(f"{out} exists; overwrite it with --force or write elsewhere with -o")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise KvError(f"the folder {folder} cannot be written to ({why}); write elsewhere with -o") from error
    needed = SIDECAR_BYTES if sidecar else model.n_bytes + SIDECAR_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        room = f"{free >> 20} MiB are free in {folder}, and {needed >> 20} MiB are needed"
        advice = "free some space or write elsewhere with -o"
        raise KvError(f"{room}; {advice}" + ("" if sidecar else ", or write a sidecar alone with --sidecar"))


def write(
    recipe: Recipe,
    model: GGUFFile,
    out: Path,
    *,
    sidecar: bool,
    force: bool,
    on_progress: Callable[..., None] | None = None,
) -> None:
    """Write the recipe as a sidecar, or into a copy of the model whose own recipe, if it has one, is replaced.

    The copy of a split model is one file.
    """
    from kvrun.gguf_write import rewrite, write_metadata_file
    from kvrun.recipe_format import PREFIX

    if sidecar:
        write_metadata_file(out, sidecar_metadata(recipe, model.get("general.name", "")), force=force)
        return
    rewrite(model, out, drop_prefix=PREFIX, add=recipe.to_metadata(), force=force, on_progress=on_progress)


def write_stripped(model: GGUFFile, out: Path, *, force: bool, on_progress: Callable[..., None] | None = None) -> int:
    """Write a copy of the model without its recipe; returns how many keys were left out.

    Everything under `kvconv.` goes, also what a newer version or a damaged recipe left there. Raises KvError where
    there is nothing to remove, or where the file is a recipe alone.
    """
    from kvrun.gguf_write import rewrite
    from kvrun.recipe import SIDECAR_TYPE
    from kvrun.recipe_format import PREFIX

    if model.get("general.type") == SIDECAR_TYPE:
        raise KvError(f"{model.path} is a recipe alone; delete it to be rid of it")
    n_keys = sum(key.startswith(PREFIX) for key in model)
    if not n_keys:
        raise KvError(f"{model.path} holds no recipe; use it as it is")
    rewrite(model, out, drop_prefix=PREFIX, add={}, force=force, on_progress=on_progress)
    return n_keys
