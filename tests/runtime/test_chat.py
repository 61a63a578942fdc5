"""The conversation in the cache: turns evaluate only what is new, and give what reading everything anew would give.

A made-up model stands in for a real one: its next token is a hash of every token in its cache, so one wrong, missing or
stale token changes everything after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvrun.chat import MAX_CHECKPOINTS, ContextFullError, Conversation
from kvrun.engine import Stopped
from kvrun.errors import KvError
from kvrun.generate import Timing
from kvrun.sampling import Sampler, SamplingOptions
from kvrun.tokenizer import Message

END = 256
LETTERS = b" abcdefghijklmnop\n"


class ToyCache:
    """Keeps the tokens. A mark is good only for what was not rewritten since."""

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.held: list[int] = []
        self.n_bytes, self.bits_per_value = 1 << 20, 4.5

    @property
    def n_tokens(self) -> int:
        return len(self.held)

    def mark(self) -> tuple[int, ...]:
        return tuple(self.held)

    def rewind(self, mark: tuple[int, ...]) -> None:
        assert tuple(self.held[: len(mark)]) == mark, "a mark of another past"
        del self.held[len(mark) :]

    def clear(self) -> None:
        self.held.clear()


class ToyEngine:
    """The next token is a hash of all tokens in the cache; about one in twelve ends the answer."""

    name = "toy"

    def __init__(self) -> None:
        self.n_evaluated = 0
        self.fail_after: int | None = None

    def forward(self, tokens: Sequence[int], cache: ToyCache, *, logits: str = "last") -> np.ndarray:
        if self.fail_after is not None and self.n_evaluated >= self.fail_after:
            raise KvError("the model broke")
        cache.held += tokens
        self.n_evaluated += len(tokens)
        assert len(cache.held) <= cache.n_ctx
        digest = hashlib.sha256(repr(cache.held).encode()).digest()
        out = np.zeros((1, END + 1))
        out[0, END if digest[0] < 20 else LETTERS[digest[1] % len(LETTERS)]] = 1
        return out

    def prefill(
        self,
        tokens: Sequence[int],
        cache: ToyCache,
        *,
        n_ubatch: int,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int], None] | None,
    ) -> np.ndarray:
        for first in range(0, len(tokens), n_ubatch):
            if should_stop():
                raise Stopped
            out = self.forward(tokens[first : first + n_ubatch], cache)
            if on_progress is not None:
                on_progress(min(first + n_ubatch, len(tokens)))
        return out


class ToyTokenizer:
    """One token a byte. trims: the template strips answers.  forgets: it shortens answers before the last question."""

    eog = frozenset([END])

    def __init__(self, *, trims: bool = False, forgets: bool = False) -> None:
        self.trims, self.forgets = trims, forgets

    def protect(self, text: str) -> str:
        return text

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def encode_chat(self, text: str, *, start: bool = True) -> list[int]:
        return list(text.encode())

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        text = "^"
        for i, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "assistant":
                content = content.strip() if self.trims else content
                content = content[:3] if self.forgets and i < last else content
            text += f"<{message['role']}>{content}|"
        return text + "<assistant>" * add_generation_prompt


def conversation(tokenizer: ToyTokenizer | None = None, *, n_ctx: int = 4096, **kwargs: Any) -> Conversation:
    sampler = Sampler(SamplingOptions(temp=0.0))
    return Conversation(
        ToyEngine(),  # type: ignore[arg-type]
        tokenizer or ToyTokenizer(),  # type: ignore[arg-type]
        ToyCache(n_ctx),  # type: ignore[arg-type]
        sampler,
        n_ubatch=8,
        **kwargs,
    )


def ask(chat: Conversation, question: str, **kwargs: Any) -> tuple[str, Timing]:
    said: list[str] = []
    timing = chat.ask(question, said.append, **kwargs)
    return "".join(said), timing


def evaluated(chat: Conversation) -> int:
    return chat.engine.n_evaluated  # type: ignore[attr-defined,no-any-return]


def held(chat: Conversation) -> list[int]:
    return chat.cache.held  # type: ignore[attr-defined,no-any-return]


def after(n: int) -> Callable[[], bool]:
    """A flag that is set when it was looked at `n` times."""
    looks = iter(range(n))
    return lambda: next(looks, None) is None


def cache_matches(chat: Conversation) -> bool:
    """Whether the cache holds the beginning of the conversation's tokens, all but one at most."""
    n = chat.cache.n_tokens
    return held(chat) == chat.tokens[:n] and len(chat.tokens) - n <= 1


QUESTIONS = ["What is it?", "Why so?", "And then?", "Really?"]


def test_every_turn_evaluates_only_what_is_new() -> None:
    chat = conversation(system="Be brief.")
    for question in QUESTIONS:
        before, known = evaluated(chat), chat.cache.n_tokens
        answer, timing = ask(chat, question)
        new = len(chat.tokens) - known
        assert evaluated(chat) - before <= new
        assert timing.n_prompt < len(question) + 40
        assert timing.n_generated == len(answer) and timing.reason == "end"
        assert cache_matches(chat)
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 4]
    assert evaluated(chat) == chat.cache.n_tokens, "a token was evaluated twice"


@pytest.mark.parametrize("options", [{}, {"trims": True}, {"forgets": True}], ids=["plain", "trims", "forgets"])
def test_answers_are_those_of_a_fresh_reading(options: dict[str, bool]) -> None:
    chat, history = conversation(ToyTokenizer(**options), n_predict=20), []
    for question in QUESTIONS:
        fresh = conversation(ToyTokenizer(**options), n_predict=20)
        fresh.messages = list(history)
        expected, _ = ask(fresh, question)
        answer, _ = ask(chat, question)
        assert answer == expected
        assert cache_matches(chat)
        history = list(chat.messages)


def test_a_template_that_rewrites_history_goes_back_to_a_checkpoint() -> None:
    chat = conversation(ToyTokenizer(forgets=True), n_predict=30, system="x" * 500)
    ask(chat, "First?")
    before = evaluated(chat)
    ask(chat, "Second?")
    assert evaluated(chat) - before < 100, "the long system prompt was read again"


def test_regenerate_replaces_the_answer_and_reads_nothing_again() -> None:
    chat = conversation(n_predict=15)
    ask(chat, "One?")
    chat.messages, kept = chat.messages, list(chat.messages)
    first, _ = ask(chat, "Two?")
    said: list[str] = []
    timing = chat.regenerate(said.append)
    assert "".join(said) == first, "greedy: the same again"
    assert timing.n_prompt == 0
    assert chat.messages == [*kept, {"role": "user", "content": "Two?"}, {"role": "assistant", "content": first}]
    assert cache_matches(chat)
    fresh = conversation(n_predict=15)
    fresh.messages = list(chat.messages)
    assert ask(chat, "Three?")[0] == ask(fresh, "Three?")[0]


def test_regenerate_needs_a_question() -> None:
    with pytest.raises(KvError, match="nothing was asked"):
        conversation(system="Hello.").regenerate(lambda _: None)


def test_clear_forgets_all_but_the_system_prompt() -> None:
    chat, fresh = conversation(system="Be kind."), conversation(system="Be kind.")
    ask(chat, "One?")
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "Be kind."}] and chat.cache.n_tokens == 0
    assert ask(chat, "Two?")[0] == ask(fresh, "Two?")[0]


def test_a_stopped_answer_stays_as_far_as_it_went() -> None:
    chat = conversation(n_predict=100)
    ask(chat, "One?")
    # looked at before each chunk of 8, before the answer and after each token
    answer, timing = ask(chat, "Two?", should_stop=after(8))
    assert timing.reason == "interrupt" and 0 < len(answer) < 8
    assert chat.messages[-1] == {"role": "assistant", "content": answer} and chat.unanswered is None
    assert cache_matches(chat)
    fresh = conversation(n_predict=100)
    fresh.messages = list(chat.messages)
    assert ask(chat, "Three?")[0] == ask(fresh, "Three?")[0]


def test_a_stopped_question_is_no_part_of_the_history_and_goes_on_when_asked_again() -> None:
    chat = conversation(n_predict=10)
    ask(chat, "One?")
    history, question = list(chat.messages), "Long " * 100 + "?"
    answer, timing = ask(chat, question, should_stop=after(20))
    assert (answer, timing.reason, timing.n_prompt) == ("", "interrupt", 160)
    assert chat.messages == history and chat.unanswered == question
    said: list[str] = []
    timing = chat.regenerate(said.append)
    assert timing.n_prompt < len(question) - 100, "the part that was read is not read again"
    fresh = conversation(n_predict=10)
    fresh.messages = history
    assert "".join(said) == ask(fresh, question)[0]
    assert chat.unanswered is None and cache_matches(chat)


def test_another_question_after_a_stopped_one() -> None:
    chat, fresh = conversation(n_predict=10), conversation(n_predict=10)
    ask(chat, "One?")
    fresh.messages = list(chat.messages)
    ask(chat, "Long " * 100, should_stop=after(9))
    assert ask(chat, "Short?")[0] == ask(fresh, "Short?")[0]
    assert cache_matches(chat)


def test_a_question_that_does_not_fit_changes_nothing() -> None:
    chat, fresh = conversation(n_ctx=200, n_predict=10), conversation(n_ctx=200, n_predict=10)
    ask(chat, "One?")
    history = list(chat.messages)
    with pytest.raises(ContextFullError, match=r"context holds 200; /clear .* -c"):
        ask(chat, "x" * 300)
    assert chat.messages == history and chat.unanswered is None
    fresh.messages = list(history)
    assert ask(chat, "Two?")[0] == ask(fresh, "Two?")[0]


def test_a_full_context_cuts_the_answer_and_says_so() -> None:
    class Endless(ToyTokenizer):
        eog = frozenset()

        def piece(self, token: int) -> bytes:
            return b"." if token == END else bytes([token])

    chat = conversation(Endless(), n_ctx=60)
    answer, timing = ask(chat, "Go on!")
    assert timing.reason == "context" and chat.cache.n_tokens == 60
    assert chat.messages[-1]["content"] == answer != ""
    with pytest.raises(ContextFullError):
        ask(chat, "More!")
    with pytest.raises(ContextFullError):
        ask(chat, "More!")
    chat.clear()
    assert ask(chat, "Go on!")[0] == answer


def test_a_failure_keeps_history_and_cache_in_step() -> None:
    chat = conversation(n_predict=100)
    ask(chat, "One?")
    history = list(chat.messages)
    chat.engine.fail_after = evaluated(chat) + 8  # type: ignore[attr-defined]
    with pytest.raises(KvError, match="broke"):
        ask(chat, "Two?" * 5)
    assert chat.messages == history
    chat.engine.fail_after = None  # type: ignore[attr-defined]
    fresh = conversation(n_predict=100)
    fresh.messages = history
    assert ask(chat, "Two!")[0] == ask(fresh, "Two!")[0]


def test_a_failed_regeneration_keeps_the_answer() -> None:
    chat = conversation(ToyTokenizer(forgets=True), n_predict=5)
    for question in QUESTIONS:
        ask(chat, question)
    history = list(chat.messages)
    chat._forget_cache()
    chat.engine.fail_after = 0  # type: ignore[attr-defined]
    with pytest.raises(KvError, match="broke"):
        chat.regenerate(lambda _: None)
    assert chat.messages == history


def test_n_predict_limits_an_answer() -> None:
    chat = conversation(n_predict=3)
    answer, timing = ask(chat, "One?")
    assert len(answer) == timing.n_generated == 3 and timing.reason == "length"
    assert timing.n_decoded == 2, "the first comes out of the prompt and the last is not evaluated yet"
    silent = conversation(n_predict=0)
    assert ask(silent, "One?")[0] == "" and silent.messages[-1]["content"] == ""


def test_checkpoints_are_few() -> None:
    chat = conversation(n_predict=2, n_ctx=1 << 16)
    for i in range(20):
        ask(chat, f"Question {i}?")
    assert len(chat._checkpoints) <= MAX_CHECKPOINTS
    assert evaluated(chat) == chat.cache.n_tokens


def test_progress_counts_the_new_tokens() -> None:
    chat, seen = conversation(n_predict=2), []
    ask(
        chat,
        "A question of some length, to be read in chunks?",
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1 and seen[-1][0] == seen[-1][1] > 8


def test_the_line_after_a_turn() -> None:
    chat = conversation(n_predict=4)
    _, timing = ask(chat, "One?")
    line = timing.line(chat.cache, chat.engine)
    assert line.startswith("[ Prompt: ") and line.endswith(" t/s | KV 1.0 MiB, 4.50 bits/value | toy ]")
    assert " t/s | Generation: " in line
