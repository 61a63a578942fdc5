"""Which storage a head gets: candidates go through the real quantizer, and the objective says which lost least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvkernels.quantize import decode, encode
from kvkernels.spec import QuantSpec
from kvrun.errors import KvError
from kvrun.plan import HeadPlan, HeadTransform

from .candidates import Candidate, candidates
from .objective import Objective, Roundtrip
from .samples import HeadSamples, Stored

#: A candidate replaces a simpler one only when its cost is smaller by at least this share.
MARGIN = 0.02
#: Clips that are tried at narrow widths, from `first_clip` on, one after the other as long as they help.
CLIPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
#: Widest code that is clipped: beyond it the steps are too small for it to matter.
CLIPPED_BITS = 4
TOO_LARGE = "a value exceeds 65504, the largest that an f16 cache can hold"
#: Transforms are chosen on about so many tokens.
PROBE_TOKENS = 3000


@dataclass(frozen=True)
class Choice:
    """What one side of one head got.

    before, after: cost of the head as it comes and as chosen, in the unit of the objective; 0 for a constant head.
    """

    plan: HeadPlan
    before: float
    after: float


@dataclass(frozen=True)
class Option:
    """One way to store one side of one head.  bits: per value, with scales and minima.  cost: by the objective."""

    plan: HeadPlan
    bits: float
    cost: float


class Trial:
    """One transform of one head, with what it costs at any width, group and clip."""

    def __init__(self, samples: HeadSamples, transform: HeadTransform, objective: Objective) -> None:
        self.transform = transform
        self.stored = Stored(samples, transform)
        self.meter = objective.meter(samples, self.stored)

    def cost(self, spec: QuantSpec, clip: float = 1.0) -> float:
        """By the real quantizer; groups along tokens do not cross chunks, and tokens that fill none are left out.

        Infinite where a stored value exceeds float16, in which a cache holds what it quantizes.
        """
        if not self.stored.fits:
            return float("inf")
        rows = self.stored.blocks(spec)
        y, exact = self.stored.y[:, rows], self.stored.exact[:, rows]
        if not spec.quantized:
            return self.meter(y.to(exact.dtype) - exact)
        narrowed = None if clip == 1.0 else torch.full((len(y),), clip)
        return self.meter(decode(encode(y, spec, narrowed), spec, exact.dtype) - exact)

    def clipped(self, spec: QuantSpec) -> tuple[float, float]:
        """The clip that costs least, and its cost."""
        if not spec.quantized or spec.bits > CLIPPED_BITS:
            return 1.0, self.cost(spec)
        start = CLIPS.index(first_clip(spec))
        at, cost = start, self.cost(spec, CLIPS[start])
        for step in (1, -1):
            while 0 <= at + step < len(CLIPS) and (tried := self.cost(spec, CLIPS[at + step])) < cost:
                at, cost = at + step, tried
            if at != start:
                break
        return CLIPS[at], cost


def first_clip(spec: QuantSpec) -> float:
    """Where the search for a clip starts: about the best one on normally distributed values."""
    return {2: 0.75, 3: 0.92}.get(spec.bits, 1.0) if spec.code == "cubic" else 1.0


def round_trip_error(x: Tensor, spec: QuantSpec, transform: HeadTransform) -> float:
    """Sum of squared errors after transform, quantizing, restoring and the inverse transform.

    x: float32 [n_chunk, n, head_dim].  Infinite where a transformed value exceeds float16.
    """
    samples = HeadSamples.of(x, "k")
    rows = x.shape[1] // spec.block * spec.block
    per_token = samples.statistics.deviation / samples.statistics.n
    return Trial(samples, transform, Roundtrip()).cost(spec) * per_token * x.shape[0] * rows


def offers(samples: HeadSamples, spec: QuantSpec, pool: Sequence[Candidate]) -> Iterator[HeadTransform]:
    """Every transform that is tried on a head, simplest first; keys are offered each one with the key offset too.

    The offset is the mean of each channel after RoPE.  Subtracting one vector from all keys adds the same number to
    every score of a query, which softmax does not see: smoothing of keys as in SageAttention (arXiv 2410.02367), here
    with a mean that is learned beforehand, so that it is exact for any text.  Where samples have it, keys are also
    offered the mean before RoPE, which turns with the position of each key (`kvkernels.rope_offset`).
    """
    statistics = samples.statistics
    centred = statistics.centred() if samples.side == "k" else statistics
    for candidate in pool:
        transform = candidate.fit(statistics, spec)
        # A learned matrix is made of second moments, in which a mean that the offset takes away has no place.
        if transform is not None and (transform.matrix is None or samples.side == "v"):
            yield transform
        if samples.side == "k" and (transform := candidate.fit(centred, spec)) is not None:
            yield replace(transform, offset=statistics.mean.astype(np.float32))
        turned = samples.turned
        if turned is not None and (transform := candidate.fit(turned.statistics, spec)) is not None:
            yield replace(transform, offset=turned.mean, rotating=True)


def best_trial(
    samples: HeadSamples,
    spec: QuantSpec,
    objective: Objective,
    offered: Iterable[HeadTransform],
    margin: float = MARGIN,
) -> tuple[Trial, float]:
    """The transform that costs least at `spec`, and its cost; the simplest one unless another is better by `margin`."""
    best = Trial(samples, HeadTransform(), objective)
    cost = best.cost(spec)
    if not spec.quantized or samples.statistics.deviation == 0:
        return best, cost
    for transform in offered:
        trial = Trial(samples, transform, objective)
        tried = trial.cost(spec)
        if tried < (1.0 - margin) * cost:
            best, cost = trial, tried
    if not np.isfinite(cost):
        raise KvError(TOO_LARGE)
    return best, cost


def choose_head(
    x: Tensor | HeadSamples,
    spec: QuantSpec,
    side: str = "k",
    *,
    objective: Objective | None = None,
    pool: Sequence[Candidate] | None = None,
    margin: float = MARGIN,
) -> Choice:
    """The best storage of one side ("k" or "v") of one head, at the width and group that `spec` says.

    x: float32 [n_chunk, n, head_dim], keys after RoPE or values, without the sink tokens, finite; or samples.
    Identity stays unless another candidate costs less by `margin`; so it wins ties, and wins where nothing is quantized
    and where the head is constant.  Raises KvError where no candidate fits float16.
    """
    samples = HeadSamples.of(x, side) if isinstance(x, Tensor) else x
    objective = objective or Roundtrip()
    before = Trial(samples, HeadTransform(), objective).cost(spec)
    offered = offers(samples, spec, candidates() if pool is None else pool)
    trial, cost = best_trial(samples, spec, objective, offered, margin)
    if samples.statistics.deviation == 0 or not spec.quantized:
        return Choice(HeadPlan(spec), 0.0, 0.0)
    # Where only the head as it comes overflows float16, all of it is lost.
    return Choice(HeadPlan(spec, trial.transform), _finite(before, samples, objective), cost)


def _finite(cost: float, samples: HeadSamples, objective: Objective) -> float:
    if np.isfinite(cost):
        return cost
    identity = Trial(samples, HeadTransform(), objective)
    mean = torch.from_numpy(samples.statistics.mean).float()
    return identity.meter(mean - samples.x)


def options(
    samples: HeadSamples, specs: Sequence[QuantSpec], objective: Objective, pool: Sequence[Candidate] | None = None
) -> list[Option]:
    """Ways to store one head, at least one per storage in `specs`, with what each costs.

    The transform is chosen on a part of the samples at a narrow and at a wide code of each group size; every storage is
    then offered with the transform and the clip that cost least on all samples.
    """
    dim = samples.x.shape[-1]
    if samples.statistics.deviation == 0:
        return [Option(HeadPlan(spec), spec.bits_per_value(dim), 0.0) for spec in specs]
    pool = candidates() if pool is None else pool
    part = samples.thinned(PROBE_TOKENS) if objective.weighs else samples.unweighed()
    found: dict[bytes, HeadTransform] = {}
    for narrow, middling in probes(specs):
        offered = list(offers(samples, narrow, pool))
        for probe in dict.fromkeys((narrow, middling)):
            transform = best_trial(part, probe, objective, offered)[0].transform
            found[_key(transform)] = transform
    trials = [Trial(samples, transform, objective) for transform in found.values()]
    result = []
    for spec in specs:
        if not spec.quantized:
            cost = Trial(samples, HeadTransform(), objective).cost(spec)
            result.append(Option(HeadPlan(spec), spec.bits_per_value(dim), cost))
            continue
        counted = ((*(t.clipped(spec) if objective.weighs else (1.0, t.cost(spec))), t) for t in trials)
        clip, cost, trial = min(counted, key=lambda tried: tried[1])
        result.append(Option(HeadPlan(spec, trial.transform, clip), spec.bits_per_value(dim), cost))
    fitting = [option for option in result if np.isfinite(option.cost)]
    if not fitting:
        raise KvError(TOO_LARGE)
    return fitting


def probes(specs: Sequence[QuantSpec]) -> list[tuple[QuantSpec, QuantSpec]]:
    """For each axis and group size a narrow and a middling code: where transforms are chosen."""
    found = []
    for axis, group in dict.fromkeys((spec.axis, spec.group) for spec in specs if spec.quantized):
        alike = [spec for spec in specs if (spec.axis, spec.group) == (axis, group)]
        # A code that has no minimum says more about what a transform leaves; where it is offered it mostly wins.
        alike = [spec for spec in alike if spec.code == "cubic"] or alike
        alike.sort(key=lambda spec: spec.bits)
        found.append((alike[0], alike[len(alike) // 2]))
    return found


def _key(transform: HeadTransform) -> bytes:
    arrays = (transform.order, transform.matrix, transform.offset)
    return repr((transform.hadamard, transform.rotating, [None if a is None else a.tobytes() for a in arrays])).encode()


def scored(samples: HeadSamples, option: Option, objective: Objective) -> Choice:
    """The choice of an option, beside what the head would cost at the same storage as it comes."""
    spec = option.plan.spec
    if samples.statistics.deviation == 0 or not spec.quantized:
        return Choice(HeadPlan(spec), 0.0, 0.0)
    before = _finite(Trial(samples, HeadTransform(), objective).cost(spec), samples, objective)
    return Choice(option.plan, max(before, option.cost), option.cost)
