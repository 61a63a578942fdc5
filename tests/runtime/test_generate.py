"""`kvrun generate`: the continuation and nothing else on stdout, the same whatever the chunks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvrun import console
from kvrun.cli import app
from kvrun.engine import Engine
from kvrun.generate import Timing, new_tokens
from kvrun.models import load_model
from kvrun.sampling import Sampler, SamplingOptions
from kvrun.tokenizer import TextStream, Tokenizer

PROMPT = "The capital of France is"
QUIET = ["-t", "1", "-c", "256"]


def generate(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = console.exit_status(app, ["generate", *argv, *QUIET], prog="kvrun")
    out, err = capfd.readouterr()
    return status, out, err


@pytest.mark.model
def test_greedy_continuation_takes_the_likeliest_token_each_time(
    smollm2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = generate(capfd, str(smollm2), "-p", PROMPT, "-n", "3", "--temp", "0")
    assert status == 0
    assert "[ Prompt: " in err and "seed" not in err

    engine, tokenizer = Engine(load_model(smollm2)), Tokenizer(smollm2)
    tokens = tokenizer.encode(PROMPT)
    prompt = list(tokens)
    for _ in range(3):
        tokens.append(int(engine.forward_bypassing_cache(tokens)[-1].argmax()))
    assert out == tokenizer.decode(tokens[len(prompt) :]) + "\n" and "Paris" in out


def test_seed_file_and_chunks(
    tiny_model: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt with spaces é.txt"
    path.write_text(PROMPT, encoding="utf-8")
    argv = [str(tiny_model("llama")), "-f", str(path), "-n", "8", "-ctk", "kv3", "-ctv", "kv3", "--no-show-timings"]
    status, out, err = generate(capfd, *argv, "--display-prompt")
    assert status == 0 and out.startswith(PROMPT)
    seed = err.split("seed: ")[1].split()[0]
    again = generate(capfd, *argv, "-s", seed, "-ub", "2")
    assert again[:2] == (0, out.removeprefix(PROMPT))
    assert "Prompt:" not in err


def test_ctrl_c_ends_a_generation_with_130_and_the_text_so_far(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    feed = TextStream.feed

    def feed_and_press(self: TextStream, data: bytes) -> str:
        signal.raise_signal(signal.SIGINT)
        return feed(self, data)

    monkeypatch.setattr(TextStream, "feed", feed_and_press)
    before = signal.getsignal(signal.SIGINT)
    status, out, err = generate(capfd, str(tiny_model("llama")), "-p", PROMPT, "--temp", "0")
    assert status == 130 and "[ Prompt: " in err
    assert 0 < len(out.encode()) < 20, "one token and the end of the line"
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before


class ToyCache:
    """Room for five tokens."""

    n_ctx, n_tokens = 5, 2


class ToyEngine:
    """Wants token 3 for ever, until it was asked `n` times."""

    def __init__(self, n: int = sys.maxsize) -> None:
        self.left = n

    def forward(self, tokens: list[int], cache: ToyCache, *, logits: str) -> np.ndarray:
        cache.n_tokens += len(tokens)
        self.left -= 1
        return np.eye(8)[7 if self.left <= 0 else 3]


@pytest.mark.parametrize(
    ("n_predict", "stop", "ends_after", "tokens", "reason"),
    [
        (2, False, 99, [3, 3], "length"),
        (0, False, 99, [], "length"),
        (-1, False, 99, [3, 3, 3, 3], "context"),
        (-1, False, 2, [3, 3], "end"),
        (-1, True, 99, [], "interrupt"),
    ],
)
def test_why_a_generation_ends(n_predict: int, stop: bool, ends_after: int, tokens: list[int], reason: str) -> None:
    timing, sampler = Timing(), Sampler(SamplingOptions(temp=0.0))
    said = new_tokens(
        ToyEngine(ends_after),  # type: ignore[arg-type]
        ToyCache(),  # type: ignore[arg-type]
        np.eye(8)[3],
        sampler,
        frozenset([7]),
        timing,
        n_predict=n_predict,
        should_stop=lambda: stop,
    )
    assert list(said) == tokens
    assert (timing.reason, timing.n_generated) == (reason, len(tokens))
