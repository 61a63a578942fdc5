"""`kvconv inspect`: what a recipe holds."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from kvrun.console import note, printable


class InspectFormat(str, Enum):
    """How a recipe is shown."""

    md = "md"
    json = "json"


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Model with a recipe, a sidecar, or the word smollm2.")],
    output: Annotated[InspectFormat, typer.Option("-o", "--output", help="Table, or everything.")] = InspectFormat.md,
) -> None:
    """Show the recipe in a file: where it comes from, and what every layer got.

    A model without a recipe of its own is looked up beside itself (kvconv-<model file name>).
    """
    from kvconv import report
    from kvrun.gguf_file import GGUFFile
    from kvrun.gguf_split import open_model
    from kvrun.locate import find_model
    from kvrun.recipe import Recipe, recipe_source
    from kvrun.tables import markdown, plain

    named = open_model(find_model(file))
    source = recipe_source(named) or named.path
    holder = named if source == named.path else GGUFFile(source)
    recipe = Recipe.from_metadata(holder)
    if named.tensors:
        recipe.check_fits(named, name=source.name)
    if source != named.path:
        note(f"recipe from {printable(str(source))}", style="dim")
    if output is InspectFormat.json:
        typer.echo(json.dumps(plain(report.describe(recipe)), indent=2, ensure_ascii=False))
        return
    rows = report.layer_rows(recipe)
    lines = [printable(line) for line in report.header_lines(recipe)]
    typer.echo(
        "\n".join([*lines, "", markdown([*rows, report.total_row(recipe)], report.COLUMNS), report.note_for(recipe)])
    )
