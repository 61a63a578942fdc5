"""What `kvconv diagnose` wrote, as the report shows it: heat maps of layers and heads, and its sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrun.console import printable
from kvrun.errors import KvError
from kvrun.report.charts import WIDE, Cell, heat_map

#: Value of the key "format" in what `kvconv diagnose -o json` prints.
DIAGNOSIS_FORMAT = "kvconv.diagnosis"

#: No model has as many: a larger number would make a drawing without end.
MOST_LAYERS = 4096


@dataclass(frozen=True)
class LayerReport:
    """A diagnosis as it was read. content: the whole object.  source: where it came from, for error messages."""

    content: Mapping[str, Any]
    source: str = "the diagnosis"

    def __post_init__(self) -> None:
        try:
            if self.content["format"] != DIAGNOSIS_FORMAT:
                raise KeyError("format")
            if not all(0 <= int(part["layer"]) < MOST_LAYERS for part in self.content["parts"]):
                raise ValueError("layer")
            self.heat_maps()
            _ = [finding["sentence"] for finding in self.content["findings"]], float(self.content["kld_all"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KvError(
                f"{printable(self.source)} is no diagnosis; make one with `kvconv diagnose MODEL -o json > FILE`"
            ) from error

    @property
    def sentences(self) -> list[str]:
        """What stands out, a sentence each."""
        return [str(finding["sentence"]) for finding in self.content["findings"]]

    @property
    def cache(self) -> str:
        """What was quantized, such as `kv4/kv4 hadamard`."""
        return str(self.content.get("cache", ""))

    def heat_maps(self, width: int = WIDE) -> list[str]:
        """Two drawings over layer and head: the divergence of each part alone, and its round-trip error."""
        parts = [
            (int(p["layer"]), str(p["side"]), p["head"], float(p["kld_only"]), float(p["error"]))
            for p in self.content["parts"]
        ]
        rows = sorted({(side, -1 if head is None else int(head)) for _, side, head, _, _ in parts})
        labels = [_row_label(side, head) for side, head in rows]
        damage, error = [], []
        for layer, side, head, kld, relative in parts:
            row = rows.index((side, -1 if head is None else int(head)))
            title = f"layer {layer}, {labels[row]}: KL divergence {kld:.4g} nats, round-trip error {relative:.1%}"
            damage.append(Cell(layer, row, kld, title))
            error.append(Cell(layer, row, 100 * relative, title))
        return [
            heat_map(damage, labels, "KL divergence when nothing else is quantized", width),
            heat_map(error, labels, "Round-trip error, % of the spread", width),
        ]


def _row_label(side: str, head: int) -> str:
    name = {"k": "keys", "v": "values"}[side]
    return name if head < 0 else f"{name} {head}"


def read_diagnosis(path: str | Path) -> LayerReport:
    """A file that `kvconv diagnose -o json` wrote. Raises KvError where it is something else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KvError(f"{printable(str(path))} is not JSON; make it with `kvconv diagnose MODEL -o json`") from error
    return LayerReport(content, str(path))
