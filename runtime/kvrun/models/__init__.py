"""Model architectures, one file each.

To add an architecture, put one new file into this folder::

    # kvrun/models/mymodel.py
    class MyModel(Model):                       # or Llama, where the graph is that with small changes
        arch = ("mymodel",)                     # values of general.architecture
        rope_style = "neox"                     # as llama.cpp's llama_model_rope_type() says for it

        def __init__(self, file, weights):      # build the layers under the names of their tensors
            super().__init__(file, weights)
            ...
            self.check_all_tensors_used(used)

        def qkv(self, il, x, positions): ...    # and rope() and block(): see kvrun.models.base.Model

Nothing else has to be edited: the modules in this folder are imported when a model is loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import torch

from ..errors import UnsupportedModelError
from ..gguf_split import open_model
from ..locate import find_model
from ..weights import Weights
from .base import Attend, Model

__all__ = ["Attend", "Model", "load_model", "supported_architectures"]


def supported_architectures() -> dict[str, type[Model]]:
    """Class by `general.architecture`, of every model class in this folder."""
    found: dict[str, type[Model]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for value in vars(importlib.import_module(f"{__name__}.{module}")).values():
            if isinstance(value, type) and issubclass(value, Model):
                found.update(dict.fromkeys(value.arch, value))
    return dict(sorted(found.items()))


def load_model(
    path_or_word: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    budget_bytes: int | None = None,
    block_rows: int = 0,
) -> Model:
    """Open a model; nothing is dequantized yet.

    path_or_word: a GGUF file, any part of a split one, or a word that `kvrun.locate` knows.
    budget_bytes, block_rows: see `kvrun.weights.Weights`.
    Raises GGUFError for a damaged file, UnsupportedModelError for one that cannot be run, with what can.
    """
    file = open_model(find_model(path_or_word))
    architectures = supported_architectures()
    if file.arch not in architectures:
        supported = ", ".join(architectures)
        raise UnsupportedModelError(f"{file.path}: architecture {file.arch!r} is not supported; supported: {supported}")
    weights = Weights(file, dtype=dtype, budget_bytes=budget_bytes, block_rows=block_rows)
    return architectures[file.arch](file, weights)
