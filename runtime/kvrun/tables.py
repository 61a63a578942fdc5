"""Tables on stdout: `-o md` for people, `-o csv`, `-o json` and `-o jsonl` for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TextIO

from kvrun.console import printable


class OutputFormat(str, Enum):
    """How a table is printed."""

    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


@dataclass(frozen=True)
class Column:
    """One column of the table for people.

    key: of the row.  title: heading, the key when empty.  spec: format specification for numbers (`.3f`); text and
    booleans are printed as they are, None and a missing key as `empty`.
    """

    key: str
    title: str = ""
    spec: str = ""
    empty: str = "-"

    @property
    def heading(self) -> str:
        """What stands above the column."""
        return self.title or self.key

    def cell(self, row: Mapping[str, Any]) -> str:
        """The cell of `row`, safe to print."""
        value = plain(row.get(self.key))
        if value is None:
            return self.empty
        if isinstance(value, bool):
            return "yes" if value else "no"
        return format(value, self.spec) if isinstance(value, (int, float)) else printable(str(value))


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], output: OutputFormat | str, file: TextIO | None = None
) -> None:
    """Print `rows` to stdout (or `file`).

    md shows `columns` only. csv, json and jsonl carry every key of the rows, unformatted; what is not finite becomes
    null (json) or an empty cell (csv). json is always a list, also for one row.
    """
    file = file or sys.stdout
    output = OutputFormat(output)
    if output is OutputFormat.md:
        file.write(markdown(rows, columns))
    elif output is OutputFormat.csv:
        file.write(_csv(rows))
    elif output is OutputFormat.json:
        file.write(json.dumps([plain(row) for row in rows], indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        file.writelines(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    file.flush()


def markdown(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """A Markdown table with aligned columns, numbers to the right."""
    rows = list(rows)
    cells = [[column.cell(row).replace("|", "\\|") for column in columns] for row in rows]
    numeric = [
        all(_is_number(row.get(c.key)) for row in rows) and any(row.get(c.key) is not None for row in rows)
        for c in columns
    ]
    widths = [max(3, *(len(line[i]) for line in [[c.heading for c in columns], *cells])) for i in range(len(columns))]
    rule = ["-" * (width - 1) + ":" if right else "-" * width for width, right in zip(widths, numeric, strict=True)]
    lines = [_line([c.heading for c in columns], widths, numeric), "| " + " | ".join(rule) + " |"]
    lines += [_line(line, widths, numeric) for line in cells]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True)]
    return "| " + " | ".join(padded) + " |"


def _is_number(value: Any) -> bool:
    value = plain(value)
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {key: plain(value) for key, value in row.items()}
        writer.writerow({k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in values.items()})
    return text.getvalue()


def plain(value: Any) -> Any:
    """`value` made of JSON's own types: numpy and torch scalars and arrays unwrapped, what is not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
