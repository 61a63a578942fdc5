"""Text to token ids and back, and chat messages to text, as llama.cpp does it: the vocabulary is llama.cpp's own.

What a person types must never become a control token: `<|im_end|>` in a message is text about a tag, not the end of the
turn. But the template's own tags have to be control tokens, and template and messages come out of the template as one
string. So `render_chat` puts a mark, `GUARD`, inside every control token's text that occurs in a message before the
template sees it, and `encode_chat` cuts the string at the marks: the two halves of the tag are tokenized apart and
match nothing, and messages without such text, nearly all, are tokenized in one piece as llama.cpp does.
"""

from __future__ import annotations

import codecs
import ctypes
import re
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kvrun.errors import KvError

GUARD = "\ufdd0"
"""Marks a broken control token. A noncharacter of Unicode: no text that is meant for exchange holds it."""

Message = dict[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`"""


class Tokenizer:
    """llama.cpp's vocabulary of one GGUF file.

    n_vocab: number of tokens.  bos: id of the token that starts a text, None if there is none.  add_bos: whether a text
    should start with it.  eog: ids that end a generation.  chat_template: Jinja source, None if the file has none.
    Raises KvError when llama.cpp does not accept the file's vocabulary.
    """

    def __init__(self, path: Path | str) -> None:
        from llama_cpp import llama_cpp

        from kvrun import llama_log

        llama_log.silence()
        llama_cpp.llama_backend_init()
        self._api: Any = llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode("utf-8", "surrogateescape"), params)
        if not model:
            why = llama_log.first_error() or "llama.cpp gives no reason"
            raise KvError(f"{path}: llama.cpp cannot read the vocabulary ({why}); check the file with gguf-dump")
        self._free = weakref.finalize(self, llama_cpp.llama_model_free, model)
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.path = Path(path)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        bos = int(llama_cpp.llama_vocab_bos(self._vocab))
        self.bos = bos if bos >= 0 else None
        self.add_bos = bool(llama_cpp.llama_vocab_get_add_bos(self._vocab)) and self.bos is not None
        self.eog = frozenset(i for i in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(self._vocab, i))
        template = llama_cpp.llama_model_chat_template(model, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]:
        """Token ids of `text`.

        bos: put the beginning-of-text token first, if the vocabulary has one.  special: control tokens written out in
        `text` become those tokens instead of plain text.
        """
        ids = self._tokenize(text.encode("utf-8", "replace"), special)
        return [self.bos, *ids] if bos and self.bos is not None else ids

    def _tokenize(self, data: bytes, special: bool) -> list[int]:
        if not data:
            return []
        size = len(data) + 8
        while True:
            buffer = (self._api.llama_token * size)()
            n = self._api.llama_tokenize(self._vocab, data, len(data), buffer, size, False, special)
            if n >= 0:
                return list(buffer[:n])
            if -n <= size:
                raise KvError("llama.cpp cannot tokenize this text; give it in smaller parts")
            size = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token: part of a character at times. Control tokens are empty unless `special`."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`; bytes that are not UTF-8 become U+FFFD. Control tokens are left out unless `special`."""
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", "replace")

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """How the tokens are written that must not come out of a message."""
        kinds = self._api.LLAMA_TOKEN_ATTR_CONTROL | self._api.LLAMA_TOKEN_ATTR_UNKNOWN
        ids = (i for i in range(self.n_vocab) if self._api.llama_vocab_get_attr(self._vocab, i) & kinds)
        texts = (self.piece(i, special=True).decode("utf-8", "replace") for i in ids)
        return frozenset(text for text in texts if len(text) > 1)

    def protect(self, text: str) -> str:
        """`text` of a message with a `GUARD` inside everything that would be read as a control token."""
        text = text.replace(GUARD, "\ufffd")
        cuts = [m.start() + 1 for m in self._control_start.finditer(text) if self._is_control_text_at(text, m.start())]
        return GUARD.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))

    @cached_property
    def _control_start(self) -> re.Pattern[str]:
        starts = "".join(sorted({text[0] for text in self.control_texts}))
        return re.compile(f"[{re.escape(starts)}]" if starts else r"(?!)")

    @cached_property
    def _control_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(text) for text in self.control_texts}))

    def _is_control_text_at(self, text: str, at: int) -> bool:
        return any(text[at : at + n] in self.control_texts for n in self._control_lengths)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as the model's template writes it, for `encode_chat`: contents are protected.

        The template runs in llama-cpp-python's sandbox. Raises KvError if the file has none or the template fails.
        """
        if self._formatter is None:
            raise KvError(
                f"{self.path.name} has no chat template; use `kvrun generate`, which continues a text, or a chat model"
            )
        safe = [{**message, "content": self.protect(message["content"])} for message in messages]
        self._formatter.add_generation_prompt = add_generation_prompt
        try:
            return str(self._formatter(messages=safe).prompt)
        except Exception as error:  # templates come with the file and raise whatever they like
            raise KvError(f"the model's chat template fails: {error}; use `kvrun generate` or another model") from error

    @cached_property
    def _formatter(self) -> Any:
        if self.chat_template is None:
            return None
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        eos = int(self._api.llama_vocab_eos(self._vocab))
        bos_text, eos_text = (
            self.decode([token], special=True) if token is not None and token >= 0 else "" for token in (self.bos, eos)
        )
        try:
            return Jinja2ChatFormatter(template=self.chat_template, eos_token=eos_text, bos_token=bos_text)
        except Exception as error:
            raise KvError(f"the model's chat template is broken: {error}; use `kvrun generate`") from error

    def encode_chat(self, text: str, *, start: bool = True) -> list[int]:
        """Token ids of text from `render_chat`, or of a part of it.

        start: the text begins the conversation, so it gets a beginning-of-text token where the vocabulary wants one
        and the template has not written it.
        """
        first, *rest = text.split(GUARD)
        ids = self.encode(first, special=True) if start else self._continue(first)
        for part in rest:
            ids += self._continue(part)
        needs_bos = start and self.add_bos and ids[:1] != [self.bos]
        return [self.bos, *ids] if needs_bos and self.bos is not None else ids

    def _continue(self, text: str) -> list[int]:
        """Token ids of text that follows other text: SentencePiece vocabularies would put a space before it."""
        if not text or not self._adds_space:
            return self.encode(text, special=True)
        lead = self.encode("\n")
        ids = self.encode("\n" + text, special=True)
        return ids[len(lead) :] if ids[: len(lead)] == lead else self.encode(text, special=True)

    @cached_property
    def _adds_space(self) -> bool:
        return self.decode(self.encode("a")).startswith(" ")


class TextStream:
    """Joins the bytes of tokens into text as they come: a character that is not complete waits for the next token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is complete now."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD if the bytes ended inside a character."""
        return self._decoder.decode(b"", True)
