"""One row of a measurement: what was run, what came out, and why not where nothing came out.

The names of the fields are stable: programs read them from `-o json`. New fields are appended, none is renamed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


def rotation_name(k: bool | None, v: bool | None) -> str:
    """`on`, `k`, `v` or `off`: which sides of a cache are stored rotated."""
    return {(True, True): "on", (True, False): "k", (False, True): "v"}.get((bool(k), bool(v)), "off")


@dataclass(frozen=True)
class ResultRow:
    """One setting of one engine, measured on one text. Figures are None where they were not measured.

    engine: `kvrun` or `llama.cpp`.  type_k, type_v: the cache types by the engine's own names.
    recipe: short hash of the recipe, empty without one.
    rotation: whether cached values are stored rotated (by a Hadamard or a learned matrix): `on`, `k`, `v` or `off`;
        `unknown` where llama.cpp's log does not say.
    n_ctx: tokens per window.  n_scored: positions that every figure is a mean over.
    ppl: perplexity.  kld_mean, kld_p99: KL divergence in nats per token from the same engine's f16 cache.
    same_top: share of positions (0 to 1) where the f16 cache has the same most probable token.
    bits_per_value: allocated bits divided by the values the cache has room for: scales, minima, windows, sinks counted.
    kv_bytes: allocated bytes.  tokens_per_s: tokens of the windows per second of this setting's own forward passes.
    packed_read: quantized tokens that attention read, summed over queries and layers; None where the engine gives no
        count (llama.cpp).
    error: why there are no figures; empty when all went well.

    ppl_se, kld_mean_se, same_top_se: standard errors.  kld_median, kld_p90, kld_p999, kld_max: of the per-token values.
    ln_ppl_ratio, ln_ppl_ratio_se: mean of the paired difference in log-probability from the f16 cache.
    sinks, window: first and latest tokens in full precision.
    impl: which implementation ran.  n_threads: threads of both engines.  version: of the engine.
    model, text, text_sha256: what was measured, on what.
    note: a warning that belongs to the row, for example that the recipe was calibrated on the measured text.
    control: whether the row exists to fail: its figures must be far worse than all others.
    rms_dp: root mean square of the change in the right token's probability, 0 to 1.
    baseline: the row of ours that this one is paired with, token by token; empty for none.
    kld_difference: mean KL divergence less the baseline's.  kld_difference_low, kld_difference_high: its 95 % interval.
    reference: what the divergence is measured from where it is not the f16 cache of the same engine.
    kld_by_position, kld_by_confidence: bins of `kvrun.evaluation.breakdown`.
    """

    engine: str
    type_k: str
    type_v: str
    recipe: str = ""
    rotation: str = "off"
    n_ctx: int = 0
    n_scored: int = 0
    ppl: float | None = None
    kld_mean: float | None = None
    kld_p99: float | None = None
    same_top: float | None = None
    bits_per_value: float | None = None
    kv_bytes: int | None = None
    tokens_per_s: float | None = None
    packed_read: int | None = None
    error: str = ""
    ppl_se: float | None = None
    kld_mean_se: float | None = None
    kld_median: float | None = None
    kld_p90: float | None = None
    kld_p999: float | None = None
    kld_max: float | None = None
    same_top_se: float | None = None
    ln_ppl_ratio: float | None = None
    ln_ppl_ratio_se: float | None = None
    sinks: int | None = None
    window: int | None = None
    impl: str = ""
    n_threads: int | None = None
    version: str = ""
    model: str = ""
    text: str = ""
    text_sha256: str = ""
    note: str = ""
    control: bool = False
    rms_dp: float | None = None
    baseline: str = ""
    kld_difference: float | None = None
    kld_difference_low: float | None = None
    kld_difference_high: float | None = None
    reference: str = ""
    kld_by_position: list[dict[str, float]] | None = None
    kld_by_confidence: list[dict[str, float]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row as plain types, in the order of the fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ResultRow:
        """The row that `as_dict` was made of; keys that this version does not know are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})
