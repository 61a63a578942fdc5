"""A comparison for people: the columns of its table and the footnote that says what the figures mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrun.compare import control_complaint
from kvrun.results import ResultRow
from kvrun.tables import Column, markdown

COLUMNS = (
    Column("engine"),
    Column("cache", "cache K/V"),
    Column("kept", "full precision"),
    Column("rotation"),
    Column("bits_per_value", "bits/value", ".2f"),
    Column("kv_mib", "KV MiB", ".2f"),
    Column("ppl", "PPL", ".3f"),
    Column("kld_mean", "KLD mean", ".4f"),
    Column("kld_mean_se", "±", ".4f"),
    Column("kld_p99", "KLD p99", ".4f"),
    Column("rms_dp_percent", "RMS Δp %", ".2f"),
    Column("same_top_percent", "same top %", ".2f"),
    Column("tokens_per_s", "tokens/s", ".0f"),
    Column("remark", "", empty=""),
)


def table_row(row: ResultRow) -> dict[str, Any]:
    """The row with the cells that are made of several fields."""
    cache = row.type_k if row.type_k == row.type_v else f"{row.type_k}/{row.type_v}"
    if row.recipe:
        cache += f" ({row.recipe[:8]})"
    kept = "none" if row.sinks is None or not (row.sinks or row.window) else f"{row.sinks} sinks + last {row.window}"
    if row.type_k == row.type_v == "f16":
        kept = "all"
    if row.reference:
        cache += f" against {row.reference}"
    remarks = [row.error, row.note, "must fail" if row.control and not row.error else ""]
    return {
        **row.as_dict(),
        "cache": cache,
        "kept": kept,
        "kv_mib": None if row.kv_bytes is None else row.kv_bytes / 2**20,
        "rms_dp_percent": None if row.rms_dp is None else 100 * row.rms_dp,
        "same_top_percent": None if row.same_top is None else 100 * row.same_top,
        "remark": "; ".join(remark for remark in remarks if remark),
    }


def report(rows: Sequence[ResultRow]) -> str:
    """The whole table in Markdown with its footnote."""
    return markdown([table_row(row) for row in rows], COLUMNS) + "\n" + footnote(rows)


def footnote(rows: Sequence[ResultRow]) -> str:
    """What the reference is, how many positions were scored, what is counted in the bits, and the control's verdict."""
    measured = next((row for row in rows if row.n_scored), None)
    if measured is None:
        return "No row has figures.\n"
    lines = [
        f"{measured.model} on {measured.text} (sha256 {measured.text_sha256[:12]}), {measured.n_scored} scored "
        f"positions: the second half of each window of {measured.n_ctx} tokens, as llama-perplexity does it.",
        "KLD: divergence in nats per token from the f16 cache of the same engine; same top: share of positions with "
        "that cache's most probable token; RMS Δp: root mean square of the change in the right token's probability.",
        "Bits and MiB are what is allocated for the context, divided by the keys and values it has room for: codes, "
        "scales, minima, full-precision sinks and window all counted.",
        "tokens/s: evaluation of the windows with this cache alone, "
        + "; ".join(_speed(engine, rows) for engine in dict.fromkeys(row.engine for row in rows))
        + ".",
    ]
    lines += _about_llama_cpp([row for row in rows if row.engine == "llama.cpp"])
    lines += [
        f"The engines' own noise floor, f16 of kvrun against {row.reference}: KLD {row.kld_mean:.4f}."
        for row in rows
        if row.reference and row.kld_mean is not None
    ]
    lines += [_verdict(row) for row in rows if row.kld_difference is not None]
    complaint = control_complaint(rows)
    lines.append(f"{complaint[0].upper()}{complaint[1:]}." if complaint else "The control failed, as it must.")
    return "\n".join(lines) + "\n"


def _verdict(row: ResultRow) -> str:
    """What the paired bootstrap says of a row and its baseline."""
    assert row.kld_difference is not None
    assert row.kld_difference_low is not None and row.kld_difference_high is not None
    low, high = row.kld_difference_low, row.kld_difference_high
    cells = table_row(row)
    name = cells["cache"] + (" rotated" if row.rotation != "off" and not row.recipe else "")
    name = f"{row.engine} {name}" if row.engine != "kvrun" else name
    kept = f"{cells['kept']} in full precision" if row.sinks or row.window else "nothing in full precision"
    verdict = "not distinguishable" if low <= 0 <= high else "worse" if low > 0 else "better"
    return (
        f"{name} against {row.baseline}, {kept}: {verdict}, KLD {row.kld_difference:+.4f} "
        f"(95 % {low:+.4f} to {high:+.4f}, paired bootstrap)."
    )


def _about_llama_cpp(rows: Sequence[ResultRow]) -> list[str]:
    """What has to be known to set llama.cpp's rows beside ours."""
    if not any(row.n_scored for row in rows):
        return []
    lines = [
        "llama.cpp has no window and no sinks, so its rows stand beside ours without them. It rounds activations to 8 "
        "bits beside quantized weights: a divergence below about 0.005 there may be that and not the cache."
    ]
    if rows[0].n_ctx % 256:
        lines.append("llama.cpp rounds its context up to a multiple of 256 tokens; its MiB are for that.")
    if rows[0].impl == "cpu":
        lines.append("llama.cpp ran without its repacking of weights, which crashes on this machine.")
    return lines


def _speed(engine: str, rows: Sequence[ResultRow]) -> str:
    row = next(row for row in rows if row.engine == engine)
    return f"{engine} {row.version} ({row.impl}, {row.n_threads} threads)"
