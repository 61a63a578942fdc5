"""`kvrun chat`"""

from __future__ import annotations

from typing import Annotated

import typer

from kvrun.commands import common
from kvrun.console import printable


def chat(
    model_argument: common.ModelArgument = None,
    model: common.ModelOption = None,
    prompt: common.PromptOption = None,
    file: common.FileOption = None,
    system: Annotated[
        str | None, typer.Option("-sys", "--system-prompt", metavar="TEXT", help="System prompt.", show_default=False)
    ] = None,
    single_turn: Annotated[bool, typer.Option("-st", "--single-turn", help="Leave after one answer.")] = False,
    n_predict: common.PredictOption = -1,
    timings: Annotated[
        bool, typer.Option("--show-timings/--no-show-timings", help="Speed and memory after each answer.")
    ] = True,
    ctx_size: common.ContextOption = 0,
    type_k: common.CacheTypeK = None,
    type_v: common.CacheTypeV = None,
    recipe: common.RecipeOption = None,
    no_recipe: common.NoRecipeOption = False,
    sinks: common.SinksOption = None,
    window: common.WindowOption = None,
    temp: common.TempOption = 0.8,
    top_k: common.TopKOption = 40,
    top_p: common.TopPOption = 0.95,
    min_p: common.MinPOption = 0.05,
    seed: common.SeedOption = -1,
    threads: common.ThreadsOption = None,
    ubatch: common.UbatchOption = 512,
    weights_budget: common.WeightsBudgetOption = None,
    engine: common.EngineOption = "auto",
    gpu_layers: common.GpuLayersOption = None,
) -> None:
    """Talk with a model. The conversation stays in the packed cache from turn to turn.

    Answers go to stdout, everything else to stderr. -p or -f give the first question; lines of stdin are the next ones,
    also from a pipe. In the chat, /help lists the commands.
    """
    chosen = common.choose_model(model_argument, model)
    first = common.choose_prompt(prompt, file)
    session = common.load_session(
        chosen,
        ctx_size=ctx_size,
        type_k=type_k,
        type_v=type_v,
        recipe=recipe,
        no_recipe=no_recipe,
        sinks=sinks,
        window=window,
        threads=threads,
        weights_budget=weights_budget,
        engine=engine,
    )
    from kvrun.chat import Conversation
    from kvrun.repl import LineReader, Repl
    from kvrun.sampling import Sampler, SamplingOptions

    session.tokenizer.render_chat([{"role": "user", "content": ""}], add_generation_prompt=True)
    sampler = Sampler(SamplingOptions(top_k=top_k, top_p=top_p, min_p=min_p, temp=temp, seed=seed))
    cache = session.engine.new_cache(session.plan, session.n_ctx)
    conversation = Conversation(
        session.engine, session.tokenizer, cache, sampler, system=system, n_predict=n_predict, n_ubatch=ubatch
    )

    def stats() -> str:
        plan, name = session.plan, session.model.config.name or session.model.file.path.name
        drawn = "greedy" if sampler.greedy else f"seed {sampler.seed}"
        return "\n".join(
            [
                f"model    {printable(name)} ({session.model.config.arch}), engine {session.engine.name}, {drawn}",
                f"context  {cache.n_tokens} of {cache.n_ctx} tokens, {len(conversation.messages)} messages",
                f"cache    keys {plan.type_k}, values {plan.type_v}, recipe {plan.recipe or 'none'}, "
                f"{plan.sinks} sinks, window {plan.window}",
                f"memory   {cache.n_bytes / 2**20:.1f} MiB, {cache.bits_per_value:.2f} bits/value, "
                f"{cache.packed_read} packed tokens read",
            ]
        )

    reader = LineReader()
    if reader.interactive and not single_turn:
        common.note("/help lists the commands, /exit leaves, Ctrl-C stops an answer", style="dim")
    Repl(conversation, reader, stats, timings=timings).run(first, single_turn=single_turn)
