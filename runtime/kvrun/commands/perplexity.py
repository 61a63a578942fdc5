"""`kvrun perplexity`: how well the model predicts a text with a given cache."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrun.commands.common import (
    CACHE,
    MACHINE,
    CacheTypeK,
    CacheTypeV,
    EngineOption,
    FileOption,
    ModelArgument,
    ModelOption,
    NoRecipeOption,
    RecipeOption,
    SinksOption,
    ThreadsOption,
    UbatchOption,
    WeightsBudgetOption,
    WindowOption,
    choose_model,
    load_session,
    read_text,
    set_threads,
)
from kvrun.console import UsageError, note, stderr
from kvrun.tables import OutputFormat, print_rows

if TYPE_CHECKING:
    from kvrun.engine import Engine
    from kvrun.evaluation.perplexity import Run
    from kvrun.evaluation.windows import Windows
    from kvrun.plan import CachePlan

ChunksOption = Annotated[
    int, typer.Option("--chunks", metavar="N", min=-1, help="Windows of the text to measure; -1 is all.")
]
WindowSizeOption = Annotated[
    int, typer.Option("-c", "--ctx-size", metavar="N", envvar="LLAMA_ARG_CTX_SIZE", min=4, help="Tokens per window.")
]


class FeedPath(str, Enum):
    """How a window is fed: chunk by chunk, or token by token."""

    parallel = "parallel"
    decode = "decode"


class Dtype(str, Enum):
    """What the engine computes in; what the cache stores does not depend on it."""

    float32 = "float32"
    float64 = "float64"


PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", rich_help_panel=CACHE,
        help="A published system in place of -ctk and -ctv: f16, kivi2, kivi4, quarot, had-v2-kivi4, skvq, skvq-safe. "
        "The last two need a recipe by `kvconv skvq`.",
        show_default=False,
    ),
]  # fmt: skip
PathOption = Annotated[
    FeedPath,
    typer.Option("--path", help="parallel feeds -ub tokens at once, decode one by one: the same figures, slowly."),
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", rich_help_panel=MACHINE, help="float64 is for proofs: slow, twice the memory.")
]
VerifyOption = Annotated[
    int,
    typer.Option(
        "--verify", metavar="N", min=0,
        help="First decode N tokens of the first window for real and fail if the parallel path gives anything else.",
    ),
]  # fmt: skip


def perplexity(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    file: FileOption = None,
    ctx_size: WindowSizeOption = 512,
    chunks: ChunksOption = -1,
    type_k: CacheTypeK = None,
    type_v: CacheTypeV = None,
    preset: PresetOption = None,
    kl_divergence: Annotated[
        bool, typer.Option("--kl-divergence", help="Run the f16 cache beside it and report the divergence from it.")
    ] = False,
    recipe: RecipeOption = None,
    no_recipe: NoRecipeOption = False,
    sinks: SinksOption = None,
    window: WindowOption = None,
    path: PathOption = FeedPath.parallel,
    verify: VerifyOption = 0,
    dtype: DtypeOption = Dtype.float32,
    ubatch: UbatchOption = 512,
    threads: ThreadsOption = None,
    weights_budget: WeightsBudgetOption = None,
    engine: EngineOption = "reference",
    bypass_cache: Annotated[
        bool,
        typer.Option(
            "--bypass-cache",
            rich_help_panel=MACHINE,
            help="The classic mistake: a forward pass that never reads the cache. It runs, and its figure is refused.",
        ),
    ] = False,
    output: Annotated[
        OutputFormat | None,
        typer.Option("-o", "--output", help="Print a row as a table; if left out: the estimate.", show_default=False),
    ] = None,
) -> None:
    """Perplexity of a text, with every key and value read through the cache.

    As llama-perplexity does it: windows that do not overlap, the second half of each is scored. Without -f the text is
    the documentation inside Python's library.
    """
    chosen = choose_model(model_argument, model)
    if preset is not None and (type_k, type_v, sinks, window) != (None,) * 4:
        raise UsageError("--preset is a whole setting; leave out -ctk, -ctv, --sinks and --window")
    if preset is not None:
        type_k = type_v = "f16"
    if dtype is Dtype.float64 and engine != "reference":
        raise UsageError(f"the engine {engine} computes in float32; for --dtype float64 leave out --engine")
    set_threads(threads)
    from kvrun.engine import CHUNK_INVARIANT_ROWS
    from kvrun.evaluation.texts import MeasuredText, default_text

    text = MeasuredText(Path(file).name, read_text(file)) if file is not None else default_text()
    session = load_session(
        chosen, ctx_size=ctx_size, type_k=type_k, type_v=type_v, recipe=recipe, no_recipe=no_recipe,
        sinks=sinks, window=window, threads=threads, weights_budget=weights_budget, dtype=dtype.value,
        block_rows=CHUNK_INVARIANT_ROWS if dtype is Dtype.float32 else 0, engine=engine,
    )  # fmt: skip
    import torch

    from kvrun.cache_types import plan_for
    from kvrun.compare import SAME_TEXT
    from kvrun.evaluation.perplexity import run_plans
    from kvrun.evaluation.windows import cut
    from kvrun.presets import preset_plan

    plan = session.plan
    if preset is not None:
        plan = preset_plan(preset, plan.geometry, session.recipe)
    warning = SAME_TEXT if plan.recipe and text.was_used_by(session.recipe) else ""
    if warning:
        note(f"warning: {warning}; measure on another text", style="yellow")
    tokenizer = session.tokenizer
    bos = tokenizer.bos if tokenizer.add_bos else None
    windows = cut(tokenizer.encode(text.text, bos=tokenizer.add_bos), ctx_size, bos=bos, limit=chunks)
    note(f"{text.name}: {len(windows)} windows of {windows.n_ctx} tokens, {windows.n_scored} scored", style="dim")
    if verify:
        _verify(session.engine, plan, windows, verify)
    reference = plan_for(plan.geometry, "f16", "f16", recipe=None) if kl_divergence else None
    running = stderr()

    def show(done: int, runs: list[Run]) -> None:
        # Refused at the first window, so that not even a running figure of an unread cache is seen.
        runs[0].check()
        running.print(f"[{done}]{runs[0].scores.ppl:.4f},", end="")

    try:
        (run,) = run_plans(
            session.engine, windows, [plan], reference=reference,
            n_ubatch=1 if path is FeedPath.decode else ubatch, bypass=bypass_cache,
            on_window=None if bypass_cache else show,
        )  # fmt: skip
    finally:
        if not bypass_cache:
            running.print()
    run.check()
    row = run.row(model=session.model.file.path.name, text=text, n_threads=torch.get_num_threads(), note=warning)
    if output is None:
        print(f"Final estimate: PPL = {row.ppl:.4f} +/- {row.ppl_se:.5f}")
        if row.kld_mean is not None:
            print(f"Mean KLD: {row.kld_mean:.6f} +/- {row.kld_mean_se:.6f}, 99% {row.kld_p99:.6f}")
            print(f"Same top: {100 * (row.same_top or 0):.2f} +/- {100 * (row.same_top_se or 0):.2f} %")
    else:
        from kvrun.compare_table import COLUMNS, table_row

        rows = [row.as_dict()] if output is not OutputFormat.md else [table_row(row)]
        print_rows(rows, COLUMNS, output)
    note(
        f"{row.type_k}/{row.type_v}: {row.bits_per_value:.2f} bits/value, {(row.kv_bytes or 0) / 2**20:.2f} MiB, "
        f"{row.packed_read} packed tokens read, {row.tokens_per_s:.0f} tokens/s",
        style="dim",
    )


def _verify(engine: Engine, plan: CachePlan, windows: Windows, n: int) -> None:
    """Hold the parallel path to real decoding, and say what came out."""
    from kvrun.evaluation.verify import WHY_NO_LIMIT, verify_paths

    if n > windows.n_ctx:
        raise UsageError(f"--verify {n} is more than a window of {windows.n_ctx} tokens")
    found = verify_paths(engine, plan, windows.tokens[0, :n].tolist())
    note(
        f"parallel against decoding, {found.n_tokens} tokens: log-probabilities differ by at most "
        f"{found.max_log_prob:.1e}, mean KL divergence {found.mean_kld:.1e}",
        style="dim",
    )
    if not found.decisive:
        note(f"warning: {WHY_NO_LIMIT}", style="yellow")
