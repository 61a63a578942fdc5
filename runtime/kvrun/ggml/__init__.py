"""ggml, the library under llama.cpp, through its public C functions.

The shared libraries are those inside the package llama-cpp-python. `library` finds and checks them, `tensors` hands it
the tensors of a mapped GGUF file in place, `graph` builds graphs that are computed many times. No structure of ggml is
looked into.
"""

from .graph import Backend, Graph, Memory
from .library import TESTED_VERSION, GgmlError, Library, load_library
from .tensors import FileTensors

__all__ = ["TESTED_VERSION", "Backend", "FileTensors", "GgmlError", "Graph", "Library", "Memory", "load_library"]
