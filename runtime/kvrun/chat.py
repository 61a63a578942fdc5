"""A conversation that stays in the packed cache: every turn evaluates only what is new.

After a turn the cache holds the tokens of a known text: the prompt as the template wrote it, followed by the answer as
the model said it. When the next turn's text begins with that text, only the rest is tokenized and evaluated (answers
are never tokenized again: a model is free to say a word in other tokens than the tokenizer would choose). Some
templates rewrite what was said before, and `/regen` takes an answer back. Then the cache goes back to the latest
checkpoint whose text still begins the new one, or is read anew. Checkpoints are exact: the packed region is
append-only, and a checkpoint keeps a copy of the part that is in full precision, and of what layers with a sliding
window hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrun.errors import KvError
from kvrun.generate import Timing, never, new_tokens, read_prompt
from kvrun.tokenizer import Message, TextStream, Tokenizer

if TYPE_CHECKING:
    from kvrun.cache import KVCache, Mark
    from kvrun.engine import Engine
    from kvrun.sampling import Sampler

MAX_CHECKPOINTS = 8
"""Each holds the full-precision part of the cache, some MiB for a large model. Going back further reads anew."""


class ContextFullError(KvError):
    """The conversation does not fit the context any more."""


@dataclass(frozen=True)
class Checkpoint:
    """A point to which the cache can go back.

    text: from the template, which the first `n_tokens` tokens stand for.  mark: of the cache, which may lack the latest
    of those tokens.  logits: after the last token where a generation begins here, else None.
    """

    text: str
    n_tokens: int
    mark: Mark
    logits: Any = None


class Conversation:
    """Messages, the cache that holds them, and the turns that extend both.

    messages: what was said, from the system prompt on.  tokens: what the conversation so far consists of; the cache
    holds all of them but the latest few.  unanswered: a question that was interrupted before its answer began.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        cache: KVCache,
        sampler: Sampler,
        *,
        system: str | None = None,
        n_predict: int = -1,
        n_ubatch: int = 512,
    ) -> None:
        self.engine, self.tokenizer, self.cache, self.sampler = engine, tokenizer, cache, sampler
        self.n_predict, self.n_ubatch = n_predict, n_ubatch
        self.system = system
        self.messages: list[Message] = []
        self.tokens: list[int] = []
        self.unanswered: str | None = None
        self._text = ""
        self._checkpoints: list[Checkpoint] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.unanswered = None
        self._forget_cache()

    def _forget_cache(self) -> None:
        self.cache.clear()
        self.tokens, self._text, self._checkpoints = [], "", []

    def ask(
        self,
        question: str,
        on_text: Callable[[str], None],
        *,
        should_stop: Callable[[], bool] = never,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Timing:
        """One turn: the question goes in, the answer goes to `on_text` bit by bit and both into the history.

        should_stop: looked at between tokens and between chunks of the prompt. An answer that was stopped stays in the
        history as far as it went; a question that was stopped before its answer began does not, but asked again it goes
        on from where it was.  on_progress: gets tokens of the prompt done and in all.
        Raises ContextFullError, and whatever goes wrong, with the history as it was before the question.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        timing = Timing()
        logits = self._read(messages, timing, should_stop, on_progress)
        if logits is None:
            timing.reason, self.unanswered = "interrupt", question
            return timing
        self.unanswered = None
        self._answer(messages, logits, timing, on_text, should_stop)
        return timing

    def regenerate(
        self,
        on_text: Callable[[str], None],
        *,
        should_stop: Callable[[], bool] = never,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Timing:
        """Answer the latest question again, in place of the answer it got. Raises KvError if nothing was asked."""
        before = self.messages
        if self.unanswered is not None:
            question = self.unanswered
        elif before and before[-1]["role"] == "assistant":
            self.messages, question = before[:-2], before[-2]["content"]
        else:
            raise KvError("nothing was asked yet, so there is no answer to generate again")
        try:
            return self.ask(question, on_text, should_stop=should_stop, on_progress=on_progress)
        except KvError:
            self.messages = before
            raise

    def _read(
        self,
        messages: Sequence[Message],
        timing: Timing,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int, int], None] | None,
    ) -> Any:
        """Bring the cache to where the next answer begins; returns the logits there, or None if it was stopped."""
        from kvrun.engine import Stopped

        prompt = self.tokenizer.render_chat(messages, add_generation_prompt=True)
        logits = self._go_back(prompt)
        if logits is not None:
            return logits
        rest = prompt[len(self._text) :]
        added = self.tokenizer.encode_chat(rest, start=not self._text)
        if len(self.tokens) + len(added) >= self.cache.n_ctx:
            raise ContextFullError(
                f"the conversation needs {len(self.tokens) + len(added)} tokens and an answer, and the context holds "
                f"{self.cache.n_ctx}; /clear starts anew, or start again with a larger -c"
            )
        self._add_checkpoint()
        self.tokens += added
        self._text = prompt
        missing = self.tokens[self.cache.n_tokens :]

        def report(done: int) -> None:
            if on_progress is not None:
                on_progress(done, len(missing))

        try:
            logits = read_prompt(
                self.engine,
                self.cache,
                missing,
                timing,
                n_ubatch=self.n_ubatch,
                should_stop=should_stop,
                on_progress=report,
            )
        except Stopped:
            return None
        self._add_checkpoint(logits)
        return logits

    def _go_back(self, prompt: str) -> Any:
        """Leave in the cache only what `prompt` begins with; returns the logits if that is all of it, else None."""
        if self._text and prompt.startswith(self._text) and self._is_unread(prompt):
            return None
        while self._checkpoints:
            point = self._checkpoints[-1]
            if prompt.startswith(point.text) and (point.logits is not None or point.text != prompt):
                self.cache.rewind(point.mark)
                self.tokens, self._text = self.tokens[: point.n_tokens], point.text
                return point.logits if point.text == prompt else None
            self._checkpoints.pop()
        self._forget_cache()
        return None

    def _is_unread(self, prompt: str) -> bool:
        """Whether something of `prompt` is left to evaluate, so that there will be logits."""
        return prompt != self._text or self.cache.n_tokens < len(self.tokens)

    def _add_checkpoint(self, logits: Any = None) -> None:
        if self.cache.n_tokens:
            self._checkpoints.append(Checkpoint(self._text, len(self.tokens), self.cache.mark(), logits))
            del self._checkpoints[:-MAX_CHECKPOINTS]

    def _answer(
        self,
        messages: list[Message],
        logits: Any,
        timing: Timing,
        on_text: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> None:
        stream, said = TextStream(), []

        def say(text: str) -> None:
            if text:
                said.append(text)
                on_text(text)

        try:
            for token in new_tokens(
                self.engine,
                self.cache,
                logits,
                self.sampler,
                self.tokenizer.eog,
                timing,
                n_predict=self.n_predict,
                should_stop=should_stop,
            ):
                self.tokens.append(token)
                say(stream.feed(self.tokenizer.piece(token)))
            say(stream.finish())
        finally:
            answer = "".join(said)
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            self._text += self.tokenizer.protect(answer)
