"""One module per command. A module `perplexity` that has a function `perplexity` is the command `kvrun perplexity`.

The modules are imported to print `--help`, so torch, llama_cpp, gguf and scipy are imported inside the functions.
"""
