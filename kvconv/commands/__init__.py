"""One module per command. A module `inspect` that has a function `inspect` is the command `kvconv inspect`.

The modules are imported to print `--help`, so torch, llama_cpp and gguf are imported inside the functions.
"""
