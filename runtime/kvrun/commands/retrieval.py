"""`kvrun retrieval`: facts hidden in a long text, and greedy continuations beside those of the f16 cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvrun.commands.common import (
    CacheTypeK,
    CacheTypeV,
    EngineOption,
    FileOption,
    ModelArgument,
    ModelOption,
    NoRecipeOption,
    OutputOption,
    RecipeOption,
    SinksOption,
    ThreadsOption,
    UbatchOption,
    WeightsBudgetOption,
    WindowOption,
    choose_model,
    load_session,
    read_text,
)
from kvrun.commands.perplexity import PresetOption
from kvrun.console import UsageError, note, progress
from kvrun.tables import Column, OutputFormat, print_rows

NEEDLE_COLUMNS = (
    Column("depth", "depth", ".2f"),
    Column("position", "at token"),
    Column("n_tokens", "of"),
    Column("answer"),
    Column("log_prob", "log-prob", ".3f"),
    Column("log_prob_f16", "log-prob f16", ".3f"),
    Column("found"),
    Column("found_f16", "found f16"),
)
GREEDY_COLUMNS = (
    Column("prompt"),
    Column("n_tokens", "prompt tokens"),
    Column("n_same", "same tokens"),
    Column("n_generated", "of"),
    Column("identical"),
)


def _depths(text: str) -> str:
    for part in text.split(","):
        try:
            good = 0.0 <= float(part) <= 1.0
        except ValueError:
            good = False
        if not good:
            raise UsageError(f"--depths takes numbers from 0 to 1 with commas between them, not {part!r}")
    return text


def retrieval(
    model_argument: ModelArgument = None,
    model: ModelOption = None,
    needle: Annotated[bool, typer.Option("--needle", help="Only the facts that are hidden in a text.")] = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="Only the greedy continuations.")] = False,
    file: FileOption = None,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", metavar="N", min=64, help="Tokens of a text with a fact in it.")
    ] = 1024,
    depths: Annotated[
        str, typer.Option("--depths", callback=_depths, help="Where a fact is hidden: 0 is first, 1 is last.")
    ] = "0,0.25,0.5,0.75,1",
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", min=1, help="Prompts that are continued.")] = 4,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Tokens of each.")] = 256,
    n_predict: Annotated[
        int, typer.Option("-n", "--predict", "--n-predict", metavar="N", min=1, help="Tokens of a continuation.")
    ] = 32,
    type_k: CacheTypeK = None,
    type_v: CacheTypeV = None,
    preset: PresetOption = None,
    recipe: RecipeOption = None,
    no_recipe: NoRecipeOption = False,
    sinks: SinksOption = None,
    window: WindowOption = None,
    ubatch: UbatchOption = 512,
    threads: ThreadsOption = None,
    weights_budget: WeightsBudgetOption = None,
    engine: EngineOption = "reference",
    output: OutputOption = OutputFormat.md,
) -> None:
    """What a cache does to retrieval and to the model's own words, beside the f16 cache.

    A fact is hidden at several depths of a text and asked for: the log-probability of the right answer, and whether
    greedy decoding gives it. Prompts from the text are continued greedily: how many tokens stay those of the f16 cache.
    A small model fails at some of it with any cache: what counts is the difference.
    """
    chosen = choose_model(model_argument, model)
    if preset is not None and (type_k, type_v, sinks, window) != (None,) * 4:
        raise UsageError("--preset is a whole setting; leave out -ctk, -ctv, --sinks and --window")
    if preset is not None:
        type_k = type_v = "f16"
    if needle == greedy and output not in (OutputFormat.md, OutputFormat.jsonl):
        raise UsageError(f"-o {output.value} holds one table; choose --needle or --greedy")
    session = load_session(
        chosen, ctx_size=ctx_size, type_k=type_k, type_v=type_v, recipe=recipe, no_recipe=no_recipe,
        sinks=sinks, window=window, threads=threads, weights_budget=weights_budget, engine=engine,
    )  # fmt: skip
    from kvrun.cache_types import plan_for
    from kvrun.errors import KvError
    from kvrun.evaluation import retrieval as checks
    from kvrun.evaluation.texts import default_text
    from kvrun.presets import preset_plan

    plan = session.plan if preset is None else preset_plan(preset, session.plan.geometry, session.recipe)
    f16 = plan_for(plan.geometry, "f16", "f16", recipe=None)
    tokenizer = session.tokenizer
    tokens = list(tokenizer.encode(default_text().text if file is None else read_text(file), bos=tokenizer.add_bos))
    setting = {"type_k": plan.type_k, "type_v": plan.type_v, "sinks": plan.sinks, "window": plan.window}

    def show(rows: list[dict[str, Any]], columns: tuple[Column, ...]) -> None:
        print_rows([{**setting, **row} for row in rows], columns, output)

    if needle or not greedy:
        places = [float(part) for part in depths.split(",")]
        hidden = [checks.hide(tokens, tokenizer.encode, d, ctx_size, index=i) for i, d in enumerate(places)]
        found = []
        with progress("asking", len(hidden), unit="facts") as advance:
            for row in checks.needles(session.engine, plan, f16, hidden, n_ubatch=ubatch):
                found.append(row)
                advance(len(found))
        show([asdict(row) for row in found], NEEDLE_COLUMNS)
        n_found, n_f16 = sum(row.found for row in found), sum(row.found_f16 for row in found)
        note(f"{plan.type_k}/{plan.type_v} finds {n_found} of {len(found)}, f16 {n_f16}", style="dim")
    if greedy or not needle:
        starts = range(0, len(tokens) - prompt_tokens + 1, max(prompt_tokens, len(tokens) // prompts))
        pieces = [tokens[start : start + prompt_tokens] for start in starts][:prompts]
        if not pieces:
            raise KvError(
                f"the text has {len(tokens)} tokens, less than one prompt of {prompt_tokens}; give a longer text or a "
                "smaller --prompt-tokens"
            )
        same = []
        with progress("continuing", len(pieces), unit="prompts") as advance:
            for part in checks.greedy(
                session.engine, plan, f16, pieces, n_predict, tokenizer.eog, n_ubatch=ubatch
            ):  # fmt: skip
                same.append(part)
                advance(len(same))
        show([{**asdict(row), "identical": row.identical} for row in same], GREEDY_COLUMNS)
        n_identical, mean_same = sum(row.identical for row in same), sum(row.n_same for row in same) / len(same)
        note(
            f"{n_identical} of {len(same)} continuations are identical to f16's; {mean_same:.1f} tokens are the same "
            "on average before they part or end",
            style="dim",
        )
