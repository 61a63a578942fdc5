"""The text that is measured when the user names none."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

from kvrun.evaluation.texts import MeasuredText, default_text


def test_the_default_text_is_prose_is_the_same_each_time_and_is_not_the_calibrators() -> None:
    from pydoc_data.topics import topics

    text = default_text()
    assert len(text.text) >= 100_000
    assert default_text().sha256 == text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()
    assert "Python" in text.name
    letters = sum(c.isalpha() or c.isspace() for c in text.text)
    assert letters / len(text.text) > 0.85
    assert ">>>" not in text.text
    calibration = "\n".join(topics.values())
    shared = [p for p in text.text.split("\n\n") if len(p) > 200 and p in calibration]
    assert not shared


def recipe(sha256: str) -> Any:
    return SimpleNamespace(provenance=SimpleNamespace(text_sha256=sha256))


def test_the_calibration_text_is_recognized() -> None:
    text = MeasuredText("a.txt", "Ein Text, ünd noch einer.\n")
    data = text.text.encode()
    assert text.was_used_by(recipe(hashlib.sha256(data).hexdigest()))
    assert text.was_used_by(recipe(hashlib.sha256(b"\xef\xbb\xbf" + data).hexdigest()))
    assert not text.was_used_by(recipe(hashlib.sha256(data + b" ").hexdigest()))
    assert not text.was_used_by(None)
