"""What a recipe holds, for people (a table by layer) and for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrun.plan import CachePlan, HeadPlan
from kvrun.recipe import Recipe
from kvrun.tables import Column

COLUMNS = (
    Column("layer"),
    Column("k_choice", "keys"),
    Column("k_bits", "bits", ".2f"),
    Column("k_before", "cost before", ".3g"),
    Column("k_after", "after", ".3g"),
    Column("v_choice", "values"),
    Column("v_bits", "bits", ".2f"),
    Column("v_before", "cost before", ".3g"),
    Column("v_after", "after", ".3g"),
)

#: What the columns of cost count, by objective.
UNITS = {
    "roundtrip": "root mean square of what quantizing changes, in % of the deviation from each channel's mean",
    "query": "root mean square error of a score (keys, in 1/100) or of the attention output (values, in %)",
    "fisher": "expected divergence from the f16 cache in 1/1000 nats per token, summed over heads",
}


def note_for(recipe: Recipe) -> str:
    """The line under the table that says what it counts."""
    made = recipe.provenance.objective
    unit = UNITS.get("roundtrip" if made.startswith("skvq") else made, f"by the objective {made}")
    return (
        f"bits: per value, with scales and minima. cost: {unit}; before is with every head as it comes, after is as "
        "chosen."
    )


def layer_rows(recipe: Recipe) -> list[dict[str, Any]]:
    """One row per layer: what the heads of each side got, bits per value, costs in the unit of `note_for`."""
    made, rows = recipe.provenance, []
    for il, shape in enumerate(recipe.geometry):
        row: dict[str, Any] = {"layer": il}
        for side, heads, before, after in (
            ("k", recipe.k[il], made.k_before[il], made.k_after[il]),
            ("v", recipe.v[il], made.v_before[il], made.v_after[il]),
        ):
            dim = shape.head_dim_k if side == "k" else shape.head_dim_v
            row[f"{side}_choice"] = summarize(heads)
            row[f"{side}_bits"] = mean([head.spec.bits_per_value(dim) for head in heads])
            row[f"{side}_before"] = cost_of(before, made.objective)
            row[f"{side}_after"] = cost_of(after, made.objective)
        rows.append(row)
    return rows


def summarize(heads: Sequence[HeadPlan]) -> str:
    """`hadamard64`, or `2 x offset, 1 x offset+hadamard64` where the heads of a layer differ, commonest first."""
    counts = Counter(head.transform.name if head.spec.quantized else "f16" for head in heads).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{n} x {name}" for name, n in counts)


def cost_of(scores: Sequence[float], objective: str) -> float:
    """Scores of some heads as one number in the unit of `note_for`: a sum for fisher, else a root mean square."""
    return 1000.0 * sum(scores) if objective == "fisher" else 100.0 * math.sqrt(mean(scores))


def mean(values: Sequence[float]) -> float:
    """Mean, 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def total_row(recipe: Recipe) -> dict[str, Any]:
    """The whole cache in one row under the table: bits averaged, costs of all heads as one."""
    made, total = recipe.provenance, dict[str, Any](layer="all")
    for side, heads in (("k", recipe.k), ("v", recipe.v)):
        dims = [g.head_dim_k if side == "k" else g.head_dim_v for g in recipe.geometry]
        bits = [head.spec.bits_per_value(dim) for layer, dim in zip(heads, dims, strict=True) for head in layer]
        total[f"{side}_bits"] = mean(bits)
        for when in ("before", "after"):
            scores = [score for layer in getattr(made, f"{side}_{when}") for score in layer]
            total[f"{side}_{when}"] = cost_of(scores, made.objective)
    return total


def describe(recipe: Recipe) -> dict[str, Any]:
    """Everything but the arrays, for `-o json`: provenance, shape, and every head's storage and scores."""
    made = recipe.provenance
    return {
        "recipe": recipe.digest(),
        "format_version": recipe.version,
        "arch": recipe.arch,
        "fingerprint": recipe.fingerprint,
        "size_bytes": size_bytes(recipe),
        "bits_per_value": bits_per_value(recipe),
        "sinks": recipe.sinks,
        "window": recipe.window,
        "calibration": {
            "tool_version": made.tool_version,
            "text_name": made.text_name,
            "text_sha256": made.text_sha256,
            "n_chunks": made.n_chunks,
            "chunk_tokens": made.chunk_tokens,
            "n_ctx": made.n_ctx,
            "seed": made.seed,
            "objective": made.objective,
        },
        "layers": [
            {
                "layer": il,
                "n_head_kv": shape.n_head_kv,
                "head_dim_k": shape.head_dim_k,
                "head_dim_v": shape.head_dim_v,
                "k": _heads(recipe.k[il], made.k_before[il], made.k_after[il]),
                "v": _heads(recipe.v[il], made.v_before[il], made.v_after[il]),
            }
            for il, shape in enumerate(recipe.geometry)
        ],
    }


def _heads(heads: Sequence[HeadPlan], before: Sequence[float], after: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "transform": head.transform.name,
            "bits": head.spec.bits,
            "group": head.spec.group,
            "code": head.spec.code,
            "axis": head.spec.axis,
            "clip": head.clip,
            "score_before": b,
            "score_after": a,
        }
        for head, b, a in zip(heads, before, after, strict=True)
    ]


def size_bytes(recipe: Recipe) -> int:
    """Bytes of the recipe's arrays and strings, without the names of the keys."""
    values = recipe.to_metadata().values()
    return sum(v.nbytes if isinstance(v, np.ndarray) else len(v.encode()) if isinstance(v, str) else 4 for v in values)


def bits_per_value(stored: Recipe | CachePlan, side: str | None = None) -> float:
    """Bits per packed value with scales and minima; sinks and window come on top.

    side: "k" or "v"; None is both.
    """
    bits = n = 0.0
    for shape, k, v in zip(stored.geometry, stored.k, stored.v, strict=True):
        for name, heads, dim in (("k", k, shape.head_dim_k), ("v", v, shape.head_dim_v)):
            if side in (None, name):
                bits += sum(head.spec.bits_per_value(dim) for head in heads) * dim
                n += len(heads) * dim
    return bits / n


def header_lines(recipe: Recipe) -> list[str]:
    """Where the recipe comes from and what it makes of the cache, a line each."""
    made = recipe.provenance
    text = f"{made.text_name} (sha256 {made.text_sha256[:12]})"
    return [
        f"recipe {recipe.digest()}, format {recipe.version}, {size_bytes(recipe) / 1024:.1f} KiB, "
        f"by {made.tool_version}",
        f"model: {recipe.arch}, {len(recipe.geometry)} layers, fingerprint {recipe.fingerprint[:12]}",
        f"text: {text}",
        f"calibration: {made.n_chunks} chunks of {made.chunk_tokens} tokens over {made.n_ctx} positions, "
        f"seed {made.seed}, objective {made.objective}",
        f"cache: {bits_per_value(recipe):.2f} bits per packed value, the first {recipe.sinks} and the latest "
        f"{recipe.window} tokens in f16",
    ]
