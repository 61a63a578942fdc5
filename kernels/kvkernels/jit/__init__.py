"""Functions compiled for this CPU when they are first needed, and kept on disk.

`emit` writes LLVM instructions from Python, with vectors as values; `target` knows the CPU; `compiler` turns a function
into machine code and remembers it.
"""

from .compiler import CompileError, Function, compile_function, prepare
from .emit import F16, F32, I8, I16, I32, I64, PTR, Emitter, Val, vec
from .target import Target, host_target

__all__ = [
    "F16",
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "PTR",
    "CompileError",
    "Emitter",
    "Function",
    "Target",
    "Val",
    "compile_function",
    "host_target",
    "prepare",
    "vec",
]
