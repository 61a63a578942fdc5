"""A diagnosis for people (a table by layer), for programs, and as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrun.errors import KvError
from kvrun.report.layers import DIAGNOSIS_FORMAT
from kvrun.tables import Column

from .diagnose import Diagnosis

if TYPE_CHECKING:
    from .standout import Finding

COLUMNS = (
    Column("layer"),
    Column("k_only", "keys alone", ".5f"),
    Column("k_rest", "all but", ".4f"),
    Column("k_error", "error %", ".2f"),
    Column("v_only", "values alone", ".5f"),
    Column("v_rest", "all but", ".4f"),
    Column("v_error", "error %", ".2f"),
)
HEAD_COLUMNS = (COLUMNS[0], Column("head", "KV head"), *COLUMNS[1:])

NOTE = (
    "alone: KL divergence in nats per token from the f16 cache when only this is quantized; all but: when everything "
    "else is. error: root mean square of what quantizing changes, in % of that of the deviation from each channel's "
    "mean."
)


def table_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row per layer, or per layer and KV head."""
    rows: dict[tuple[int, int | None], dict[str, Any]] = {}
    for damage in diagnosis.damages:
        part = damage.part
        row = rows.setdefault((part.layer, part.head), {"layer": part.layer, "head": part.head})
        row[f"{part.side}_only"] = damage.kld_only
        row[f"{part.side}_rest"] = damage.kld_rest
        row[f"{part.side}_error"] = 100 * damage.error
    return list(rows.values())


def columns(diagnosis: Diagnosis) -> tuple[Column, ...]:
    """The columns that the table needs."""
    return HEAD_COLUMNS if any(d.part.head is not None for d in diagnosis.damages) else COLUMNS


def as_object(diagnosis: Diagnosis, findings: Sequence[Finding], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, as `kvrun compare --diagnose` reads it. facts: model, text, cache and versions."""
    return {
        "format": DIAGNOSIS_FORMAT,
        "version": 1,
        **facts,
        "n_scored": diagnosis.n_scored,
        "kld_all": diagnosis.kld_all,
        "kld_all_se": diagnosis.kld_all_se,
        "parts": [
            {
                "layer": d.part.layer,
                "side": d.part.side,
                "head": d.part.head,
                "kld_only": d.kld_only,
                "kld_only_se": d.kld_only_se,
                "kld_rest": d.kld_rest,
                "kld_rest_se": d.kld_rest_se,
                "error": d.error,
            }
            for d in diagnosis.damages
        ],
        "findings": [_finding(finding) for finding in findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    part = finding.what.damage.part
    return {
        "sentence": finding.sentence,
        "layer": part.layer,
        "side": part.side,
        "head": part.head,
        "kld_only": finding.what.damage.kld_only,
        "median": finding.what.median,
        "z": finding.what.z,
        "advice": None if finding.advice is None else finding.advice.setting,
        "tried": [
            {
                "setting": r.setting,
                "kld_only": r.kld_only,
                "kld_all": r.kld_all,
                "extra_bits_per_value": r.extra_bits,
                "enough": r.enough,
            }
            for r in finding.tried
        ],
    }


def require_matplotlib() -> None:
    """Raise KvError where a PNG cannot be drawn: asked before the long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KvError("--png needs matplotlib; install it with `pip install 'kvconv[report]'`") from error


def write_png(diagnosis: Diagnosis, path: Path) -> None:
    """Two heat maps, layer by side or head: the divergence of each part alone (log), and its round-trip error."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    parts = [d.part for d in diagnosis.damages]
    rows = sorted({(p.side, -1 if p.head is None else p.head) for p in parts})
    n_layer = len(diagnosis.plan.geometry)
    shape = (len(rows), n_layer)
    damage, error = np.full(shape, np.nan), np.full(shape, np.nan)
    for d in diagnosis.damages:
        at = rows.index((d.part.side, -1 if d.part.head is None else d.part.head)), d.part.layer
        damage[at] = d.kld_only if d.kld_only > 0 else np.nan
        error[at] = 100 * d.error
    labels = [{"k": "keys", "v": "values"}[side] + ("" if head < 0 else f" {head}") for side, head in rows]
    figure = Figure(figsize=(max(6.0, 0.3 * n_layer + 2), 2.6 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    titles = ("KL divergence (nats) when nothing else is quantized", "round-trip error, % of the spread")
    for axes, values, title, norm in zip(
        figure.subplots(2, 1), (damage, error), titles, (LogNorm(), None), strict=True
    ):
        finite = values[np.isfinite(values)]
        image = axes.imshow(values, aspect="auto", cmap="Blues", norm=norm if len(finite) else None)
        axes.set_yticks(range(len(rows)), labels)
        axes.set_xlabel("layer")
        axes.set_title(title, loc="left", fontsize=10)
        figure.colorbar(image, ax=axes)
    temporary = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(temporary, format="png", dpi=150)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
