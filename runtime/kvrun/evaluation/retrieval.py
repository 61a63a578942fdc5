"""Does the cache still find what stood far back, and does the model still say the same?

Divergence is measured with the right tokens given; these two checks let the cache's errors add up in the model's own
words. A prompt is read in chunks, which the visibility rule makes the same as token by token; the question, the answer
and everything generated run through the decode path, one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvrun.errors import KvError, MeasurementError
from kvrun.evaluation.metrics import log_softmax
from kvrun.plan import CachePlan

if TYPE_CHECKING:
    from kvrun.cache import KVCache
    from kvrun.engine import Engine

#: What is hidden: a thing and its number. One for each depth, so that no answer can be learned from another.
_THINGS = (
    "lighthouse",
    "orchard",
    "workshop",
    "library",
    "stable",
    "bakery",
    "observatory",
    "mill",
    "garden",
    "cellar",
)

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class NeedleRow:
    """One fact at one depth, found or not.

    depth: 0 (first) to 1 (last).  position: of the fact's first token.  n_tokens: of the prompt with the question.
    answer: the right one.  log_prob, log_prob_f16: of the whole answer, in nats.  found, found_f16: whether greedy
    decoding gives exactly the answer's tokens.
    """

    depth: float
    position: int
    n_tokens: int
    answer: str
    log_prob: float
    log_prob_f16: float
    found: bool
    found_f16: bool


@dataclass(frozen=True)
class GreedyRow:
    """One prompt's greedy continuation beside that of the f16 cache, by token ids.

    n_tokens: of the prompt.  n_same: tokens until they part.  n_generated: tokens compared.
    """

    prompt: int
    n_tokens: int
    n_same: int
    n_generated: int

    @property
    def identical(self) -> bool:
        """Whether they never part."""
        return self.n_same == self.n_generated


@dataclass(frozen=True)
class Needle:
    """A prompt with a fact in it. prompt: with the filler and the fact.  question, answer: tokens that follow."""

    depth: float
    position: int
    prompt: list[int]
    question: list[int]
    answer: list[int]
    answer_text: str


def hide(filler: Sequence[int], encode: Encode, depth: float, n_ctx: int, *, index: int = 0, seed: int = 0) -> Needle:
    """A fact at `depth` of a text, so that prompt, question and answer fill `n_ctx` tokens.

    filler: tokens of a long text, with BOS first where the model adds one.  index: which thing is hidden.
    Raises KvError where the filler or the context is too short, ValueError for a depth outside 0 to 1.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"a depth is from 0 to 1, not {depth}")
    thing = _THINGS[index % len(_THINGS)]
    number = str(np.random.default_rng((seed, index)).integers(10_000, 99_999))
    fact = list(encode(f"\n\nThe secret number of the {thing} is {number}.\n\n"))
    question = list(encode(f"\n\nThe secret number of the {thing} is"))
    answer = list(encode(f" {number}"))
    n_filler = n_ctx - len(fact) - len(question) - len(answer)
    if n_filler < 1:
        raise KvError(f"a context of {n_ctx} tokens leaves no text to hide a fact in; give a larger -c")
    if len(filler) < n_filler:
        raise KvError(
            f"the text has {len(filler)} tokens and {n_filler} are needed; give a longer text or a smaller -c"
        )
    at = 1 + round(depth * (n_filler - 1))
    return Needle(depth, at, [*filler[:at], *fact, *filler[at:n_filler]], question, answer, number)


def needles(
    engine: Engine, plan: CachePlan, f16: CachePlan, hidden: Sequence[Needle], *, n_ubatch: int = 512
) -> Iterator[NeedleRow]:
    """Ask for every hidden fact, with the cache of `plan` and with that of `f16`."""
    for needle in hidden:
        (log_prob, found), (log_prob_f16, found_f16) = (_ask(engine, each, needle, n_ubatch) for each in (plan, f16))
        n = len(needle.prompt) + len(needle.question)
        yield NeedleRow(needle.depth, needle.position, n, needle.answer_text, log_prob, log_prob_f16, found, found_f16)


def _ask(engine: Engine, plan: CachePlan, needle: Needle, n_ubatch: int) -> tuple[float, bool]:
    """Log-probability of the answer, and whether greedy decoding gives it."""
    cache = engine.new_cache(plan, len(needle.prompt) + len(needle.question) + len(needle.answer))
    engine.prefill(needle.prompt, cache, n_ubatch=n_ubatch)
    total, found = 0.0, True
    for token in needle.question:
        logits = engine.forward([token], cache)
    for token in needle.answer:
        row = log_softmax(logits.numpy())[0]
        total += float(row[token])
        # Greedy decoding gives the answer exactly if every token of it is the likeliest after those before.
        found = found and int(row.argmax()) == token
        logits = engine.forward([token], cache)
    _check_read(plan, cache)
    return total, found


def greedy_continuation(
    engine: Engine, plan: CachePlan, prompt: Sequence[int], n_predict: int, eog: frozenset[int], *, n_ubatch: int = 512
) -> list[int]:
    """The likeliest token, `n_predict` times or until the model ends (that token is the last one)."""
    cache = engine.new_cache(plan, len(prompt) + n_predict)
    logits = engine.prefill(prompt, cache, n_ubatch=n_ubatch)
    tokens: list[int] = []
    while True:
        tokens.append(int(logits[0].argmax()))
        if len(tokens) == n_predict or tokens[-1] in eog:
            _check_read(plan, cache)
            return tokens
        logits = engine.forward(tokens[-1:], cache)


def greedy(
    engine: Engine,
    plan: CachePlan,
    f16: CachePlan,
    prompts: Sequence[Sequence[int]],
    n_predict: int,
    eog: frozenset[int] = frozenset(),
    *,
    n_ubatch: int = 512,
) -> Iterator[GreedyRow]:
    """Continue every prompt with the cache of `plan` and with that of `f16`, and say where the token ids part."""
    if n_predict < 1:
        raise KvError("nothing would be generated; give -n 1 or more")
    for number, prompt in enumerate(prompts):
        ours, theirs = (
            greedy_continuation(engine, each, prompt, n_predict, eog, n_ubatch=n_ubatch) for each in (plan, f16)
        )
        pairs = zip(ours, theirs, strict=False)
        n_same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        yield GreedyRow(number, len(prompt), n_same, len(theirs))


def _check_read(plan: CachePlan, cache: KVCache) -> None:
    if plan.quantizes and not cache.packed_read:
        raise MeasurementError(
            f"refused: {plan.type_k}/{plan.type_v} read no packed token, {plan.sinks} sinks and a window of "
            f"{plan.window} cover these prompts; give longer ones"
        )
