"""`kvrun generate`"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvrun.commands import common
from kvrun.console import LateProgress, UsageError, note, printable_text


def generate(
    model_argument: common.ModelArgument = None,
    model: common.ModelOption = None,
    prompt: common.PromptOption = None,
    file: common.FileOption = None,
    n_predict: common.PredictOption = -1,
    echo: Annotated[bool, typer.Option("--display-prompt", help="Print the prompt before its continuation.")] = False,
    timings: Annotated[
        bool, typer.Option("--show-timings/--no-show-timings", help="Speed and memory at the end.")
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
    """Continue a text, without a chat template.

    Only the continuation goes to stdout, so that it can be piped; --display-prompt prints the prompt before it, as
    llama.cpp does. Control tokens written out in the prompt, such as <|im_start|>, are read as control tokens.
    """
    chosen = common.choose_model(model_argument, model)
    text = common.choose_prompt(prompt, file)
    if text is None:
        raise UsageError("no prompt was given; use -p TEXT, or -f FILE (- is stdin)")
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
    from kvrun.engine import Stopped
    from kvrun.generate import Timing, new_tokens, read_prompt
    from kvrun.interrupt import Interrupts
    from kvrun.sampling import Sampler, SamplingOptions
    from kvrun.tokenizer import TextStream

    tokenizer, runs = session.tokenizer, session.engine
    sampler = Sampler(SamplingOptions(top_k=top_k, top_p=top_p, min_p=min_p, temp=temp, seed=seed))
    if seed < 0 and not sampler.greedy:
        note(f"seed: {sampler.seed}", style="dim")
    tokens = tokenizer.encode(text, bos=tokenizer.add_bos, special=True)
    cache = runs.new_cache(session.plan, session.n_ctx)
    timing, stream, progress = Timing(), TextStream(), LateProgress("reading", unit="tokens")
    to_terminal = sys.stdout.isatty()

    def write(part: str) -> None:
        sys.stdout.write(printable_text(part) if to_terminal else part)
        sys.stdout.flush()

    with Interrupts() as interrupts:
        try:
            logits = read_prompt(
                runs,
                cache,
                tokens,
                timing,
                n_ubatch=ubatch,
                should_stop=interrupts.stop,
                on_progress=lambda done: progress(done, len(tokens)),
            )
        except Stopped:
            raise KeyboardInterrupt from None
        finally:
            progress.close()
        if echo:
            write(text)
        for token in new_tokens(
            runs,
            cache,
            logits,
            sampler,
            tokenizer.eog,
            timing,
            n_predict=n_predict,
            should_stop=interrupts.stop,
        ):
            write(stream.feed(tokenizer.piece(token)))
        write(stream.finish() + "\n")
    if timing.reason == "context":
        note(f"the context of {cache.n_ctx} tokens is full; a larger -c leaves more room")
    if timings:
        note(timing.line(cache, runs), style="dim")
    if timing.reason == "interrupt":
        raise KeyboardInterrupt
