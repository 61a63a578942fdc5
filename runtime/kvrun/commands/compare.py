"""`kvrun compare`: our cache types beside llama.cpp's, in one table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrun.commands.common import (
    EngineOption,
    FileOption,
    ModelArgument,
    ModelOption,
    NoRecipeOption,
    OutputOption,
    RecipeOption,
    ThreadsOption,
    UbatchOption,
    WeightsBudgetOption,
    choose_model,
    load_session,
    parse_size,
    read_text,
    set_threads,
)
from kvrun.console import UsageError, note, printable, progress
from kvrun.errors import MeasurementError
from kvrun.tables import OutputFormat, print_rows

if TYPE_CHECKING:
    from kvrun.compare import Progress
    from kvrun.results import ResultRow


def compare(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    file: FileOption = None,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", metavar="N", envvar="LLAMA_ARG_CTX_SIZE", min=4, help="Window in tokens.")
    ] = 512,
    chunks: Annotated[
        int, typer.Option("--chunks", metavar="N", min=-1, help="Windows of the text to measure; -1 is all.")
    ] = 3,
    recipe: RecipeOption = None,
    no_recipe: NoRecipeOption = False,
    ubatch: UbatchOption = 512,
    threads: ThreadsOption = None,
    weights_budget: WeightsBudgetOption = None,
    engine: EngineOption = "reference",
    report_folder: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="DIR", help="Write report.json, report.md and report.html here.", show_default=False
        ),
    ] = None,
    diagnosis: Annotated[
        Path | None,
        typer.Option(
            "--diagnose",
            metavar="FILE",
            help="Show this output of `kvconv diagnose -o json` in the report.",
            show_default=False,
        ),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            "--matrix", metavar="FILE", help="TOML file with texts, contexts, chunks and settings.", show_default=False
        ),
    ] = None,
    at_bytes: Annotated[
        str | None,
        typer.Option(
            "--at-bytes",
            metavar="TYPE",
            help="Also our types with the widest window that fits in the bytes of this type of llama.cpp's.",
            show_default=False,
        ),
    ] = None,
    presets: Annotated[
        bool, typer.Option("--presets", help="Also KIVI, SKVQ, QuaRot and others of `perplexity --preset`.")
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="FILE",
            help="Append each finished row to this JSONL file, and do not measure again what it holds.",
            show_default=False,
        ),
    ] = None,
    references: Annotated[
        str,
        typer.Option(
            "--references",
            metavar="SIZE",
            help="Disk space for the distributions of the f16 caches, kept between runs; 0 keeps none.",
        ),
    ] = "4G",
    force: Annotated[bool, typer.Option("--force", help="Write the report into a folder that exists.")] = False,
    output: OutputOption = OutputFormat.md,
) -> None:
    """Every cache type on the same text: ours, the recipe, and llama.cpp's with its rotation on and off.

    Each row is measured against the f16 cache of its own engine. Without -f the text is the documentation inside
    Python's library; 3 windows are enough to tell rows apart that differ by a factor of 1.5. When the control (1-bit
    keys) does not fail, the table is still written and the exit status is 1. With --results an interrupted comparison
    goes on where it was: same model, text, cut, cache types, engine, threads and code are the same row.
    """
    limit_bytes = parse_size(references)
    path = choose_model(model_argument, model)
    set_threads(threads)
    if report_folder is None and (force or diagnosis is not None):
        raise UsageError("--force and --diagnose belong to a report; name its folder with --report")
    layers = None
    if report_folder is not None:
        from kvrun.report import check_folder, read_diagnosis

        check_folder(report_folder, force=force)
        layers = None if diagnosis is None else read_diagnosis(diagnosis)
    from kvrun.engine import CHUNK_INVARIANT_ROWS
    from kvrun.evaluation.texts import MeasuredText, default_text
    from kvrun.llamacpp import ggml_type
    from kvrun.matrix import Matrix, read_matrix

    if at_bytes is not None:
        ggml_type(at_bytes)
    wanted = Matrix() if matrix is None else read_matrix(matrix)
    if file is not None and wanted.texts is not None:
        raise UsageError("texts were named twice, with -f and in the file of --matrix; name them once")
    files = wanted.texts or ((file,) if file is not None else ())
    texts = [MeasuredText(Path(name).name, read_text(str(name))) for name in files] or [default_text()]
    contexts = wanted.contexts or (ctx_size,)
    session = load_session(
        path, ctx_size=max(contexts), type_k="f16", type_v="f16", recipe=recipe, no_recipe=no_recipe, threads=threads,
        weights_budget=weights_budget, block_rows=CHUNK_INVARIANT_ROWS, engine=engine,
    )  # fmt: skip
    import torch

    from kvrun.compare import SAME_TEXT, control_complaint
    from kvrun.compare import compare as run
    from kvrun.compare_table import COLUMNS, report
    from kvrun.evaluation.reference_cache import ReferenceCache
    from kvrun.evaluation.windows import cut
    from kvrun.result_file import ResultFile

    settings = wanted.our_settings(session.model.config.geometry, session.recipe)
    if session.recipe is None:
        note("no recipe: its rows are missing; make one with `kvconv calibrate`, or name it with --recipe")
    tokenizer, limit = session.tokenizer, chunks if wanted.chunks is None else wanted.chunks
    bos = tokenizer.bos if tokenizer.add_bos else None
    cases = []
    for text in texts:  # all are cut before the first is measured: what is too short is known now
        tokens = tokenizer.encode(text.text, bos=tokenizer.add_bos)
        cases += [(text, cut(tokens, n_ctx, bos=bos, limit=limit)) for n_ctx in contexts]

    known = None if results is None else ResultFile(results, partial(note, style="yellow"))
    if known is not None and len(known):
        note(
            f"{printable(str(results))} holds {len(known)} rows; those of this comparison are taken from it",
            style="dim",
        )
    kept = ReferenceCache(note, limit_bytes=limit_bytes or 0)
    tables: list[list[ResultRow]] = []
    for number, (text, windows) in enumerate(cases, 1):
        note(f"{text.name}: {len(windows)} windows of {windows.n_ctx} tokens, {windows.n_scored} scored", style="dim")
        if text.was_used_by(session.recipe):
            note(f"WARNING: {SAME_TEXT}; measure on another text with -f", style="bold red")
        rows: list[ResultRow] = []
        with closing(_Reporter()) as reporter:
            for row in run(
                session.engine, windows, text, recipe=session.recipe, n_threads=torch.get_num_threads(),
                n_ubatch=ubatch, llama_settings=wanted.llama, presets=presets, wanted=settings, at_bytes=at_bytes,
                results=known, references=kept, on_progress=reporter.progress,
            ):  # fmt: skip
                reporter.finished(row)
                rows.append(row)
        tables.append(rows)
        if output is OutputFormat.md:
            if len(cases) > 1:
                print(f"{'' if number == 1 else chr(10)}## {printable(text.name)}, context {windows.n_ctx}\n")
            print(report(rows), end="", flush=True)
        if report_folder is not None:
            from kvrun.report import curves_of, header_of, write_report

            folder = report_folder
            if len(cases) > 1:
                report_folder.mkdir(exist_ok=True)
                folder = report_folder / f"{number}-context-{windows.n_ctx}"
            header = header_of(session.model.file, text, windows, session.recipe)
            written = write_report(rows, header, folder, positions=curves_of(rows), layers=layers, force=True)
            note(f"wrote {', '.join(printable(str(path)) for path in written)}", style="dim")
    if output is not OutputFormat.md:
        print_rows([row.as_dict() for rows in tables for row in rows], COLUMNS, output)
    complaint = next(filter(None, map(control_complaint, tables)), "")
    if complaint:
        raise MeasurementError(complaint)


class _Reporter:
    """A bar on stderr for the row in work, and a line for each that is done."""

    def __init__(self) -> None:
        self._bar = ExitStack()
        self._what = ""
        self._advance: Callable[..., None] = lambda done: None

    def progress(self, now: Progress) -> None:
        """Take news of the row in work."""
        if now.what != self._what:
            self.close()
            self._what = now.what
            self._advance = self._bar.enter_context(progress(now.what, now.total, unit="windows"))
        self._advance(now.done)

    def finished(self, row: ResultRow) -> None:
        """Say what came out of a row."""
        self.close()
        name = f"{row.engine} {row.type_k}/{row.type_v}"
        if row.engine == "kvrun":
            name += f", {row.sinks} sinks, window {row.window}"
        elif row.type_k != "f16":
            name += f", rotation {row.rotation}"
        if row.reference:
            name += f" against {row.reference}"
        if row.error:
            note(f"{name}: {row.error}", style="red")
        else:
            ppl = "infinite" if row.ppl is None else f"{row.ppl:.3f}"
            note(f"{name}: PPL {ppl}, KLD {row.kld_mean:.4f}", style="dim")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
        self._what = ""
