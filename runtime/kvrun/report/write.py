"""Writes the three files of a report into one folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvrun.compare_table import COLUMNS, footnote, table_row
from kvrun.console import printable
from kvrun.errors import KvError
from kvrun.report.charts import NARROW, WIDE, by_position, pareto
from kvrun.report.layers import LayerReport
from kvrun.results import ResultRow
from kvrun.tables import Column, markdown, plain

FILES = ("report.json", "report.md", "report.html")
FORMAT = "kvrun.report"

#: Columns of the table by confidence, before those of the bins.
_WHO = (Column("engine"), Column("cache", "cache K/V"), Column("kept", "full precision"), Column("rotation"))

Positions = Mapping[str, Sequence[tuple[float, float]]]

#: Columns of the table of what failed.
_FAILED = (Column("engine"), Column("cache", "cache K/V"), Column("rotation"), Column("error", "why"))


def check_folder(folder: Path | str, *, force: bool = False) -> None:
    """Raise KvError where a report cannot go to `folder`: asked before the long run, not after it."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise KvError(f"{folder} is a file; name a folder with --report")
    if folder.exists() and not force:
        raise KvError(f"the folder {folder} exists; name another with --report, or write into it with --force")
    parent = folder if folder.exists() else folder.absolute().parent
    if not parent.is_dir():
        raise KvError(f"the folder {parent} does not exist; create it, or name another with --report")
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise KvError(f"{parent} cannot be written to ({error.strerror}); name another with --report") from error


def write_report(
    rows: Sequence[ResultRow],
    header: Mapping[str, Any],
    folder: Path | str,
    *,
    positions: Positions | None = None,
    layers: LayerReport | None = None,
    force: bool = False,
) -> list[Path]:
    """Write report.json, report.md and report.html; returns their paths.

    rows: as `kvrun.compare` yields them, also those that failed.
    header: what was measured, in the order in which it is shown; a value is text, or a list of texts.
    positions: for each setting (position in the window, mean KL divergence), to be drawn by position.
    layers: from `read_diagnosis`.
    force: write into a folder that exists; other files in it are left alone. Raises KvError where it exists otherwise.
    Each file is written under a temporary name and renamed, so that none is ever half there.
    """
    folder = Path(folder)
    check_folder(folder, force=force)
    folder.mkdir(exist_ok=True)
    contents = (
        as_json(rows, header, positions, layers),
        as_markdown(rows, header, positions, layers),
        as_html(rows, header, positions, layers),
    )
    written = []
    for name, content in zip(FILES, contents, strict=True):
        _replace(folder / name, content)
        written.append(folder / name)
    return written


def _replace(path: Path, content: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def as_json(
    rows: Sequence[ResultRow], header: Mapping[str, Any], positions: Positions | None, layers: LayerReport | None
) -> str:
    """Everything, unformatted."""
    content = {
        "format": FORMAT,
        "version": 1,
        "header": header,
        "rows": [row.as_dict() for row in rows],
        "positions": {name: [list(point) for point in points] for name, points in (positions or {}).items()},
        "layers": None if layers is None else layers.content,
    }
    return json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_markdown(
    rows: Sequence[ResultRow], header: Mapping[str, Any], positions: Positions | None, layers: LayerReport | None
) -> str:
    """The tables and sentences."""
    done, failed = _split(rows)
    parts = ["# KV cache comparison", "\n".join(f"- {name}: {_flat(value)}" for name, value in header.items())]
    parts += ["## Results", markdown([table_row(row) for row in done], COLUMNS), footnote(rows)]
    if layers is not None:
        parts += ["## By layer", f"Cache: {printable(layers.cache)}", *(printable(s) for s in layers.sentences)]
        if not layers.sentences:
            parts.append("No layer stands out.")
    if positions:
        parts.append("## By position in the window")
        parts += [
            f"{printable(name)}: " + ", ".join(f"{kld:.4f} at {position:.0f}" for position, kld in points)
            for name, points in positions.items()
        ]
    confidence, columns = _by_confidence(done)
    if confidence:
        parts += ["## By confidence of the reference", markdown(confidence, columns)]
    parts.append("## Failed and skipped")
    parts.append(markdown([table_row(row) for row in failed], _FAILED) if failed else "None.")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def as_html(
    rows: Sequence[ResultRow], header: Mapping[str, Any], positions: Positions | None, layers: LayerReport | None
) -> str:
    """One page without scripts and without anything from elsewhere."""
    from jinja2 import Environment, StrictUndefined

    done, failed = _split(rows)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("kvrun.report").joinpath("template.html").read_text(encoding="utf-8"))
    columns = [column for column in COLUMNS if column.key != "remark"]
    table = [
        {
            "cells": [(column.cell(cells), bool(column.spec)) for column in columns],
            "remark": printable(str(cells["remark"])),
            "ours": row.engine == "kvrun",
            "control": row.control,
        }
        for row, cells in ((row, table_row(row)) for row in done)
    ]
    confidence, bins = _by_confidence(done)
    drawings = [(size, width) for size, width in (("wide", WIDE), ("narrow", NARROW))]
    return template.render(
        header=[(name, _texts(value)) for name, value in header.items()],
        headings=[(column.heading, bool(column.spec)) for column in columns],
        table=table,
        notes=footnote(rows).splitlines(),
        pareto=[(size, pareto(rows, width)) for size, width in drawings],
        positions=[(size, by_position(positions or {}, width)) for size, width in drawings] if positions else [],
        confidence=[[(column.cell(cells), bool(column.spec)) for column in bins] for cells in confidence],
        confidence_headings=[(column.heading, bool(column.spec)) for column in bins],
        layers=[] if layers is None else [(size, layers.heat_maps(width)) for size, width in drawings],
        diagnosis=layers,
        failed=[[column.cell(table_row(row)) for column in _FAILED] for row in failed],
        failed_headings=[column.heading for column in _FAILED],
    )


def _split(rows: Sequence[ResultRow]) -> tuple[list[ResultRow], list[ResultRow]]:
    return [row for row in rows if not row.error], [row for row in rows if row.error]


def _by_confidence(rows: Sequence[ResultRow]) -> tuple[list[dict[str, Any]], tuple[Column, ...]]:
    """A line per row with its mean KL divergence in each bin of the reference's confidence, and the columns."""
    names: dict[tuple[float, float], str] = {}
    lines = []
    for row in rows:
        if not row.kld_by_confidence or row.type_k == row.type_v == "f16":
            continue
        cells = table_row(row)
        for found in row.kld_by_confidence:
            ends = found["low"], found["high"]
            names[ends] = f"p {ends[0]:g} to {ends[1]:g}"
            cells[names[ends]] = found["kld_mean"]
        lines.append(cells)
    return lines, (*_WHO, *(Column(names[ends], spec=".4f") for ends in sorted(names)))


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [printable(str(item)) for item in values]


def _flat(value: Any) -> str:
    return ", ".join(_texts(value))
