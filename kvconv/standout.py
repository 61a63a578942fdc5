"""Which part of a cache stands out, and what repairs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvkernels.spec import CUBIC_WIDTHS, QuantSpec
from kvkernels.transform import hadamard_block
from kvrun.cache_types import plan_for
from kvrun.evaluation.metrics import TokenScores
from kvrun.plan import CachePlan, HeadPlan, HeadTransform

from .diagnose import Bench, Damage, Diagnosis, Part, heads_of, in_full, with_part
from .stream import stream

if TYPE_CHECKING:
    from kvrun.evaluation.windows import Windows
    from kvrun.models import Model

#: A part stands out when the logarithm of its damage lies so many robust standard deviations above the median
#: (Iglewicz and Hoaglin's modified z-score), ...
Z_LIMIT = 3.5
#: ... or when leaving it out takes away more than this share of the damage of the whole cache.
DOMINANT_SHARE = 0.5
#: Layers that are all alike have a spread near zero; differences below this factor never count as one deviation.
MIN_SPREAD = float(np.log(1.25))
#: What stands out among its like may still be harmless beside the other side of the cache.
MIN_SHARE = 0.1
#: At most so many parts are named, the worst first.
MAX_NAMED = 3
_WIDER = (3, 4, 5, 6, 8)


@dataclass(frozen=True)
class StandOut:
    """A part that stands out. median: KL divergence of its like, alone.  z: robust deviations on the log scale."""

    damage: Damage
    median: float
    z: float

    @property
    def factor(self) -> float:
        """How many times the median it is."""
        return self.damage.kld_only / self.median if self.median > 0 else float("inf")


@dataclass(frozen=True)
class Repair:
    """One way to store a part that stands out, measured.

    setting: for people, such as `offset+hadamard64`, `5 bits`, `f16`.  kld_only: with nothing but the part quantized
    that way.  kld_all: with the whole cache quantized and the part stored that way.  extra_bits: per value of the
    part, over what it had.  enough: whether the part no longer stands out, at half of its damage or less, and the
    whole cache gains.
    """

    setting: str
    kld_only: float
    kld_all: float
    extra_bits: float
    enough: bool


@dataclass(frozen=True)
class Finding:
    """A part that stands out, with everything that was tried and what is advised, the cheapest that is enough."""

    what: StandOut
    tried: tuple[Repair, ...]
    advice: Repair | None
    kld_all: float

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        damage, factor = self.what.damage, self.what.factor
        name = damage.part.name[0].upper() + damage.part.name[1:]
        alone = "far above the median, which is 0" if np.isinf(factor) else f"{factor:.3g} times the median"
        start = f"{name} stand out: quantized alone they cost {damage.kld_only:.4g} nats, {alone}"
        if self.advice is None:
            return f"{start}; nothing that was tried repairs them."
        a = self.advice
        return (
            f"{start}; storing them as {a.setting} brings that to {a.kld_only:.2g}, and the whole cache from "
            f"{self.kld_all:.4g} to {a.kld_all:.4g}."
        )


def limit_of(values: Sequence[float]) -> tuple[float, float]:
    """Median of the logarithms, and one robust standard deviation (1.4826 times the median absolute deviation)."""
    logs = np.log(np.maximum(np.asarray(values, dtype=np.float64), 1e-12))
    median = float(np.median(logs))
    return median, max(1.4826 * float(np.median(np.abs(logs - median))), MIN_SPREAD)


def stand_outs(damages: Sequence[Damage], kld_all: float) -> list[StandOut]:
    """Parts that do far more damage than their like, worst first.

    Either the damage of a part alone is an outlier among the parts of the same side, on a logarithmic scale, by a
    median and a median absolute deviation that a few broken layers cannot move, and at least a tenth of the damage of
    the whole cache; or leaving it out takes away more than half of that. Fewer than 5 parts have no spread to speak
    of, so that only the second rule holds.
    """
    found = []
    for side in ("k", "v"):
        like = [d for d in damages if d.part.side == side]
        median, spread = limit_of([d.kld_only for d in like]) if like else (0.0, 1.0)
        for damage in like:
            z = (float(np.log(max(damage.kld_only, 1e-12))) - median) / spread
            outlier = len(like) >= 5 and z > Z_LIMIT and damage.kld_only > MIN_SHARE * kld_all
            if outlier or (len(like) > 1 and damage.kld_rest < (1 - DOMINANT_SHARE) * kld_all):
                found.append(StandOut(damage, float(np.exp(median)), z))
    return sorted(found, key=lambda s: -s.damage.kld_only)[:MAX_NAMED]


@torch.inference_mode()
def key_means(model: Model, tokens: np.ndarray, sinks: int) -> list[Tensor]:
    """Mean of each channel of the keys after RoPE, without the first `sinks` tokens: per layer [n_head_kv, head_dim].

    tokens: int64 [n_windows, n_ctx].
    """
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    records = stream(model, torch.from_numpy(tokens), positions)
    return [record.keys[:, :, sinks:].mean((1, 2)) for record in records]


def offers(heads: Sequence[HeadPlan], side: str, means: Tensor | None, head_dim: int) -> Iterator[list[HeadPlan]]:
    """Other ways to store the heads, the cheapest first: transforms at the same size, then more bits, then f16.

    means: [n_head, head_dim], of the keys; None offers no offset.
    """
    block = hadamard_block(head_dim)
    offsets = [None] if side == "v" or means is None else [None, means]
    plain = [HeadTransform(hadamard=h) for h in ((0, block) if block > 1 else (0,))]
    for transform in plain:
        for offset in offsets:
            new = [
                replace(head, transform=replace(transform, offset=None if offset is None else offset[i].numpy()))
                for i, head in enumerate(heads)
            ]
            if any(n.transform.name != h.transform.name for n, h in zip(new, heads, strict=True)):
                yield new
    widest = max(head.spec.bits for head in heads)
    for bits in (b for b in _WIDER if b > widest):
        yield [replace(head, spec=_wider(head.spec, bits)) for head in heads]
    yield [HeadPlan(QuantSpec(16)) for _ in heads]


def _wider(spec: QuantSpec, bits: int) -> QuantSpec:
    """The same with more bits; uniform where the cubic code has no such width."""
    narrow = spec.code == "cubic" and bits not in CUBIC_WIDTHS
    return replace(spec, bits=bits, code="uniform" if narrow else spec.code)


def setting_name(new: Sequence[HeadPlan], old: Sequence[HeadPlan]) -> str:
    """What is different about `new`, for people."""
    if not any(h.spec.quantized for h in new):
        return "f16"
    if new[0].spec.bits != max(h.spec.bits for h in old):
        return f"{new[0].spec.bits} bits"
    return " or ".join(dict.fromkeys(h.transform.name for h in new))


@torch.inference_mode()
def find(
    model: Model,
    windows: Windows,
    diagnosis: Diagnosis,
    *,
    means: Callable[[], list[Tensor]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Name what stands out and try what may repair it, each through the cache on the same windows.

    means: gives `key_means`, learned on another text; called only where something stands out.
    """
    named = stand_outs(diagnosis.damages, diagnosis.kld_all)
    findings = []
    learned = means() if named else []
    for index, what in enumerate(named):
        part = what.damage.part
        heads = heads_of(diagnosis.plan, part)
        head_means = learned[part.layer][list(part.heads(len(learned[part.layer])))]
        shape = diagnosis.plan.geometry[part.layer]
        dim = shape.head_dim_k if part.side == "k" else shape.head_dim_v
        candidates = list(offers(heads, part.side, head_means, dim))
        like = [d.kld_only for d in diagnosis.damages if d.part.side == part.side]
        median, spread = limit_of(like)
        limit = max(float(np.exp(median + Z_LIMIT * spread)), MIN_SHARE * diagnosis.kld_all)
        tried = []
        measured = _measure(
            model, windows, diagnosis.plan, part, candidates, partial(_advance, on_progress, index, len(named))
        )
        for new, (only, everything) in zip(candidates, measured, strict=True):
            bits = [n.spec.bits_per_value(dim) - h.spec.bits_per_value(dim) for n, h in zip(new, heads, strict=True)]
            enough = only <= limit and only < 0.5 * what.damage.kld_only and everything < diagnosis.kld_all
            tried.append(Repair(setting_name(new, heads), only, everything, sum(bits) / len(bits), enough))
        findings.append(Finding(what, tuple(tried), _advice(tried), diagnosis.kld_all))
    return findings


def _advance(on_progress: Callable[[int, int], None], index: int, n_named: int, done: int, total: int) -> None:
    on_progress(index * total + done, n_named * total)


def _advice(tried: Sequence[Repair]) -> Repair | None:
    """The cheapest that is enough; of those that cost the same, the one that leaves the smallest damage."""
    enough = [repair for repair in tried if repair.enough]
    return min(enough, key=lambda r: (r.extra_bits, r.kld_all), default=None)


def _measure(
    model: Model,
    windows: Windows,
    plan: CachePlan,
    part: Part,
    candidates: Sequence[Sequence[HeadPlan]],
    on_progress: Callable[[int, int], None],
) -> list[tuple[float, float]]:
    """For every candidate the mean KL divergence with only the part quantized so, and with the whole cache."""
    bench = Bench(model, windows)
    f16 = plan_for(plan.geometry, "f16", "f16", recipe=None)
    scores = [(TokenScores(), TokenScores()) for _ in candidates]
    total, done = len(windows) * len(candidates), 0
    for window in range(len(windows)):
        reference, everything = bench.full_pass(f16, window), bench.full_pass(plan, window)
        for new, (alone, whole) in zip(candidates, scores, strict=True):
            for score, base, states in ((alone, in_full(plan), reference.states), (whole, plan, everything.states)):
                logits = bench.resume(with_part(base, part, new), part.layer, states[part.layer], None)
                bench.score(score, window, logits, reference.logits)
            done += 1
            on_progress(done, total)
    return [(float(alone.kld.mean()), float(whole.kld.mean())) for alone, whole in scores]
