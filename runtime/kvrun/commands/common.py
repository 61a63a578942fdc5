"""Options that several commands share, under llama.cpp's names and environment variables, and the session they open."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrun.console import UsageError, note, printable
from kvrun.errors import KvError
from kvrun.tables import OutputFormat

if TYPE_CHECKING:
    from kvrun.engine import Engine
    from kvrun.models.base import Model
    from kvrun.plan import CachePlan
    from kvrun.recipe import Recipe
    from kvrun.tokenizer import Tokenizer

OUR_TYPES = "f16|kv8|kv6|kv5|kv4|kv3|kv2|auto"
"""For the help; the list that decides is `kvrun.cache_types.TYPE_NAMES`, which must not be imported for `--help`."""

ENGINES = "auto|reference|cpu"
"""Likewise of `kvrun.engines.ENGINE_NAMES`."""

UNLISTED_TYPES = ("kv1", "emu-q4_0", "emu-q8_0")
"""For measurements alone: the control that must fail, and llama.cpp's blocks in our cache."""

INSTEAD_OF_LLAMA_CPP = {
    "f32": "f16",
    "bf16": "f16",
    "q8_0": "kv8",
    "q5_1": "kv5",
    "q5_0": "kv5",
    "q4_1": "kv4",
    "q4_0": "kv4",
    "iq4_nl": "kv4",
}
"""llama.cpp's names mean llama.cpp's formats; what to use here in their place."""

MAX_TOKENS = 2**31 - 1
"""No context, window or number of sinks is larger than llama.cpp's own counters."""

MAX_THREADS = 512
"""What ggml takes."""

CACHE = "KV cache"
SAMPLING = "Sampling"
MACHINE = "Machine"


def check_type(name: str | None) -> str | None:
    """The name of one of our cache types, or None; wrong usage, with advice, for any other."""
    if name is not None and name.lower() in INSTEAD_OF_LLAMA_CPP:
        raise UsageError(
            f"{name} is a format of llama.cpp; use {INSTEAD_OF_LLAMA_CPP[name.lower()]} here (one of "
            f"{OUR_TYPES.replace('|', ', ')}), or see the formats of llama.cpp beside ours with `kvrun compare`"
        )
    if name is not None and name not in OUR_TYPES.split("|") and name not in UNLISTED_TYPES:
        raise UsageError(f"unknown cache type {printable(name)}; use one of {OUR_TYPES.replace('|', ', ')}")
    return name


def check_engine(name: str) -> str:
    """The name of an engine; wrong usage for any other."""
    if name not in ENGINES.split("|"):
        raise UsageError(f"unknown engine {printable(name)}; use one of {ENGINES.replace('|', ', ')}")
    return name


def _on_cpu(layers: str | None) -> str | None:
    if layers not in (None, "0", "auto"):
        raise UsageError("this version runs on the CPU; leave out -ngl or give -ngl 0")
    return layers


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="GGUF file, or the word smollm2.", show_default=False)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "-m", "--model", metavar="MODEL", envvar="LLAMA_ARG_MODEL", help="The same, as llama.cpp takes it.",
        show_default=False,
    ),
]  # fmt: skip
FileOption = Annotated[
    str | None, typer.Option("-f", "--file", metavar="FILE", help="Text file; - is stdin.", show_default=False)
]
PromptOption = Annotated[
    str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Prompt; - is stdin.", show_default=False)
]
PredictOption = Annotated[
    int,
    typer.Option(
        "-n", "--predict", "--n-predict", metavar="N", envvar="LLAMA_ARG_N_PREDICT", min=-1,
        help="Tokens to generate; -1 is until the model ends or the context is full.",
    ),
]  # fmt: skip
ContextOption = Annotated[
    int,
    typer.Option(
        "-c", "--ctx-size", metavar="N", envvar="LLAMA_ARG_CTX_SIZE", min=0, max=MAX_TOKENS,
        rich_help_panel=CACHE, help="Context in tokens; 0 is what the model was trained for.",
    ),
]  # fmt: skip
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "-t", "--threads", metavar="N", envvar="LLAMA_ARG_THREADS", max=MAX_THREADS, rich_help_panel=MACHINE,
        help="CPU threads; all physical cores if left out.", show_default=False,
    ),
]  # fmt: skip
UbatchOption = Annotated[
    int,
    typer.Option(
        "-ub", "--ubatch-size", "--ubatch", metavar="N", envvar="LLAMA_ARG_UBATCH", min=1, rich_help_panel=MACHINE,
        help="Tokens of a prompt that are evaluated at once; the result does not depend on it.",
    ),
]  # fmt: skip
CacheTypeK = Annotated[
    str | None,
    typer.Option(
        "-ctk", "--cache-type-k", metavar=OUR_TYPES, envvar="LLAMA_ARG_CACHE_TYPE_K", callback=check_type,
        rich_help_panel=CACHE, help="Keys; auto is the recipe. If left out: auto with a recipe, else f16.",
        show_default=False,
    ),
]  # fmt: skip
CacheTypeV = Annotated[
    str | None,
    typer.Option(
        "-ctv", "--cache-type-v", metavar=OUR_TYPES, envvar="LLAMA_ARG_CACHE_TYPE_V", callback=check_type,
        rich_help_panel=CACHE, help="Values, likewise.", show_default=False,
    ),
]  # fmt: skip
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="FILE", rich_help_panel=CACHE,
        help="Recipe to use; if left out: the one in the model file, or in kvconv-<model file> beside it.",
        show_default=False,
    ),
]  # fmt: skip
NoRecipeOption = Annotated[bool, typer.Option("--no-recipe", rich_help_panel=CACHE, help="Use no recipe.")]
SinksOption = Annotated[
    int | None,
    typer.Option(
        "--sinks", metavar="N", min=0, max=MAX_TOKENS, rich_help_panel=CACHE,
        help="First tokens kept in full precision; if left out: the recipe's, else 4.", show_default=False,
    ),
]  # fmt: skip
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--window", metavar="N", min=0, max=MAX_TOKENS, rich_help_panel=CACHE,
        help="Latest tokens kept in full precision; if left out: the recipe's, else 32.", show_default=False,
    ),
]  # fmt: skip
GpuLayersOption = Annotated[
    str | None,
    typer.Option(
        "-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", envvar="LLAMA_ARG_N_GPU_LAYERS", callback=_on_cpu,
        rich_help_panel=MACHINE, help="Only 0: this version runs on the CPU.", show_default=False,
    ),
]  # fmt: skip
WeightsBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--weights-budget", metavar="SIZE", rich_help_panel=MACHINE,
        help="Memory for expanded weights, such as 800M or 4G; 0 expands them anew each time. "
        "If left out: half of the memory that is free.",
        show_default=False,
    ),
]  # fmt: skip
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", metavar=ENGINES, callback=check_engine, rich_help_panel=MACHINE,
        help="reference computes in torch and is the definition; cpu multiplies the file's own blocks with ggml and "
        "compiles its attention; auto takes cpu where it can run the model.",
    ),
]  # fmt: skip
OutputOption = Annotated[OutputFormat, typer.Option("-o", "--output", help="How the table is printed.")]

TempOption = Annotated[
    float, typer.Option("--temp", "--temperature", min=0.0, rich_help_panel=SAMPLING, help="Temperature; 0 is greedy.")
]
TopKOption = Annotated[
    int, typer.Option("--top-k", min=0, rich_help_panel=SAMPLING, help="Keep the k likeliest tokens; 0 keeps all.")
]
TopPOption = Annotated[
    float, typer.Option("--top-p", min=0.0, max=1.0, rich_help_panel=SAMPLING, help="Keep this share; 1 keeps all.")
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p", min=0.0, max=1.0, rich_help_panel=SAMPLING,
        help="Drop tokens below this share of the likeliest one's probability; 0 drops none.",
    ),
]  # fmt: skip
SeedOption = Annotated[
    int, typer.Option("-s", "--seed", min=-1, rich_help_panel=SAMPLING, help="Seed; -1 draws one and says which.")
]


@dataclass(frozen=True)
class Session:
    """A model that is ready to run: what the commands work with."""

    model: Model
    engine: Engine
    tokenizer: Tokenizer
    recipe: Recipe | None
    plan: CachePlan
    n_ctx: int


def choose_model(argument: str | None, option: str | None) -> str:
    """The model that was named, by position or with `-m`; a path or a word that `kvrun.locate` knows."""
    from_environment = option is not None and option == os.environ.get("LLAMA_ARG_MODEL")
    if argument is not None and option is not None and argument != option and not from_environment:
        raise UsageError("two models were named, by position and with -m; name one")
    chosen = argument if argument is not None else option
    if not chosen:
        raise UsageError("no model was named; give a GGUF file or the word smollm2, by position or with -m")
    return chosen


def choose_types(type_k: str | None, type_v: str | None, *, has_recipe: bool) -> tuple[str, str]:
    """The cache types to use: what is left out is `auto` if there is a recipe and `f16` if not."""
    default = "auto" if has_recipe else "f16"
    return type_k or default, type_v or default


def parse_size(text: str | None) -> int | None:
    """Bytes from `800M`, `4G`, `1.5GiB` or a plain number; M and G are powers of 1024. None stays None."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{printable(text)} is not a size; write it like 800M or 4G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def read_text(source: str) -> str:
    """Text of a file, or of stdin for `-`, as UTF-8; a byte order mark is dropped."""
    if source == "-":
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        data, name = Path(source).read_bytes(), printable(source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise KvError(f"{name} is not UTF-8 text (byte {error.start}); convert it or name another file") from error


def choose_prompt(prompt: str | None, file: str | None) -> str | None:
    """The prompt from `-p` or `-f`, None if neither was given."""
    if prompt is not None and file is not None:
        raise UsageError("the prompt was given twice, with -p and with -f; give one")
    if file is not None:
        return read_text(file)
    return read_text("-") if prompt == "-" else prompt


def set_threads(threads: int | None) -> None:
    """Limit torch to `threads` CPU threads; None, 0 and less leave its default, all physical cores.

    To be called before torch is loaded: it also tells OpenMP to let threads sleep that wait. Spinning takes the cores
    from the others as soon as anything else runs on the machine (measured: five times slower). `OMP_WAIT_POLICY=active`
    in the environment has it otherwise.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None and threads > 0:
        import torch

        torch.set_num_threads(threads)


def load_recipe(model: Model, recipe: str | None, *, no_recipe: bool = False) -> Recipe | None:
    """The recipe of a model: the one that was named, else the embedded one, else the sidecar, else None."""
    if no_recipe:
        if recipe is not None:
            raise UsageError("--recipe and --no-recipe exclude each other; give one")
        return None
    from kvrun.recipe import find_recipe

    return find_recipe(model.file, recipe, geometry=model.config.geometry)


def load_session(
    model: str,
    *,
    ctx_size: int = 0,
    type_k: str | None = None,
    type_v: str | None = None,
    recipe: str | None = None,
    no_recipe: bool = False,
    sinks: int | None = None,
    window: int | None = None,
    threads: int | None = None,
    weights_budget: str | None = None,
    engine: str = "auto",
    dtype: str = "float32",
    announce: bool = True,
    block_rows: int = 0,
) -> Session:
    """Open a model with its recipe, cache plan, engine and tokenizer.

    model: from `choose_model`.  ctx_size: tokens, 0 is from the model.  Other arguments: the options of the same name.
    engine: of `kvrun.engines.ENGINE_NAMES`; why `auto` did not take the fast one is said on stderr.
    dtype: "float32" or "float64", what the engine computes in.
    announce: say on stderr which cache is used when the user left the choice to us.
    block_rows: see `kvrun.weights.Weights`.
    """
    budget_bytes = parse_size(weights_budget)
    set_threads(threads)
    import torch

    from kvrun.cache_types import plan_for
    from kvrun.engines import choose_engine
    from kvrun.models import load_model
    from kvrun.tokenizer import Tokenizer

    loaded = load_model(model, dtype=getattr(torch, dtype), budget_bytes=budget_bytes, block_rows=block_rows)
    found = load_recipe(loaded, recipe, no_recipe=no_recipe)
    chosen_k, chosen_v = choose_types(type_k, type_v, has_recipe=found is not None)
    plan = plan_for(loaded.config.geometry, chosen_k, chosen_v, recipe=found, sinks=sinks, window=window)
    if announce and (type_k is None or type_v is None):
        why = f"recipe {found.digest()}" if found is not None else "no recipe: see `kvconv calibrate`"
        note(f"cache: keys {chosen_k}, values {chosen_v} ({why})", style="dim")
    n_ctx = ctx_size or loaded.config.n_ctx_train
    if loaded.config.n_ctx_train and n_ctx > loaded.config.n_ctx_train:
        note(f"note: the model was trained for {loaded.config.n_ctx_train} tokens, not {n_ctx}", style="dim")
    tokenizer = Tokenizer(loaded.file.path)
    runs, why_not = choose_engine(engine, loaded, n_threads=torch.get_num_threads(), plan=plan)
    if why_not:
        note(f"engine: {runs.name}, because {why_not}", style="dim")
    return Session(loaded, runs, tokenizer, found, plan, n_ctx)
