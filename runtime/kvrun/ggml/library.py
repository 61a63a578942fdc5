"""Finding ggml's shared libraries and checking that they have what is needed."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import sys
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from ..errors import KvError

#: The llama-cpp-python that this binding was tested with.
TESTED_VERSION = "0.3.36"
PACKAGE = "llama_cpp"

F32, F16, I32 = 0, 1, 26
ROPE_NORMAL, ROPE_NEOX = 0, 2
#: For custom operations: as many threads as there are.
ALL_THREADS = -1
SUCCESS = 0


class GgmlError(KvError):
    """ggml cannot be used here; the message says why and what runs instead."""


class InitParams(ctypes.Structure):
    """Argument of `ggml_init`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_P = c_void_p
_TENSOR_2 = (_P, (_P, _P, _P))
#: Functions that are called: result type, argument types.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_version": (c_char_p, ()),
    "ggml_type_size": (c_size_t, (c_int,)),
    "ggml_blck_size": (c_int64, (c_int,)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_nbytes": (c_size_t, (_P,)),
    "ggml_get_data": (_P, (_P,)),
    "ggml_set_name": (_P, (_P, c_char_p)),
    "ggml_set_output": (None, (_P,)),
    "ggml_new_tensor_1d": (_P, (_P, c_int, c_int64)),
    "ggml_new_tensor_2d": (_P, (_P, c_int, c_int64, c_int64)),
    "ggml_new_tensor_3d": (_P, (_P, c_int, c_int64, c_int64, c_int64)),
    "ggml_view_1d": (_P, (_P, _P, c_int64, c_size_t)),
    "ggml_view_2d": (_P, (_P, _P, c_int64, c_int64, c_size_t, c_size_t)),
    "ggml_reshape_2d": (_P, (_P, _P, c_int64, c_int64)),
    "ggml_reshape_3d": (_P, (_P, _P, c_int64, c_int64, c_int64)),
    "ggml_permute": (_P, (_P, _P, c_int, c_int, c_int, c_int)),
    "ggml_cont": (_P, (_P, _P)),
    "ggml_cont_2d": (_P, (_P, _P, c_int64, c_int64)),
    "ggml_cpy": _TENSOR_2,
    "ggml_add": _TENSOR_2,
    "ggml_sub": _TENSOR_2,
    "ggml_mul": _TENSOR_2,
    "ggml_mul_mat": _TENSOR_2,
    "ggml_get_rows": _TENSOR_2,
    "ggml_rms_norm": (_P, (_P, _P, c_float)),
    "ggml_swiglu_split": _TENSOR_2,
    "ggml_scale": (_P, (_P, _P, c_float)),
    "ggml_rope_ext": (
        _P,
        (_P, _P, _P, _P, c_int, c_int, c_int, c_float, c_float, c_float, c_float, c_float, c_float),
    ),
    "ggml_custom_4d": (
        _P,
        (_P, c_int, c_int64, c_int64, c_int64, c_int64, ctypes.POINTER(_P), c_int, _P, c_int, _P),
    ),
    "ggml_custom_inplace": (_P, (_P, _P, ctypes.POINTER(_P), c_int, _P, c_int, _P)),
    "ggml_new_graph_custom": (_P, (_P, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, c_int)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_cpu_buffer_from_ptr": (_P, (_P, c_size_t)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_buffer_get_size": (c_size_t, (_P,)),
    "ggml_backend_free": (None, (_P,)),
    "ggml_backend_supports_op": (c_bool, (_P, _P)),
    "ggml_backend_tensor_alloc": (c_int, (_P, _P, _P)),
    "ggml_backend_alloc_ctx_tensors": (_P, (_P, _P)),
    "ggml_backend_graph_compute": (c_int, (_P, _P)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_free": (None, (_P,)),
    "ggml_gallocr_alloc_graph": (c_bool, (_P, _P)),
    "ggml_gallocr_get_buffer_size": (c_size_t, (_P, c_int)),
    "ggml_cpu_fp32_to_fp16": (None, (_P, _P, c_int64)),
}


class Library:
    """ggml's functions as attributes, with their types set.

    version: ggml's own.  package_version: llama-cpp-python's.
    """

    def __init__(self, folder: Path, package_version: str) -> None:
        self.package_version = package_version
        handles = [_open(folder, name) for name in ("ggml-base", "ggml-cpu", "ggml")]
        missing = []
        for name, (result, args) in FUNCTIONS.items():
            function = next((f for f in (getattr(h, name, None) for h in handles) if f is not None), None)
            if function is None:
                missing.append(name)
                continue
            function.restype, function.argtypes = result, args
            setattr(self, name, function)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise GgmlError(
                f"llama-cpp-python {package_version} has no {missing[0]}{more}; the CPU engine was tested with "
                f"{TESTED_VERSION}: install that, or use --engine reference"
            )
        self.version = (self.ggml_version() or b"").decode(errors="replace")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not among the functions of ggml that are bound")

    @property
    def note(self) -> str:
        """One line for `--version` and the stats: which ggml this is, and which one was tested."""
        tested = "" if self.package_version == TESTED_VERSION else f" (tested: {TESTED_VERSION})"
        return f"ggml {self.version} of llama-cpp-python {self.package_version}{tested}"


def _file_name(name: str) -> str:
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def _open(folder: Path, name: str) -> ctypes.CDLL:
    path = folder / _file_name(name)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        why = "is not there" if not path.exists() else f"cannot be loaded ({error})"
        raise GgmlError(
            f"{path.name} of llama-cpp-python {why}; install llama-cpp-python {TESTED_VERSION}, "
            "or use --engine reference"
        ) from None


@functools.cache
def load_library() -> Library:
    """ggml, loaded once. Raises GgmlError with the reason where that cannot be."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise GgmlError(
            f"llama-cpp-python is not installed, so there is no ggml; install llama-cpp-python {TESTED_VERSION}, "
            "or use --engine reference"
        )
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    # The package lets its users point it at other libraries; ggml must then be the same one.
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    folder = Path(override) if override else Path(next(iter(spec.submodule_search_locations))) / "lib"
    return Library(folder, version)
