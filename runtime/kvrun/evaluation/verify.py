"""Proof that the parallel path computes what decoding computes: the same tokens both ways, compared.

Because of the visibility rule (`kvrun.visibility`) a chunk's queries see exactly what they would see token by token, so
both paths are the same function and differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvrun.errors import KvError, MeasurementError
from kvrun.evaluation.guard import expected_packed_reads
from kvrun.evaluation.metrics import log_softmax
from kvrun.plan import CachePlan

if TYPE_CHECKING:
    from kvrun.engine import Engine

#: Largest difference of any log-probability in float64.
MAX_LOG_PROB = 1e-9
#: Largest mean KL divergence in float32, in nats.
MAX_MEAN_KLD = 1e-5

WHY_NO_LIMIT = (
    "without a window, rounding in float32 flips codes and the flips spread, so the paths may part: nothing is "
    "concluded; use --dtype float64 for a proof"
)


@dataclass(frozen=True)
class Verification:
    """How far the two paths are apart over `n_tokens` tokens.

    max_log_prob: largest difference of any token's log-probability.  mean_kld: in nats, of parallel from decoded.
    decisive: whether a limit applies (see `WHY_NO_LIMIT`).
    """

    n_tokens: int
    max_log_prob: float
    mean_kld: float
    decisive: bool


def verify_paths(engine: Engine, plan: CachePlan, tokens: Sequence[int]) -> Verification:
    """Feed `tokens` as one chunk and token by token, each through a cache of its own.

    Raises MeasurementError where the log-probabilities differ by more than `MAX_LOG_PROB` in float64, or by more than
    `MAX_MEAN_KLD` in the mean in float32 with a window (or nothing quantized). Raises KvError where the tokens fill no
    packed block: nothing would be verified.
    """
    n = len(tokens)
    if n < 2:
        raise KvError("--verify needs at least 2 tokens")
    if plan.quantizes and not expected_packed_reads(plan, n):
        raise KvError(
            f"the first {n} tokens fill no packed block ({plan.sinks} sinks, window {plan.window}), so decoding them "
            "verifies nothing; give a larger --verify"
        )
    parallel = log_softmax(engine.forward(tokens, engine.new_cache(plan, n), logits="all").numpy())
    cache = engine.new_cache(plan, n)
    max_log_prob = total_kld = 0.0
    for i, token in enumerate(tokens):
        decoded = log_softmax(engine.forward([token], cache).numpy())[0]
        difference = decoded - parallel[i]
        max_log_prob = max(max_log_prob, float(np.abs(difference).max()))
        total_kld += float((np.exp(decoded) * difference).sum())
    exact = engine.dtype == torch.float64
    found = Verification(n, max_log_prob, total_kld / n, exact or plan.window > 0 or not plan.quantizes)
    name = f"{plan.type_k}/{plan.type_v}"
    if exact and not max_log_prob <= MAX_LOG_PROB:
        raise MeasurementError(
            f"the parallel and the decode path of {name} part: log-probabilities differ by up to {max_log_prob:.1e} "
            f"(limit {MAX_LOG_PROB:.0e}); please report this"
        )
    if not exact and found.decisive and not found.mean_kld <= MAX_MEAN_KLD:
        raise MeasurementError(
            f"the parallel and the decode path of {name} part: mean KL divergence {found.mean_kld:.1e} (limit "
            f"{MAX_MEAN_KLD:.0e}); repeat with --dtype float64, and please report it if that fails too"
        )
    return found
