"""The calibration pass: one layer's weights at a time, the hidden states of all chunks beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkernels.spec import CUBIC_WIDTHS, QuantSpec, default_group
from kvrun.errors import KvError
from kvrun.plan import LayerGeometry
from kvrun.recipe import Provenance, Recipe
from kvrun.recipe_format import by_layer

from . import __version__
from .allocate import allocate
from .choose import Option, options, scored
from .gather import Chunks, Gathered, SideSamples, gather, gather_plain
from .objective import OBJECTIVES, Objective
from .samples import HeadSamples
from .text import Text, cut, held_out, place
from .turned import with_turned

if TYPE_CHECKING:
    from kvrun.models import Model


DEFAULT_CONTEXT = 4096
DEFAULT_BITS = 4.5
#: Widths of codes that the budget is spread over; f16 comes on top.
WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    bits: bits per value of the whole cache, with scales and minima, spread over heads and sides by what they gain.
    bits_k, bits_v: code widths that every head of a side gets instead; None gives the side its share of `bits`.
    shared: where one width is fixed, whether `bits` still holds for both sides together, or only for the other one.
    group: values per scale; None tries 64 and the head, and takes 64 or what divides the head at a fixed width.
    sinks, window, chunk_tokens, n_ctx: tokens.  n_ctx: positions to place chunks over; 0 is what the model was trained
    for, None is that but at most 4096.  objective: a name of `objective.OBJECTIVES`.
    rotating: whether keys are offered the rotating offset too.  guard: whether some more chunks are drawn and held out.
    """

    bits: float = DEFAULT_BITS
    shared: bool = False
    bits_k: int | None = None
    bits_v: int | None = None
    group: int | None = None
    sinks: int = 4
    window: int = 32
    n_chunks: int = 16
    chunk_tokens: int = 512
    n_ctx: int | None = None
    seed: int = 0
    objective: str = "fisher"
    rotating: bool = True
    guard: bool = True

    def check(self, geometry: Sequence[LayerGeometry]) -> None:
        """Raise KvError where a layer's heads cannot be stored as wanted."""
        least = n_all = 0.0
        for shape in geometry:
            for side, dim in (("k", shape.head_dim_k), ("v", shape.head_dim_v)):
                specs = self.specs(side, dim)
                if self.counts(side):
                    least += shape.n_head_kv * dim * min(spec.bits_per_value(dim) for spec in specs)
                    n_all += shape.n_head_kv * dim
        if n_all and least > self.bits * n_all + 1e-6:
            why = f"{self.bits:g} bits are less than the narrowest storage takes, {least / n_all:.2f}"
            raise KvError(f"{why}; give more with --bits")

    @property
    def n_held(self) -> int:
        """Chunks to hold out: a quarter as many as are read, at most two; none that would hardly leave the window."""
        sees_packed = self.chunk_tokens // 2 > self.sinks + self.window
        return min(self.n_chunks // 4, 2) if self.guard and sees_packed else 0

    @property
    def why_none_held(self) -> str:
        """What keeps a chunk from being held out, and what to change."""
        if self.chunk_tokens // 2 <= self.sinks + self.window:
            why = f"half a piece of {self.chunk_tokens} tokens does not leave sinks and window"
            return f"{why}; give more with --chunk-tokens"
        return "it takes 4 pieces and one more of text; give more with --chunks and -f"

    def counts(self, side: str) -> bool:
        """Whether the bits of a side are part of the budget."""
        if self.bits_k is not None and self.bits_v is not None:
            return False
        return self.shared or (self.bits_k if side == "k" else self.bits_v) is None

    def specs(self, side: str, head_dim: int) -> list[QuantSpec]:
        """Storages that a head of a side may get; KvError where one cannot be had."""
        bits = self.bits_k if side == "k" else self.bits_v
        if bits == 16:
            return [QuantSpec(16)]
        if bits is not None:
            return [_spec(bits, self.group or default_group(head_dim), head_dim)]
        # Groups of 32 were hardly ever worth their scales where the cubic code was on offer (docs/log.md).
        groups = [self.group] if self.group else dict.fromkeys([default_group(head_dim), head_dim])
        uniform = [_spec(width, group, head_dim) for group in groups for width in WIDTHS]
        cubic = [QuantSpec(width, group, code="cubic") for group in groups for width in CUBIC_WIDTHS]
        return [*uniform, *cubic, QuantSpec(16)]


def _spec(bits: int, group: int, head_dim: int) -> QuantSpec:
    spec = QuantSpec(bits, group)
    try:
        spec.check_head_dim(head_dim)
    except ValueError as error:
        raise KvError(f"{error}; choose another --group") from error
    return spec


@dataclass(frozen=True)
class Sample:
    """Chunks of text with their positions: tokens, positions int64 [n_chunk, chunk_tokens].

    held: int64 [n, chunk_tokens], chunks from among the others that no choice sees.
    """

    text: Text
    tokens: np.ndarray
    positions: np.ndarray
    n_ctx: int
    held: np.ndarray


def draw(
    text: Text, encode: Callable[[str], Sequence[int]], settings: Settings, n_ctx_train: int, bos: int | None
) -> Sample:
    """Cut the text into chunks and place them over the context; KvError where the text or the context is too short."""
    if settings.chunk_tokens <= settings.sinks:
        raise KvError(f"a chunk of {settings.chunk_tokens} tokens holds nothing but sinks; raise --chunk-tokens")
    trained = n_ctx_train or DEFAULT_CONTEXT
    n_ctx = min(DEFAULT_CONTEXT, trained) if settings.n_ctx is None else settings.n_ctx or trained
    if settings.chunk_tokens > n_ctx:
        raise KvError(f"chunks of {settings.chunk_tokens} tokens exceed the context of {n_ctx}; lower --chunk-tokens")
    wanted = settings.n_chunks + settings.n_held
    rows = cut(text.content, encode, wanted, settings.chunk_tokens, bos=bos)
    held = held_out(len(rows), min(settings.n_held, max(len(rows) - settings.n_chunks, 0)))
    tokens = np.delete(rows, held, 0)
    return Sample(text, tokens, place(len(tokens), settings.chunk_tokens, n_ctx, settings.seed), n_ctx, rows[held])


def read(
    model: Model, sample: Sample, settings: Settings, on_progress: Callable[[int], None] | None = None
) -> Gathered:
    """What the model makes of the text; on_progress is called with the number of chunks read.

    Each chunk is a sequence of its own with full-precision causal attention.
    Raises KvError naming layer and head where a key or value is not a number.
    """
    chunks = Chunks(sample.tokens, sample.positions, settings.sinks, settings.window, settings.seed)
    return (gather if OBJECTIVES[settings.objective].weighs else gather_plain)(model, chunks, on_progress)


def calibrate(model: Model, sample: Sample, settings: Settings) -> Recipe:
    """`read` and `choose_recipe`."""
    return choose_recipe(model, sample, settings, read(model, sample, settings))


@dataclass(frozen=True)
class Offers:
    """Every head of the cache with the ways to store it: heads and options go together, sides are "k" and "v"."""

    heads: list[tuple[str, HeadSamples]]
    options: list[list[Option]]


def choose_recipe(
    model: Model,
    sample: Sample,
    settings: Settings,
    gathered: Gathered,
    on_layer: Callable[[int], None] | None = None,
) -> Recipe:
    """The recipe from what was gathered: options for every head, then the bits spread over them.

    on_layer: called with the number of layers that options were found for.
    Raises KvError naming layer and head where a key or value does not fit float16.
    """
    return spread(model, sample, settings, offer(model, settings, gathered, on_layer))


def offer(
    model: Model, settings: Settings, gathered: Gathered, on_layer: Callable[[int], None] | None = None
) -> Offers:
    """The first half of `choose_recipe`; what comes out serves any budget of bits."""
    geometry, objective = model.config.geometry, OBJECTIVES[settings.objective]
    found = Offers([], [])
    for il, shape in enumerate(geometry):
        for side, samples, dim in (("k", gathered.k[il], shape.head_dim_k), ("v", gathered.v[il], shape.head_dim_v)):
            turn = _turn(model, il, gathered) if side == "k" and settings.rotating else None
            found.options.extend(choose_layer(il, side, samples, settings.specs(side, dim), objective, turn))
            found.heads.extend((side, samples.head(side, ih)) for ih in range(shape.n_head_kv))
        if on_layer is not None:
            on_layer(il + 1)
    return found


def spread(model: Model, sample: Sample, settings: Settings, offers: Offers) -> Recipe:
    """The second half of `choose_recipe`: one option for every head, within the budget."""
    geometry, objective = model.config.geometry, OBJECTIVES[settings.objective]
    heads, offered = offers.heads, offers.options
    counted = [i for i, (side, _) in enumerate(heads) if settings.counts(side)]
    chosen = [min(found, key=lambda option: option.cost) for found in offered]
    if counted:
        sizes = [heads[i][1].x.shape[-1] for i in counted]
        for i, option in zip(counted, allocate([offered[i] for i in counted], sizes, settings.bits), strict=True):
            chosen[i] = option
    choices = [scored(head, option, objective) for (_, head), option in zip(heads, chosen, strict=True)]
    by_side = {
        side: by_layer([c for (s, _), c in zip(heads, choices, strict=True) if s == side], geometry) for side in "kv"
    }
    k, v = by_side["k"], by_side["v"]
    made = Provenance(
        tool_version=f"kvconv {__version__}",
        text_name=sample.text.name,
        text_sha256=sample.text.sha256,
        n_chunks=len(sample.tokens),
        chunk_tokens=settings.chunk_tokens,
        n_ctx=sample.n_ctx,
        seed=settings.seed,
        objective=settings.objective,
        k_before=tuple(tuple(c.before for c in layer) for layer in k),
        k_after=tuple(tuple(c.after for c in layer) for layer in k),
        v_before=tuple(tuple(c.before for c in layer) for layer in v),
        v_after=tuple(tuple(c.after for c in layer) for layer in v),
    )
    return Recipe(
        fingerprint=model.file.fingerprint(),
        arch=model.file.arch,
        geometry=geometry,
        k=tuple(tuple(c.plan for c in layer) for layer in k),
        v=tuple(tuple(c.plan for c in layer) for layer in v),
        sinks=settings.sinks,
        window=settings.window,
        provenance=made,
    )


def _turn(model: Model, il: int, gathered: Gathered) -> Callable[[HeadSamples], HeadSamples]:
    """What adds to a key head's samples of layer `il` what a rotating offset leaves of them."""
    rope = model.rope_of(il)
    return lambda samples: with_turned(samples, rope, gathered.positions, rope.magnitude)


def choose_layer(
    il: int,
    side: str,
    found: SideSamples,
    specs: Sequence[QuantSpec],
    objective: Objective,
    turn: Callable[[HeadSamples], HeadSamples] | None = None,
) -> list[list[Option]]:
    """Options for every head of one side; `turn` adds what a rotating offset leaves of its samples."""
    what = "keys" if side == "k" else "values"
    offered = []
    for ih in range(len(found.x)):
        try:
            samples = found.head(side, ih)
            offered.append(options(samples if turn is None else turn(samples), specs, objective))
        except KvError as error:
            raise KvError(f"{what} of layer {il}, KV head {ih}: {error}") from error
    return offered
