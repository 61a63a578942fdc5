"""`kvconv calibrate`: from a model and a text to a recipe."""

from __future__ import annotations

import os
from enum import Enum
from typing import Annotated

import typer

from kvrun.commands.common import MAX_TOKENS, ModelArgument, ModelOption, ThreadsOption, choose_model, set_threads
from kvrun.console import UsageError, note, printable, progress
from kvrun.errors import KvError

WIDTHS = (2, 3, 4, 5, 6, 8, 16)


class ObjectiveName(str, Enum):
    """What an error is counted by; the same names as `kvconv.objective.OBJECTIVES`."""

    roundtrip = "roundtrip"
    query = "query"
    fisher = "fisher"


def _width(bits: int | None) -> int | None:
    if bits is not None and bits not in WIDTHS:
        raise typer.BadParameter(f"{bits} is none of {', '.join(map(str, WIDTHS))}")
    return bits


TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "-f", "--file", metavar="TEXT",
        help="Text to calibrate on, again for more; - is stdin. If left out: the language reference inside Python.",
        show_default=False,
    ),
]  # fmt: skip
OutOption = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", metavar="OUT",
        help="File to write. If left out: <model>-kvconv.gguf in this folder.", show_default=False,
    ),
]  # fmt: skip
SidecarOption = Annotated[
    bool,
    typer.Option(
        "--sidecar", help="Write only the recipe, kvconv-<model file name> beside the model, where kvrun finds it."
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite the output if it exists.")]
BitsOption = Annotated[
    float | None,
    typer.Option(
        "--bits", metavar="X", min=2, max=16,
        help="Bits per value of the whole cache, with scales and minima, such as 3.2: spread over layers, heads, keys "
        "and values by what they gain. If left out, 4.5, as many as llama.cpp's q4_0 takes.",
        show_default=False,
    ),
]  # fmt: skip
KBitsOption = Annotated[
    int | None,
    typer.Option(
        "--k-bits", metavar="N", callback=_width,
        help="Bits of a code for all keys instead, 2 to 6, 8, or 16 for plain f16.", show_default=False,
    ),
]  # fmt: skip
VBitsOption = Annotated[
    int | None,
    typer.Option("--v-bits", metavar="N", callback=_width, help="The same for all values.", show_default=False),
]
GroupOption = Annotated[
    int | None,
    typer.Option(
        "--group", metavar="N", min=1, max=65535,
        help="Channels that share a scale. If left out: what pays, or 64 with --k-bits and --v-bits.",
        show_default=False,
    ),
]  # fmt: skip
SinksOption = Annotated[
    int, typer.Option("--sinks", metavar="N", min=0, max=MAX_TOKENS, help="First tokens kept in full precision.")
]
WindowOption = Annotated[
    int, typer.Option("--window", metavar="N", min=0, max=MAX_TOKENS, help="Latest tokens, likewise.")
]
ChunksOption = Annotated[int, typer.Option("--chunks", metavar="N", min=1, help="Pieces of text to read.")]
ChunkTokensOption = Annotated[int, typer.Option("--chunk-tokens", metavar="N", min=2, help="Tokens of a piece.")]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "-c", "--ctx-size", metavar="N", min=0, max=MAX_TOKENS,
        help="Context you mean to use: pieces are spread over its positions. 0 is what the model was trained for; if "
        "left out, that but at most 4096.",
        show_default=False,
    ),
]  # fmt: skip
SeedOption = Annotated[
    int,
    typer.Option(
        "-s", "--seed", metavar="N", min=0, max=2**64 - 1, help="Seed of the positions of the pieces and of labels."
    ),
]
GuardOption = Annotated[
    bool,
    typer.Option(
        "--guard/--no-guard",
        help="Measure the recipe on pieces of the text that it was not made of, beside plain settings of its size, and "
        "take back what makes it worse.",
    ),
]
ParetoOption = Annotated[
    bool,
    typer.Option(
        "--pareto", help="Also show size against divergence from 2.25 to 8 bits, measured on the held-out pieces."
    ),
]
ObjectiveOption = Annotated[
    ObjectiveName,
    typer.Option(
        "--objective",
        help="What is made small: plain error, error as queries and the output projection see it, or the divergence "
        "from the f16 cache that the error is expected to cause.",
    ),
]


def calibrate(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    files: TextOption = None,
    out: OutOption = None,
    sidecar: SidecarOption = False,
    force: ForceOption = False,
    bits: BitsOption = None,
    k_bits: KBitsOption = None,
    v_bits: VBitsOption = None,
    group: GroupOption = None,
    sinks: SinksOption = 4,
    window: WindowOption = 32,
    chunks: ChunksOption = 16,
    chunk_tokens: ChunkTokensOption = 512,
    ctx_size: ContextOption = None,
    seed: SeedOption = 0,
    objective: ObjectiveOption = ObjectiveName.fisher,
    guard: GuardOption = True,
    pareto: ParetoOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Find how each head of a model's KV cache is best quantized, and store that as a recipe.

    Writes a copy of the model with the recipe in its metadata, which llama.cpp runs as before, or with --sidecar the
    recipe alone. The model itself is never changed.
    """
    chosen = choose_model(model, model_option)
    if sinks >= chunk_tokens:
        raise UsageError(f"--sinks {sinks} leaves nothing of a piece of --chunk-tokens {chunk_tokens}")
    if pareto and (k_bits is not None or v_bits is not None):
        raise UsageError("--pareto spreads bits itself; leave out --k-bits and --v-bits")
    if pareto and not guard:
        raise UsageError("--pareto measures on the pieces that --no-guard does not hold out; leave one of them out")
    # Threads that spin while they wait take the cores from the others as soon as anything else runs on the machine
    # (measured: five times slower). OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_threads(threads)

    from kvconv import report
    from kvconv.calibrate import DEFAULT_BITS, Settings, draw, offer, read, spread
    from kvconv.gather import budget_bytes
    from kvconv.guard import guard as check
    from kvconv.guard import verdict_line
    from kvconv.output import check_output, output_path, write
    from kvconv.pareto import COLUMNS, NOTE, measure, points
    from kvconv.text import read_text
    from kvrun.evaluation.windows import Windows
    from kvrun.gguf_split import open_model
    from kvrun.locate import find_model
    from kvrun.models import load_model
    from kvrun.recipe import SIDECAR_TYPE
    from kvrun.tables import markdown
    from kvrun.tokenizer import Tokenizer

    file = open_model(find_model(chosen))
    path = file.path
    target = output_path(path, out, sidecar=sidecar)
    check_output(target, file, sidecar=sidecar, force=force)
    if file.get("general.type") == SIDECAR_TYPE:
        raise KvError(f"{path} is a recipe alone; give the model that it belongs to")
    loaded = load_model(path, budget_bytes=budget_bytes(file))
    settings = Settings(
        bits=DEFAULT_BITS if bits is None else bits,
        shared=bits is not None,
        bits_k=k_bits,
        bits_v=v_bits,
        group=group,
        sinks=sinks,
        window=window,
        n_chunks=chunks,
        chunk_tokens=chunk_tokens,
        n_ctx=ctx_size,
        seed=seed,
        objective=objective.value,
        guard=guard,
    )
    settings.check(loaded.config.geometry)
    text = read_text(files or [])
    tokenizer = Tokenizer(path)
    bos = tokenizer.bos if tokenizer.add_bos else None
    sample = draw(text, tokenizer.encode, settings, loaded.config.n_ctx_train, bos)
    n_found, n_layer = len(sample.tokens), loaded.config.n_layer
    pieces = f"{n_found} piece{'s' * (n_found != 1)}"
    note(f"text: {printable(text.name)}, {pieces} of {chunk_tokens} tokens", style="dim")
    if n_found < chunks:
        note(f"note: the text is short, {pieces} instead of {chunks}", style="yellow")
    if ctx_size is not None and ctx_size > loaded.config.n_ctx_train > 0:
        note(f"note: the model was trained for {loaded.config.n_ctx_train} tokens, not {ctx_size}", style="yellow")
    if guard and not len(sample.held):
        why = f"no piece of the text is held out: {settings.why_none_held}"
        if pareto:
            raise KvError(f"{why}, or leave out --pareto")
        note(f"note: the recipe is not measured, as {why}", style="yellow")
    with progress("reading", n_found, unit="pieces") as advance:
        gathered = read(loaded, sample, settings, advance)
    with progress("choosing", n_layer, unit="layers") as advance:
        offers = offer(loaded, settings, gathered, advance)
        recipe = spread(loaded, sample, settings, offers)
    verdict = None
    if len(sample.held):
        fixed = k_bits is not None or v_bits is not None
        with progress("checking", 1, unit="settings") as advance:
            recipe, verdict = check(loaded, recipe, Windows(sample.held), fixed=fixed, on_progress=advance)
    with progress("writing") as advance:
        write(recipe, loaded.file, target, sidecar=sidecar, force=force, on_progress=advance)
    rows = report.layer_rows(recipe)
    typer.echo(markdown([*rows, report.total_row(recipe)], report.COLUMNS))
    typer.echo(report.note_for(recipe))
    if verdict is not None:
        typer.echo("\n" + verdict_line(verdict, len(sample.held)))
    if pareto:
        with progress("measuring", len(sample.held), unit="pieces") as advance:
            curve = measure(loaded, Windows(sample.held), points(loaded, sample, settings, offers), advance)
        typer.echo("\n" + markdown(curve, COLUMNS) + "\n" + NOTE)
    size = f"{report.bits_per_value(recipe):.2f} bits per packed value"
    typer.echo(f"\nwrote {printable(str(target))}: recipe {recipe.digest()}, {size}")
