"""llama.cpp's own log: kept off stderr, the first error remembered for our message."""

from __future__ import annotations

import ctypes

from llama_cpp import llama_cpp

ERROR_LEVEL = 4
"""`GGML_LOG_LEVEL_ERROR` in ggml.h."""

_errors: list[str] = []


@llama_cpp.llama_log_callback
def _remember(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level == ERROR_LEVEL:
        _errors.append(text.decode("utf-8", "replace").strip())


def silence() -> None:
    """Take llama.cpp's log over. The callback is module data: llama.cpp keeps a pointer to it for ever."""
    _errors.clear()
    llama_cpp.llama_log_set(_remember, ctypes.c_void_p(0))


def first_error() -> str:
    """The first error since `silence`, which names the cause (later ones only say who gave up); empty if none."""
    return _errors[0] if _errors else ""
