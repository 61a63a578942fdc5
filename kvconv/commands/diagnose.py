"""`kvconv diagnose`: which layer breaks a quantizer."""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvrun.commands.common import (
    CacheTypeK,
    CacheTypeV,
    FileOption,
    ModelArgument,
    ModelOption,
    NoRecipeOption,
    RecipeOption,
    SinksOption,
    ThreadsOption,
    WindowOption,
    choose_model,
    load_session,
    read_text,
)
from kvrun.console import UsageError, note, printable, progress


class DiagnoseFormat(str, Enum):
    """How a diagnosis is printed."""

    md = "md"
    json = "json"


class Transform(str, Enum):
    """What every head is stored under."""

    hadamard = "hadamard"
    offset = "offset"
    offset_hadamard = "offset+hadamard"


def diagnose(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    file: FileOption = None,
    heads: Annotated[bool, typer.Option("--heads", help="Each KV head by itself; as many times longer.")] = False,
    type_k: CacheTypeK = None,
    type_v: CacheTypeV = None,
    transform: Annotated[
        Transform | None,
        typer.Option(
            "--transform",
            help="Store every head under this; an offset is for keys alone, and learned on a piece of text that is "
            "not scored. If left out: what the cache type says.",
            show_default=False,
        ),
    ] = None,
    recipe: RecipeOption = None,
    no_recipe: NoRecipeOption = False,
    sinks: SinksOption = None,
    window: WindowOption = None,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", metavar="N", envvar="LLAMA_ARG_CTX_SIZE", min=4, help="Window in tokens.")
    ] = 256,
    chunks: Annotated[int, typer.Option("--chunks", metavar="N", min=1, help="Windows of the text to measure.")] = 1,
    png: Annotated[
        str | None,
        typer.Option("--png", metavar="FILE", help="Draw a heat map, layer by head.", show_default=False),
    ] = None,
    threads: ThreadsOption = None,
    output: Annotated[DiagnoseFormat, typer.Option("-o", "--output", help="Table, or everything.")] = DiagnoseFormat.md,
) -> None:
    """Find the layer that breaks a quantizer: quantize each layer's keys or values alone, then all but them.

    Without -ctk and -ctv the recipe is looked into, or kv4 where there is none. What stands out is named, with the
    setting that repairs it, found by trying. Without -f the text is the documentation inside Python's library.
    """
    chosen = choose_model(model, model_option)
    # Threads that spin while they wait take the cores from others; OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if png is not None:
        from kvconv.diagnosis_table import require_matplotlib

        require_matplotlib()
        if not Path(png).absolute().parent.is_dir():
            raise UsageError(f"the folder of {printable(png)} does not exist; create it or name another file")

    from kvconv import __version__, diagnosis_table
    from kvconv.diagnose import diagnose as run
    from kvconv.diagnose import with_transform
    from kvconv.standout import find, key_means
    from kvrun.compare import SAME_TEXT
    from kvrun.evaluation.texts import MeasuredText, default_text
    from kvrun.evaluation.windows import Windows, cut
    from kvrun.tables import markdown, plain

    text = MeasuredText(Path(file).name, read_text(file)) if file is not None else default_text()
    session = load_session(
        chosen, ctx_size=ctx_size, type_k=type_k, type_v=type_v, recipe=recipe, no_recipe=no_recipe, sinks=sinks,
        window=window, threads=threads, announce=False,
    )  # fmt: skip
    plan, loaded, tokenizer = session.plan, session.model, session.tokenizer
    if session.recipe is None and type_k is None and type_v is None:
        from kvrun.cache_types import plan_for

        plan = plan_for(plan.geometry, "kv4", "kv4", recipe=None, sinks=sinks, window=window)
    if plan.recipe and text.was_used_by(session.recipe):
        note(f"WARNING: {SAME_TEXT}; diagnose on another text with -f", style="bold red")
    bos = tokenizer.bos if tokenizer.add_bos else None
    cuts = cut(tokenizer.encode(text.text, bos=tokenizer.add_bos), ctx_size, bos=bos, limit=chunks + 1)
    # What is learned for a repair is learned on the window after those that are scored.
    learned_on = cuts.tokens[-1:]
    windows = Windows(cuts.tokens[: max(len(cuts) - 1, 1)])
    if len(cuts) == 1:
        note("note: the text fills a single window, so offsets are learned on what is scored", style="yellow")
    what = f"{plan.type_k}/{plan.type_v}" + (f" ({plan.recipe[:8]})" if plan.recipe else "")
    if transform is not None:
        what += f" {transform.value}"
        needs_means = transform is not Transform.hadamard
        learned = key_means(loaded, learned_on, plan.sinks) if needs_means else None
        plan = with_transform(plan, hadamard=transform is not Transform.offset, means=learned)
    note(
        f"{what} on {printable(text.name)}: {len(windows)} x {windows.n_ctx} tokens, {windows.n_scored} scored",
        style="dim",
    )
    with progress("measuring", 1, unit="passes") as advance:
        diagnosis = run(loaded, windows, plan, heads=heads, on_progress=advance)
    with progress("trying repairs", 1, unit="settings") as advance:
        findings = find(
            loaded, windows, diagnosis, means=lambda: key_means(loaded, learned_on, plan.sinks), on_progress=advance
        )
    if png is not None:
        diagnosis_table.write_png(diagnosis, Path(png))
    if output is DiagnoseFormat.json:
        facts = {
            "tool_version": f"kvconv {__version__}",
            "model": loaded.file.path.name,
            "fingerprint": loaded.file.fingerprint(),
            "text": text.name,
            "text_sha256": text.sha256,
            "cache": what,
            "sinks": plan.sinks,
            "window": plan.window,
            "n_ctx": windows.n_ctx,
            "n_windows": len(windows),
        }
        content = diagnosis_table.as_object(diagnosis, findings, facts)
        typer.echo(json.dumps(plain(content), indent=2, ensure_ascii=False))
        return
    rows = diagnosis_table.table_rows(diagnosis)
    typer.echo(markdown(rows, diagnosis_table.columns(diagnosis)))
    typer.echo(diagnosis_table.NOTE)
    typer.echo(
        f"\n{what}, everything quantized: {diagnosis.kld_all:.4f} ± {diagnosis.kld_all_se:.4f} nats, "
        f"{diagnosis.n_scored} scored positions."
    )
    for finding in findings:
        typer.echo(finding.sentence)
    if not findings:
        typer.echo("No part stands out.")
