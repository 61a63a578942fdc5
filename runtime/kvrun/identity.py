"""What a figure depends on, as a hash: the same hash, the same figure.

Results and references that were written earlier are taken up again only where model, tokens, cache, engine and code are
the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrun.evaluation.windows import Windows
    from kvrun.models import Model
    from kvrun.plan import CachePlan, HeadPlan

#: Packages whose arithmetic stands in a figure.
_LIBRARIES = ("torch", "numpy", "llama-cpp-python", "llvmlite")


def digest_of(facts: Any) -> str:
    """The sha256 in hex of anything that JSON can hold; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def model_digest(model: Model) -> str:
    """Of every byte of every tensor, and of what was read from the metadata. A recipe in the file changes nothing."""
    digest = hashlib.sha256(f"{model.file.arch} {model.config!r}".encode())
    for name, info in sorted(model.file.tensors.items()):
        digest.update(f"\n{name} {info.shape} {info.type.name}".encode())
        digest.update(model.file.tensor_bytes(name).data)
    return digest.hexdigest()


def windows_digest(windows: Windows) -> str:
    """Of the tokens as they are cut: text, tokenizer, context and number of windows."""
    digest = hashlib.sha256(repr(windows.tokens.shape).encode())
    digest.update(windows.tokens.astype("<i8").tobytes())
    return digest.hexdigest()


def plan_digest(plan: CachePlan) -> str:
    """Of everything a cache does, heads, sinks and window, and of the names it goes by."""
    digest = hashlib.sha256()
    facts = (plan.type_k, plan.type_v, plan.recipe, plan.sinks, plan.window, plan.geometry)
    digest.update(repr(facts).encode())
    for side in (plan.k, plan.v):
        for layer in side:
            for head in layer:
                _add_head(digest, head)
    return digest.hexdigest()


def _add_head(digest: Any, head: HeadPlan) -> None:
    transform = head.transform
    digest.update(f"\n{head.spec!r} {head.clip!r} {transform.hadamard} {transform.rotating}".encode())
    for array in (transform.order, transform.matrix, transform.offset):
        digest.update(b"|")
        if array is not None:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())


@functools.cache
def code_digest() -> str:
    """Of our sources and of the versions of the libraries that compute: figures of older code are not taken up."""
    import kvkernels
    import kvrun

    digest = hashlib.sha256()
    for package in (kvkernels, kvrun):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    for name in _LIBRARIES:
        try:
            digest.update(f"\n{name} {version(name)}".encode())
        except PackageNotFoundError:
            continue
    return digest.hexdigest()
