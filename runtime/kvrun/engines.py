"""Which engine runs a model: a name that is resolved once, and never silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrun.errors import KvError

if TYPE_CHECKING:
    from kvrun.engine import Engine
    from kvrun.models import Model
    from kvrun.plan import CachePlan

#: What `--engine` takes.
ENGINE_NAMES = ("auto", "reference", "cpu")


def choose_engine(
    name: str, model: Model, *, n_threads: int | None = None, plan: CachePlan | None = None
) -> tuple[Engine, str]:
    """The engine called `name` for `model`, and why `auto` did not take the fast one (empty where it did).

    n_threads: of the CPU engine, None takes every core; the reference engine has torch's.
    plan: of the cache that it will be asked for, where that is known.
    Raises KvError where the engine that was named cannot run the model or read such a cache.
    """
    from kvrun.engine import Engine

    if name not in ENGINE_NAMES:
        raise KvError(f"unknown engine {name!r}; choose one of {', '.join(ENGINE_NAMES)}")
    if name == "reference":
        return Engine(model, dtype=model.dtype), ""
    try:
        from kvrun.cpu_engine import CpuEngine

        if plan is not None:
            CpuEngine.check_plan(plan)
        return CpuEngine(model, n_threads=n_threads), ""
    except KvError as error:
        if name == "cpu":
            raise
        return Engine(model, dtype=model.dtype), str(error).removesuffix("; use --engine reference")
