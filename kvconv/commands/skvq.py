"""`kvconv skvq`: the recipe that kvrun's presets `skvq` and `skvq-safe` run."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvconv.commands.calibrate import (
    ChunksOption,
    ChunkTokensOption,
    ContextOption,
    ForceOption,
    OutOption,
    SidecarOption,
    TextOption,
)
from kvrun.commands.common import ModelArgument, ModelOption, ThreadsOption, choose_model, set_threads
from kvrun.console import note, printable, progress
from kvrun.errors import KvError


def skvq(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    files: TextOption = None,
    out: OutOption = None,
    sidecar: SidecarOption = False,
    force: ForceOption = False,
    safe: Annotated[
        bool, typer.Option("--safe", help="Order the channels of a head only where that lowers its round-trip error.")
    ] = False,
    bits: Annotated[int, typer.Option("--bits", metavar="N", min=2, max=8, help="Bits of a code.")] = 2,
    group: Annotated[
        int,
        typer.Option(
            "--group",
            metavar="N",
            min=8,
            help="Channels that share a scale; the whole head where it does not divide it.",
        ),
    ] = 128,
    chunks: ChunksOption = 8,
    chunk_tokens: ChunkTokensOption = 512,
    ctx_size: ContextOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Make a recipe by the method of SKVQ (arXiv 2405.06219), to compare with: `kvrun perplexity --preset skvq`.

    Channels ordered by clusters of calibrated ranges, clip 0.96, 5 sinks, a window of 128 tokens. Where a group is the
    whole head the order changes nothing: choose a smaller --group to see it act. For a recipe that is meant to be used,
    see `kvconv calibrate`.
    """
    chosen = choose_model(model, model_option)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_threads(threads)

    from kvconv.calibrate import Settings, draw
    from kvconv.gather import budget_bytes
    from kvconv.output import check_output, output_path, write
    from kvconv.skvq import SINKS, calibrate_skvq
    from kvconv.text import read_text
    from kvrun.gguf_split import open_model
    from kvrun.locate import find_model
    from kvrun.models import load_model
    from kvrun.recipe import SIDECAR_TYPE
    from kvrun.tokenizer import Tokenizer

    file = open_model(find_model(chosen))
    path = file.path
    target = output_path(path, out, sidecar=sidecar)
    check_output(target, file, sidecar=sidecar, force=force)
    if file.get("general.type") == SIDECAR_TYPE:
        raise KvError(f"{path} is a recipe alone; give the model that it belongs to")
    loaded = load_model(path, budget_bytes=budget_bytes(file))
    settings = Settings(sinks=SINKS, n_chunks=chunks, chunk_tokens=chunk_tokens, n_ctx=ctx_size, guard=False)
    text = read_text(files or [])
    tokenizer = Tokenizer(path)
    bos = tokenizer.bos if tokenizer.add_bos else None
    sample = draw(text, tokenizer.encode, settings, loaded.config.n_ctx_train, bos)
    note(f"text: {printable(text.name)}, {len(sample.tokens)} pieces of {chunk_tokens} tokens", style="dim")
    with progress("calibrating", loaded.config.n_layer, unit="layers") as advance:
        recipe = calibrate_skvq(loaded, sample, safe=safe, bits=bits, group=group, on_progress=advance)
    with progress("writing") as advance:
        write(recipe, loaded.file, target, sidecar=sidecar, force=force, on_progress=advance)
    heads = [head for side in (recipe.k, recipe.v) for layer in side for head in layer]
    n_ordered = sum(head.transform.order is not None for head in heads)
    typer.echo(f"{n_ordered} of {len(heads)} heads have their channels ordered")
    if not n_ordered and not safe:
        note("note: a group is the whole head here, so there was nothing to order; see --group", style="yellow")
    typer.echo(f"wrote {printable(str(target))}: recipe {recipe.digest()}")
