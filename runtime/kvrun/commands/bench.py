"""`kvrun bench`: speed of cache types, ours and llama.cpp's, with memory and quality beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrun.commands import common
from kvrun.console import UsageError, note, printable
from kvrun.errors import KvError
from kvrun.tables import Column, OutputFormat, print_rows

if TYPE_CHECKING:
    from kvrun.bench import BenchRow, Setting
    from kvrun.commands.common import Session

COLUMNS = (
    Column("engine"),
    Column("cache", "cache K/V"),
    Column("impl"),
    Column("test"),
    Column("median_ts", "median t/s", ".2f"),
    Column("speed", "avg t/s"),
    Column("ttft_ms", "first ms", ".1f"),
    Column("kv_mib", "KV MiB", ".2f"),
    Column("bits_per_value", "bits/value", ".2f"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("kld_mean", "KLD mean", ".4f"),
    Column("error", "", empty=""),
)


def _numbers(text: str) -> list[int]:
    """`512`, `0,4096` or repeated options, as llama-bench takes them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise UsageError(f"{printable(text)} is no list of numbers; write it like 512 or 0,4096")
    return [int(part) for part in parts]


def _names(text: str | None) -> list[str]:
    return [] if not text else [part.strip() for part in text.split(",")]


def bench(
    model_argument: common.ModelArgument = None,
    model: common.ModelOption = None,
    n_prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="N,...", help="Tokens of a prompt, read at once; 0 for none.")
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N,...", help="Tokens generated one by one; 0 for none.")
    ] = "128",
    n_depth: Annotated[
        str, typer.Option("-d", "--n-depth", metavar="N,...", help="Tokens in the cache before each test.")
    ] = "0",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Of each test.")] = 5,
    type_k: Annotated[
        str | None,
        typer.Option(
            "-ctk", "--cache-type-k", metavar="TYPE,...", rich_help_panel=common.CACHE,
            help=f"Keys: {common.OUR_TYPES}. If left out: auto with a recipe, else f16.", show_default=False,
        ),
    ] = None,
    type_v: Annotated[
        str | None,
        typer.Option(
            "-ctv", "--cache-type-v", metavar="TYPE,...", rich_help_panel=common.CACHE,
            help="Values, each with each of the keys'. If left out: as the keys.", show_default=False,
        ),
    ] = None,
    llamacpp: Annotated[
        str | None,
        typer.Option(
            "--llamacpp", metavar="TYPE,...",
            help="llama.cpp's cache types to run beside ours in turns, such as f16,q4_0.", show_default=False,
        ),
    ] = None,
    kld_chunks: Annotated[
        int,
        typer.Option("--kld-chunks", metavar="N", min=0, help="Windows of 512 tokens for the KL divergence; 0: none."),
    ] = 1,
    file: common.FileOption = None,
    recipe: common.RecipeOption = None,
    no_recipe: common.NoRecipeOption = False,
    sinks: common.SinksOption = None,
    window: common.WindowOption = None,
    threads: common.ThreadsOption = None,
    ubatch: common.UbatchOption = 512,
    weights_budget: common.WeightsBudgetOption = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="ENGINE,...", rich_help_panel=common.MACHINE, help=f"Ours to run: {common.ENGINES}."
        ),
    ] = "auto",
    output: common.OutputOption = OutputFormat.md,
) -> None:  # fmt: skip
    """Time prompts and single tokens at any depth of the cache, as llama-bench does.

    All settings take turns, repetition by repetition, each in a process of its own. The KL divergence of each cache
    type from f16 stands beside its speed, measured on the text of -f or on the documentation in Python's library.
    """
    path = common.choose_model(model_argument, model)
    common.set_threads(threads)
    from kvrun.bench import BenchRow, jobs_for, llama_setting
    from kvrun.bench import bench as run
    from kvrun.bench_quality import with_quality
    from kvrun.evaluation.texts import MeasuredText, default_text
    from kvrun.evaluation.windows import cut

    tests = jobs_for(_numbers(n_prompt), _numbers(n_gen), _numbers(n_depth))
    engines = [common.check_engine(name) for name in _names(engine)]
    if repetitions < 3:
        note("note: fewer than 3 repetitions say little about spread", style="dim")
    session = common.load_session(
        path, type_k="f16", type_v="f16", recipe=recipe, no_recipe=no_recipe, threads=threads,
        weights_budget=weights_budget, engine="reference",
    )  # fmt: skip
    import torch

    n_threads = torch.get_num_threads()
    options = {
        "model": str(session.model.file.path), "recipe": recipe, "no_recipe": no_recipe, "sinks": sinks,
        "window": window, "threads": n_threads, "weights_budget": weights_budget,
    }  # fmt: skip
    settings = _ours(session, engines, _pairs(type_k, type_v), options, ubatch, n_threads)
    settings += [
        llama_setting(name, session.model.file.path, n_threads=n_threads, n_ubatch=min(ubatch, 512))
        for name in _names(llamacpp)
    ]
    text = MeasuredText(Path(file).name, common.read_text(file)) if file is not None else default_text()
    tokenizer = session.tokenizer
    bos = tokenizer.bos if tokenizer.add_bos else None
    windows = None
    if kld_chunks:
        windows = cut(tokenizer.encode(text.text, bos=tokenizer.add_bos), 512, bos=bos, limit=kld_chunks)
    base = BenchRow(
        "", "", "", "", "", model_filename=session.model.file.path.name,
        model_size=sum(info.n_bytes for info in session.model.file.tensors.values()), n_threads=n_threads,
        n_ubatch=ubatch, n_prompt=0, n_gen=0, n_depth=0,
    )  # fmt: skip
    rows = list(
        run(
            settings, tests, base=base, n_vocab=session.model.config.n_vocab, repetitions=repetitions,
            geometry=session.plan.geometry, on_progress=lambda what: note(what, style="dim"),
        )
    )  # fmt: skip
    if windows is not None:
        note(f"KL divergence on {len(windows)} windows of 512 tokens of {text.name}", style="dim")
        rows = with_quality(rows, settings, session, windows, text, n_threads=n_threads)
    if output is OutputFormat.md:
        print_rows([_table_row(row) for row in rows], COLUMNS, output)
    else:
        print_rows([row.as_dict() for row in rows], COLUMNS, output)
    if all(row.error for row in rows):
        raise KvError(f"no test gave a figure: {rows[0].error}")


def _pairs(type_k: str | None, type_v: str | None) -> list[tuple[str | None, str | None]]:
    keys: list[str | None] = [common.check_type(name) for name in _names(type_k)] or [None]
    if type_v is None:
        return [(k, k) for k in keys]
    return [(k, common.check_type(v)) for k in keys for v in _names(type_v)]


def _ours(
    session: Session,
    engines: list[str],
    pairs: list[tuple[str | None, str | None]],
    options: dict[str, Any],
    ubatch: int,
    n_threads: int,
) -> list[Setting]:
    """Our settings, after making sure that each can run."""
    from kvrun.bench import our_setting
    from kvrun.cache_types import plan_for
    from kvrun.engines import choose_engine

    settings = []
    said = set()
    for name in engines:
        for given_k, given_v in pairs:
            k, v = common.choose_types(given_k, given_v, has_recipe=session.recipe is not None)
            plan = plan_for(
                session.plan.geometry, k, v, recipe=session.recipe, sinks=options["sinks"], window=options["window"]
            )
            runs, why_not = choose_engine(name, session.model, n_threads=n_threads, plan=plan)
            if why_not and why_not not in said:
                note(f"engine: {runs.name}, because {why_not}", style="dim")
                said.add(why_not)
            settings.append(our_setting(runs, plan, options, n_ubatch=ubatch))
    return settings


def _table_row(row: BenchRow) -> dict[str, Any]:
    test = (f"pp{row.n_prompt}" if row.n_prompt else f"tg{row.n_gen}") + (f" @ d{row.n_depth}" if row.n_depth else "")
    return {
        **row.as_dict(),
        "cache": row.type_k if row.type_k == row.type_v else f"{row.type_k}/{row.type_v}",
        "test": test,
        "speed": None if row.avg_ts is None else f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
        "kv_mib": None if row.kv_bytes is None else row.kv_bytes / 2**20,
        "peak_mib": None if row.peak_bytes is None else row.peak_bytes / 2**20,
    }
