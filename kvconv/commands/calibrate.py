"""`kvconv calibrate`: from a model and a text to a recipe."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvrun.commands.common import MAX_TOKENS, ModelArgument, ModelOption, ThreadsOption, choose_model, set_threads
from kvrun.console import UsageError, note, printable, progress
from kvrun.errors import KvError

WIDTHS = (2, 3, 4, 5, 6, 8, 16)


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
    int, typer.Option("--bits", metavar="N", callback=_width, help="Bits of a code, 2 to 6, 8, or 16 for plain f16.")
]
KBitsOption = Annotated[
    int | None,
    typer.Option("--k-bits", metavar="N", callback=_width, help="The same for keys alone.", show_default=False),
]
VBitsOption = Annotated[
    int | None,
    typer.Option("--v-bits", metavar="N", callback=_width, help="The same for values alone.", show_default=False),
]
GroupOption = Annotated[
    int | None,
    typer.Option(
        "--group", metavar="N", min=1, max=65535,
        help="Channels that share a scale. If left out: 64, or what divides the head.", show_default=False,
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
    int, typer.Option("-s", "--seed", metavar="N", min=0, max=2**64 - 1, help="Seed of the positions of the pieces.")
]


def calibrate(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    files: TextOption = None,
    out: OutOption = None,
    sidecar: SidecarOption = False,
    force: ForceOption = False,
    bits: BitsOption = 4,
    k_bits: KBitsOption = None,
    v_bits: VBitsOption = None,
    group: GroupOption = None,
    sinks: SinksOption = 4,
    window: WindowOption = 32,
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    ctx_size: ContextOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Find how each head of a model's KV cache is best quantized, and store that as a recipe.

    Writes a copy of the model with the recipe in its metadata, which llama.cpp runs as before, or with --sidecar the
    recipe alone. The model itself is never changed.
    """
    chosen = choose_model(model, model_option)
    if sinks >= chunk_tokens:
        raise UsageError(f"--sinks {sinks} leaves nothing of a piece of --chunk-tokens {chunk_tokens}")
    # Threads that spin while they wait take the cores from the others as soon as anything else runs on the machine
    # (measured: five times slower). OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_threads(threads)

    from kvconv import report
    from kvconv.calibrate import Settings, budget_bytes, draw
    from kvconv.calibrate import calibrate as run
    from kvconv.output import check_output, output_path, write
    from kvconv.text import read_text
    from kvrun.gguf_file import GGUFFile
    from kvrun.locate import find_model
    from kvrun.models import load_model
    from kvrun.recipe import SIDECAR_TYPE
    from kvrun.tables import markdown
    from kvrun.tokenizer import Tokenizer

    path = find_model(chosen)
    target = output_path(path, out, sidecar=sidecar)
    check_output(target, path, sidecar=sidecar, force=force)
    file = GGUFFile(path)
    if file.get("general.type") == SIDECAR_TYPE:
        raise KvError(f"{path} is a recipe alone; give the model that it belongs to")
    loaded = load_model(path, budget_bytes=budget_bytes(file))
    settings = Settings(
        bits_k=k_bits or bits,
        bits_v=v_bits or bits,
        group=group,
        sinks=sinks,
        window=window,
        n_chunks=chunks,
        chunk_tokens=chunk_tokens,
        n_ctx=ctx_size,
        seed=seed,
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
    with progress("calibrating", n_layer, unit="layers") as advance:
        recipe = run(loaded, sample, settings, on_progress=advance)
    with progress("writing") as advance:
        write(recipe, loaded.file, target, sidecar=sidecar, force=force, on_progress=advance)
    rows = report.layer_rows(recipe)
    typer.echo(markdown([*rows, report.total_row(rows)], report.COLUMNS))
    typer.echo(report.ERROR_NOTE)
    size = f"{report.bits_per_value(recipe):.2f} bits per packed value"
    typer.echo(f"\nwrote {printable(str(target))}: recipe {recipe.digest()}, {size}")
