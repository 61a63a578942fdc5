"""`-o md|csv|json|jsonl`: the same rows, for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np

from kvrun.tables import Column, OutputFormat, print_rows

ROWS = [
    {"name": "kv4", "ppl": 12.34567, "bits": np.float32(4.5), "ok": True, "extra": [1, 2]},
    {"name": "a|b\x1b", "ppl": math.inf, "bits": np.int64(4), "ok": False, "error": "no\nfit"},
]
COLUMNS = [Column("name", "cache"), Column("ppl", "PPL", ".2f"), Column("bits", spec=".1f"), Column("ok")]


def printed(output: OutputFormat) -> str:
    file = io.StringIO()
    print_rows(ROWS, COLUMNS, output, file)
    return file.getvalue()


def test_markdown_shows_the_columns_aligned() -> None:
    assert printed(OutputFormat.md).splitlines() == [
        "| cache    |   PPL | bits | ok  |",
        "| -------- | ----: | ---: | --- |",
        "| kv4      | 12.35 |  4.5 | yes |",
        "| a\\|b\\x1b |     - |  4.0 | no  |",
    ]


def test_json_is_a_list_with_every_key() -> None:
    rows = json.loads(printed(OutputFormat.json))
    assert rows[0] == {"name": "kv4", "ppl": 12.34567, "bits": 4.5, "ok": True, "extra": [1, 2]}
    assert rows[1]["ppl"] is None and rows[1]["error"] == "no\nfit" and rows[1]["name"] == "a|b\x1b"


def test_jsonl_is_one_object_a_line() -> None:
    lines = printed(OutputFormat.jsonl).splitlines()
    assert [json.loads(line) for line in lines] == json.loads(printed(OutputFormat.json))


def test_csv_has_the_keys_of_all_rows() -> None:
    rows = list(csv.DictReader(io.StringIO(printed(OutputFormat.csv))))
    assert list(rows[0]) == ["name", "ppl", "bits", "ok", "extra", "error"]
    assert rows[0]["extra"] == "[1, 2]" and rows[0]["error"] == "" and rows[1]["ppl"] == ""


def test_no_rows_is_no_error() -> None:
    file = io.StringIO()
    for output in OutputFormat:
        print_rows([], COLUMNS, output, file)
    assert "| cache | PPL" in file.getvalue() and "[]" in file.getvalue()
