"""From the text of a function to an address that can be called, through a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .target import Target, host_target

_lock = threading.Lock()
_loaded: dict[tuple[object, ...], Function] = {}


class CompileError(RuntimeError):
    """LLVM is missing here or refused the code."""


class Function:
    """Machine code in memory. address: to call it with ctypes, from ggml or from other machine code."""

    def __init__(self, name: str, address: int, owner: Any) -> None:
        self.name, self.address = name, address
        self._owner = owner  # the code lives as long as this


def cache_folder() -> Path:
    """Where machine code is kept: `$KVRUN_CACHE`, else the user's cache folder."""
    named = os.environ.get("KVRUN_CACHE")
    if named:
        return Path(named)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home()) / "kvrun"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrun"


@functools.cache
def _source_digest() -> bytes:
    """Hash of every file of this package: code made by older sources is not taken up again."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _machine() -> tuple[Any, Any, Any]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host = host_target()
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    machine = triple.create_target_machine(
        cpu=host.cpu, features=host.features, opt=3, reloc="pic", codemodel="small", jit=True
    )
    return llvm, machine, llvm.create_lljit_compiler(machine)


def _key(name: str, signature: tuple[object, ...], target: Target) -> str:
    import llvmlite

    digest = hashlib.sha256(_source_digest())
    for part in (llvmlite.__version__, platform.machine(), target, name, signature):
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()[:40]


def _object_code(text: str) -> bytes:
    llvm, machine, _ = _machine()
    try:
        module = llvm.parse_assembly(text)
        module.triple = llvm.get_process_triple()
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise CompileError(f"LLVM refused a kernel: {error}") from error
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # What should be vectors is written as vectors; guessing costs time and undoes the order of the instructions.
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _read(path: Path) -> bytes | None:
    """A cached object: the hash of the code, then the code; None where it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[32:]
    return code if hashlib.sha256(code).digest() == data[:32] else None


def _write(path: Path, code: bytes) -> None:
    """Keep an object; a folder that cannot be written only means compiling again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def compile_function(name: str, signature: tuple[object, ...], write: Callable[[], str]) -> Function:
    """The function `name` for this CPU.

    signature: all that the code depends on, beside this package's sources and the CPU.  write: returns the module's
    text; called only where neither this process nor the cache on disk has the code.
    """
    key = (name, signature)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(name, signature, write)
        return _loaded[key]


def prepare() -> None:
    """Load LLVM. Raises CompileError with the reason where that cannot be."""
    try:
        _machine()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(f"LLVM cannot be used here: {error}") from error


def _load(name: str, signature: tuple[object, ...], write: Callable[[], str]) -> Function:
    prepare()
    llvm, _, jit = _machine()
    unique = f"{name}_{len(_loaded)}"
    path = cache_folder() / f"{name}-{_key(name, signature, host_target())}.o"
    code = _read(path)
    if code is None:
        code = _object_code(write())
        _write(path, code)
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(name)
    tracker = library.link(jit, unique)
    return Function(name, tracker[name], (tracker, jit))
