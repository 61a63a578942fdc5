"""`kvconv strip`: the model without its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconv.commands.calibrate import ForceOption
from kvrun.console import printable, progress


def strip(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model with a recipe in it.")],
    out: Annotated[str, typer.Option("-o", "--output", metavar="OUT", help="File to write.")],
    force: ForceOption = False,
) -> None:
    """Write a model without the recipe in it; every other key and every tensor stays as it is, byte for byte."""
    from kvconv.output import check_output, write_stripped
    from kvrun.gguf_split import open_model
    from kvrun.locate import find_model

    file, target = open_model(find_model(model)), Path(out)
    check_output(target, file, sidecar=False, force=force)
    with progress("writing") as advance:
        n_keys = write_stripped(file, target, force=force, on_progress=advance)
    typer.echo(f"wrote {printable(str(target))}: {n_keys} keys of the recipe removed")
