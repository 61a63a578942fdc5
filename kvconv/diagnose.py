"""Which layer breaks a quantizer: one part of the cache is quantized alone, then all parts but that one.

Everything goes through the cache as decoding does, each window as one chunk. While only layer L is quantized, the
layers below it compute what they compute with an f16 cache; while all but layer L are, they compute what they do with
everything quantized. So both passes are run once with the hidden state before every layer kept, and each measurement
starts from one of them at layer L: the result is the same to the last bit, at half the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvkernels.rope_offset import turned_offset
from kvkernels.spec import QuantSpec
from kvkernels.transform import hadamard_block
from kvrun.cache import KVCache, LayerSide
from kvrun.cache_types import plan_for
from kvrun.errors import KvError
from kvrun.evaluation.guard import check_cache_was_read
from kvrun.evaluation.metrics import TokenScores
from kvrun.evaluation.windows import Windows
from kvrun.plan import CachePlan, HeadPlan, HeadTransform

if TYPE_CHECKING:
    from kvrun.models import Model

SIDES = ("k", "v")


@dataclass(frozen=True)
class Part:
    """A part of the cache. side: "k" or "v".  head: a KV head, None for all of the layer."""

    layer: int
    side: str
    head: int | None = None

    @property
    def name(self) -> str:
        """`keys of layer 0`, `values of layer 3, KV head 1`."""
        where = "" if self.head is None else f", KV head {self.head}"
        return f"{'keys' if self.side == 'k' else 'values'} of layer {self.layer}{where}"

    def heads(self, n_head_kv: int) -> range:
        """The KV heads it is made of."""
        return range(n_head_kv) if self.head is None else range(self.head, self.head + 1)


@dataclass(frozen=True)
class Damage:
    """What quantizing a part does.

    kld_only: mean KL divergence in nats per token from the f16 cache when nothing but the part is quantized.
    kld_rest: the same when everything but the part is.  *_se: standard errors.
    error: root mean square of what quantizing changes in the packed tokens, over the root mean square deviation from
        each channel's mean; 0 for a constant head.
    """

    part: Part
    kld_only: float
    kld_only_se: float
    kld_rest: float
    kld_rest_se: float
    error: float


def parts_of(plan: CachePlan, *, heads: bool) -> list[Part]:
    """Every part that the plan quantizes, layer by layer, keys first."""
    found = []
    for il, shape in enumerate(plan.geometry):
        for side in SIDES:
            split = range(shape.n_head_kv) if heads else (None,)
            parts = (Part(il, side, head) for head in split)
            found += [p for p in parts if any(h.spec.quantized for h in heads_of(plan, p))]
    return found


def heads_of(plan: CachePlan, part: Part) -> tuple[HeadPlan, ...]:
    """The plans of the part's heads."""
    layer = (plan.k if part.side == "k" else plan.v)[part.layer]
    return tuple(layer[i] for i in part.heads(len(layer)))


def with_part(plan: CachePlan, part: Part, heads: Sequence[HeadPlan]) -> CachePlan:
    """The plan with the part's heads stored as `heads` says."""
    side = plan.k if part.side == "k" else plan.v
    layer = list(side[part.layer])
    for i, head in zip(part.heads(len(layer)), heads, strict=True):
        layer[i] = head
    changed = (*side[: part.layer], tuple(layer), *side[part.layer + 1 :])
    return replace(plan, k=changed) if part.side == "k" else replace(plan, v=changed)


def in_full(plan: CachePlan) -> CachePlan:
    """The plan with every head stored as f16, sinks and window as they are."""
    f16 = HeadPlan(QuantSpec(16))
    k, v = (tuple(tuple(f16 for _ in layer) for layer in side) for side in (plan.k, plan.v))
    return replace(plan, k=k, v=v)


def tail(plan: CachePlan, first: int) -> CachePlan:
    """The plan of the layers from `first` on."""
    return replace(plan, geometry=plan.geometry[first:], k=plan.k[first:], v=plan.v[first:])


@dataclass
class _Scores:
    """Scores of some plans over all windows, by what is measured."""

    by_name: dict[tuple[Part | None, str], TokenScores] = field(default_factory=dict)

    def of(self, part: Part | None, what: str) -> TokenScores:
        return self.by_name.setdefault((part, what), TokenScores())

    def mean(self, part: Part | None, what: str) -> tuple[float, float]:
        summary = self.of(part, what).summary()
        assert summary.kld_mean is not None and summary.kld_mean_se is not None
        return summary.kld_mean, summary.kld_mean_se


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass over one window. states: [n, n_embd] before each layer and after the last.  logits: of scored positions,
    numpy float32 [n_scored, n_vocab]."""

    states: list[Tensor]
    logits: np.ndarray


class Bench:
    """Runs plans over windows, each window as one chunk, from any layer on.

    Memory: the hidden states before every layer for one window, twice, and one window's logits, twice.
    """

    def __init__(self, model: Model, windows: Windows) -> None:
        self.model, self.windows = model, windows

    def full_pass(self, plan: CachePlan, window: int) -> Pass:
        """All layers, with the state before each kept."""
        states = [self.model.embed(torch.from_numpy(self.windows.tokens[window]))]
        return Pass(states, self._run(plan, 0, states[0], states))

    def resume(
        self, plan: CachePlan, first: int, state: Tensor, watch: Callable[[int, KVCache, Tensor, Tensor], None] | None
    ) -> np.ndarray:
        """Logits of the scored positions when layers from `first` on run on `state`.

        watch: called with each layer's number, cache, keys and values (as `Attend` has them) once they are stored.
        """
        return self._run(plan, first, state, None, watch)

    def _run(
        self,
        plan: CachePlan,
        first: int,
        x: Tensor,
        states: list[Tensor] | None,
        watch: Callable[[int, KVCache, Tensor, Tensor], None] | None = None,
    ) -> np.ndarray:
        n = self.windows.n_ctx
        plan = tail(plan, first)
        cache = KVCache(plan, n, self.model.dtype, rope_of=lambda il: self.model.rope_of(il + first))

        def attend(il: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale, softcap = self.model.attention_scale(il), self.model.attention_softcap
            out = cache.attend(il - first, q, k, v, scale, softcap)
            if watch is not None:
                watch(il, cache, k, v)
            return out

        positions = torch.arange(n)
        for il in range(first, self.model.config.n_layer):
            x = self.model.block(il, x, positions, attend)
            if states is not None:
                states.append(x)
        check_cache_was_read(plan, n, 1, cache.packed_read, cache.tokens_read)
        logits: np.ndarray = self.model.output(x[self.windows.first : n - 1]).numpy()
        return logits

    def score(self, scores: TokenScores, window: int, logits: np.ndarray, reference: np.ndarray) -> None:
        """Add the scored positions of a window."""
        scores.add(logits, self.windows.tokens[window, self.windows.first + 1 :], reference)


@dataclass(frozen=True)
class Diagnosis:
    """What came out. kld_all: KL divergence with everything quantized, and its standard error."""

    plan: CachePlan
    damages: tuple[Damage, ...]
    kld_all: float
    kld_all_se: float
    n_scored: int


@torch.inference_mode()
def diagnose(
    model: Model,
    windows: Windows,
    plan: CachePlan,
    *,
    heads: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """Measure every part of `plan` alone and left out.

    heads: by KV head instead of by layer.  on_progress: called with the number of passes done and of all.
    Raises KvError where the plan quantizes nothing.
    """
    parts = parts_of(plan, heads=heads)
    if not parts:
        raise KvError("this cache quantizes nothing, so nothing can break; choose a type such as -ctk kv4 -ctv kv4")
    f16 = plan_for(plan.geometry, "f16", "f16", recipe=None)
    bench, scores = Bench(model, windows), _Scores()
    squares: dict[Part, np.ndarray] = {part: np.zeros(2) for part in parts}
    total, done = len(windows) * (2 + 2 * len(parts)), 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    for window in range(len(windows)):
        reference = bench.full_pass(f16, window)
        step()
        everything = bench.full_pass(plan, window)
        bench.score(scores.of(None, "all"), window, everything.logits, reference.logits)
        step()
        for part, what, variant in _variants(plan, parts):
            start = (reference if what == "only" else everything).states[part.layer]
            watch = _watch(part, squares) if what == "only" else None
            logits = bench.resume(variant, part.layer, start, watch)
            bench.score(scores.of(part, what), window, logits, reference.logits)
            step()
    damages = []
    for part in parts:
        error, deviation = squares[part]
        relative = float(np.sqrt(error / deviation)) if deviation > 0 else 0.0
        damages.append(Damage(part, *scores.mean(part, "only"), *scores.mean(part, "rest"), relative))
    return Diagnosis(plan, tuple(damages), *scores.mean(None, "all"), len(scores.of(None, "all")))


def _variants(plan: CachePlan, parts: Sequence[Part]) -> Iterator[tuple[Part, str, CachePlan]]:
    nothing = in_full(plan)
    f16 = HeadPlan(QuantSpec(16))
    for part in parts:
        heads = heads_of(plan, part)
        yield part, "only", with_part(nothing, part, heads)
        if len(parts) > 1:
            yield part, "rest", with_part(plan, part, [f16] * len(heads))


def _watch(part: Part, squares: dict[Part, np.ndarray]) -> Callable[[int, KVCache, Tensor, Tensor], None]:
    """Adds up the squared round-trip error and deviation of the part when its layer has been stored."""

    def watch(il: int, cache: KVCache, k: Tensor, v: Tensor) -> None:
        if il == part.layer:
            keys, values = cache.layers[0]
            side, x = (keys, k) if part.side == "k" else (values, v)
            chosen = list(part.heads(x.shape[0]))
            squares[part] += np.array(round_trip(side, x)[:, chosen].sum(1))

    return watch


def round_trip(side: LayerSide, x: Tensor) -> np.ndarray:
    """Squared error and squared deviation from the channel means of the packed tokens: float64 [2, n_head].

    x: [n_head, n, d], what was appended to the empty side, all in one chunk.
    """
    n = x.shape[1]
    restored = side.restore(n - 1)
    if restored is None:
        return np.zeros((2, x.shape[0]))
    stored = x[:, side.sinks : side.packed_end(n)]
    origin = stored if side.offset is None else stored - side.offset[:, None]
    if side.rotating is not None and side.rope is not None:
        turned = turned_offset(side.rotating, side.rope.angles(n, x.dtype), side.rope.style)
        origin = origin - turned[:, side.sinks : side.packed_end(n)]
    error = (side.from_sum(restored) - origin).double().square().sum((1, 2))
    deviation = (stored - stored.mean(1, keepdim=True)).double().square().sum((1, 2))
    return torch.stack([error, deviation]).numpy()


def with_transform(plan: CachePlan, *, hadamard: bool, means: Sequence[Tensor] | None) -> CachePlan:
    """The plan with every head rotated by its largest Hadamard matrix, keys less their means, or both.

    means: per layer [n_head_kv, head_dim]; None subtracts nothing.
    """

    def side(layers: tuple[tuple[HeadPlan, ...], ...], which: str) -> tuple[tuple[HeadPlan, ...], ...]:
        changed = []
        for il, layer in enumerate(layers):
            shape = plan.geometry[il]
            block = hadamard_block(shape.head_dim_k if which == "k" else shape.head_dim_v) if hadamard else 0
            heads = []
            for ih, head in enumerate(layer):
                offset = means[il][ih].numpy() if which == "k" and means is not None else None
                transform = HeadTransform(hadamard=block if block > 1 else 0, offset=offset)
                heads.append(replace(head, transform=transform) if head.spec.quantized else head)
            changed.append(tuple(heads))
        return tuple(changed)

    return replace(plan, k=side(plan.k, "k"), v=side(plan.v, "v"))
