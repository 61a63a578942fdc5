"""Token by token: what chat and raw completion have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvrun.errors import KvError

if TYPE_CHECKING:
    from kvrun.cache import KVCache
    from kvrun.engine import Engine
    from kvrun.sampling import Sampler

Reason = Literal["end", "length", "context", "interrupt"]


@dataclass
class Timing:
    """What one answer cost.

    n_prompt, prompt_s: tokens evaluated before the first new one and the seconds this took.  n_generated: new tokens.
    n_decoded, decode_s: those that were evaluated one by one, and the seconds with sampling (the first new token comes
    out of the prompt).  reason: why the generation ended: the model ended it, `-n`, the context is full, or Ctrl-C.
    """

    n_prompt: int = 0
    prompt_s: float = 0.0
    n_generated: int = 0
    n_decoded: int = 0
    decode_s: float = 0.0
    reason: Reason = "end"

    def line(self, cache: KVCache, engine: Engine) -> str:
        """`[ Prompt: x t/s | Generation: y t/s | KV n MiB, b bits/value | engine ]`"""
        kv = f"KV {cache.n_bytes / 2**20:.1f} MiB, {cache.bits_per_value:.2f} bits/value"
        prompt, generation = _rate(self.n_prompt, self.prompt_s), _rate(self.n_decoded, self.decode_s)
        return f"[ Prompt: {prompt:.1f} t/s | Generation: {generation:.1f} t/s | {kv} | {engine.name} ]"


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n and seconds > 0 else 0.0


def never() -> bool:
    """The `should_stop` of a generation that nobody interrupts."""
    return False


def read_prompt(
    engine: Engine,
    cache: KVCache,
    tokens: Sequence[int],
    timing: Timing,
    *,
    n_ubatch: int = 512,
    should_stop: Callable[[], bool] = never,
    on_progress: Callable[[int], None] | None = None,
) -> Any:
    """Append `tokens` to the cache; returns the logits after the last one, [1, n_vocab].

    on_progress: gets the number of tokens done.  Raises `kvrun.engine.Stopped` between chunks when `should_stop` says
    so, and KvError before anything is evaluated when the tokens do not fit.
    """
    if not tokens:
        raise KvError("the prompt is empty; give some text with -p or -f")
    if cache.n_tokens + len(tokens) > cache.n_ctx:
        raise KvError(
            f"the prompt needs {cache.n_tokens + len(tokens)} tokens and the context holds {cache.n_ctx}; "
            "give a larger -c or a shorter text"
        )
    before, start = cache.n_tokens, time.perf_counter()
    try:
        return engine.prefill(tokens, cache, n_ubatch=n_ubatch, should_stop=should_stop, on_progress=on_progress)
    finally:
        timing.n_prompt += cache.n_tokens - before
        timing.prompt_s += time.perf_counter() - start


def new_tokens(
    engine: Engine,
    cache: KVCache,
    logits: Any,
    sampler: Sampler,
    eog: frozenset[int],
    timing: Timing,
    *,
    n_predict: int = -1,
    should_stop: Callable[[], bool] = never,
) -> Iterator[int]:
    """New tokens after a prompt whose last logits are `logits`, until `timing.reason`; n_predict < 0 has no limit.

    A token that was yielded is evaluated only when the next one is asked for, so the last one is not in the cache yet.
    The token that ends the generation is not yielded.
    """

    def ended() -> bool:
        if 0 <= n_predict <= timing.n_generated:
            timing.reason = "length"
            return True
        timing.reason = "interrupt"
        return should_stop()

    if ended():
        return
    while True:
        start = time.perf_counter()
        token = sampler.sample(logits)
        timing.decode_s += time.perf_counter() - start
        if token in eog:
            timing.reason = "end"
            return
        timing.n_generated += 1
        yield token
        if ended():
            return
        if cache.n_tokens >= cache.n_ctx:
            timing.reason = "context"
            return
        start = time.perf_counter()
        logits = engine.forward([token], cache, logits="last")
        timing.n_decoded += 1
        timing.decode_s += time.perf_counter() - start
