"""How the context is split between units of `attend` where there are fewer heads than threads, and joined again."""

from __future__ import annotations

from ..jit import F32, I64, Emitter, Function, Val, compile_function, vec
from ..pack.cpu import PAGE
from .cpu_call import CALL, OP_ARGS, STEP, Fields
from .cpu_core import NOTHING
from .cpu_tiles import column_blocks

#: A split makes about this many units per thread, so that threads that started late find less to do.
UNITS_PER_THREAD = 2
#: Tokens that are worth a unit of their own.
MIN_SPLIT = 8 * PAGE


def plan_units(e: Emitter, call: Fields, n_threads: Val) -> tuple[Val, Val]:
    """(groups of queries, parts of the context) of this step; every thread and operation comes to the same numbers."""
    step = Fields(e, call.ptr("step"), STEP)
    n, chunk = step.int("n"), call.int("chunk")
    n_chunks = (n + chunk - 1) // chunk
    wanted = n_threads.to(I64) * UNITS_PER_THREAD
    units = call.int("n_kv") * n_chunks
    most = e.smax((step.int("n_before") + n) // MIN_SPLIT, 1)
    return n_chunks, e.smin((wanted + units - 1) // units, most)


def max_parts(n_threads: int) -> int:
    """Partial results that a step may leave when its context is split."""
    return 2 * n_threads * UNITS_PER_THREAD


def combine_op(d_v: int) -> Function:
    """`combine`: a unit is one query head of one query; nothing to do where the context was not split."""
    name = f"combine_{d_v}"

    def write() -> str:
        e = Emitter(name, OP_ARGS)
        _, thread, n_threads, base = e.args
        call = Fields(e, base, CALL)
        step = Fields(e, call.ptr("step"), STEP)
        n_chunks, n_parts = plan_units(e, call, n_threads)
        n_heads = call.int("n_kv") * call.int("group")
        row = e.var(I64, thread.to(I64))
        with e.when(n_parts > 1), e.repeat() as leave:
            now = row.get()
            leave(now >= step.int("n") * n_heads)
            _combine_row(e, call, now // n_heads, now % n_heads, n_chunks, n_parts, d_v)
            row.set(now + n_threads.to(I64))
        return e.finish()

    return compile_function(name, (d_v,), write)


def _combine_row(e: Emitter, call: Fields, token: Val, head: Val, n_chunks: Val, n_parts: Val, d: int) -> None:
    group, size = call.int("group"), call.int("chunk")
    stride = size * group * (4 * (d + 2))
    unit = (head // group * n_chunks + token // size) * n_parts
    first = call.ptr("parts") + unit * stride + (token % size * group + head % group) * (4 * (d + 2))
    top = e.var(F32, NOTHING)
    with e.loop(0, n_parts) as i:
        top.set(e.maximum(e.load(F32, first + i * stride + (4 * d + 4)), top.get()))
    blocks = column_blocks(d)
    sums = [e.var(vec(F32, width), 0.0) for _, width in blocks]
    total = e.var(F32, 0.0)
    with e.loop(0, n_parts) as i:
        part = first + i * stride
        factor = e.exp2(e.load(F32, part + (4 * d + 4)) - top.get())
        total.set(e.fma(e.load(F32, part + 4 * d), factor, total.get()))
        for (c, width), acc in zip(blocks, sums, strict=True):
            acc.set(e.fma(e.load(vec(F32, width), part + 4 * c), factor.splat(width), acc.get()))
    share = e.const(F32, 1.0) / total.get()
    to = call.ptr("out") + head * call.int("out_head") + token * call.int("out_token")
    for (c, width), acc in zip(blocks, sums, strict=True):
        e.store(acc.get() * share.splat(width), to + 4 * c)
