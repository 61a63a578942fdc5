"""Two of the three steps of attention on the CPU, each run by all threads, with a barrier between them.

`append` converts a chunk's keys and values to f16, packs what leaves the window and prepares what queries may see in
full precision; `attend` works through units of (KV head, some queries, part of the context), taken from a shared
counter; `combine` (`cpu_split`) joins the parts of a context that was split. All three have the signature of ggml's
custom operations, `op(tensor, thread, n_threads, call)`, and never look at the tensor.

`call` is an array of int64, one per layer: see `cpu_call.CALL`. Heads are described by `HEAD`, what a step of the model
changes by `STEP`, so that nothing per layer has to be written for a new token.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..jit import F16, F32, I16, I32, I64, Emitter, Function, Val, compile_function, host_target, vec
from ..pack.cpu import PAGE
from ..quantize.cpu import SideName
from ..rope_offset import RopeStyle
from .cpu_call import CALL, HEAD, OP_ARGS, STEP, Fields, packed_end
from .cpu_core import CORE_ARGS, NOTHING
from .cpu_offset import write_pair_terms, write_turned
from .cpu_split import plan_units
from .cpu_tiles import LOAD_ARGS, UNPACK_ARGS, column_blocks

# --- append


def append_op(d_k: int, d_v: int) -> Function:
    """`append`: a unit is one side of one KV head."""
    name = f"append_{d_k}_{d_v}"

    def write() -> str:
        e = Emitter(name, OP_ARGS)
        _, thread, n_threads, base = e.args
        call = Fields(e, base, CALL)
        with e.when(thread.eq(0)):
            e.store(e.const(I64, 0), call.ptr("counter"))
        n_kv = call.int("n_kv")
        unit = e.var(I64, thread.to(I64))
        with e.repeat() as leave:
            now = unit.get()
            leave(now >= n_kv * 2)
            with e.either(now < n_kv) as (keys, values):
                with keys:
                    _append_head(e, call, "k", now, d_k)
                with values:
                    _append_head(e, call, "v", now - n_kv, d_v)
            unit.set(now + n_threads.to(I64))
        return e.finish()

    return compile_function(name, (d_k, d_v), write)


def _append_head(e: Emitter, call: Fields, side: SideName, index: Val, d: int) -> None:
    row = 2 * d
    step = Fields(e, call.ptr("step"), STEP)
    head = Fields(e, call.ptr(f"heads_{side}") + index * (8 * len(HEAD)), HEAD)
    n_before, n = step.int("n_before"), step.int("n")
    n_after, sinks = n_before + n, call.int("sinks")
    start, stop = packed_end(e, n_before, call, side), packed_end(e, n_after, call, side)
    n_recent = e.smax(n_before - start, 0)
    tail = head.ptr("tail")
    first_turn = step.int("turn").eq(0)
    recents = head.ptr("recent_0"), head.ptr("recent_1")
    e.copy(tail, first_turn.select(*recents), n_recent * row)
    source = call.ptr(side) + index * call.int(f"{side}_head")
    stride = call.int(f"{side}_token")
    sink_rows, fresh = head.ptr("sinks"), tail + n_recent * row
    n_sink = e.smin(e.smax(sinks - n_before, 0), n)
    wrong = e.var(I16, 0)
    for first, last, to, shift in ((0, n_sink, sink_rows, n_before), (n_sink, n, fresh, 0 - n_sink)):
        with e.loop(first, last) as i:
            x = e.load(vec(F32, d), source + i * stride).to(F16)
            e.store(x, to + (i + shift) * row)
            # The largest exponent of f16 is infinity or NaN.
            high = (x.bitcast(vec(I16, d)) & 0x7FFF) + 0x0400
            wrong.set(wrong.get() | e.reduce(lambda a, b: a | b, high))
    with e.when((wrong.get() & e.const(I16, -0x8000)) < 0):
        e.store(e.const(I64, 1), step.at("bad"))
    n_packed = stop - start
    with e.when(n_packed > 0):
        args = [tail, start - sinks, n_packed, head.ptr("codes"), head.ptr("scale"), head.ptr("minimum")]
        e.call(head.int("pack"), [*args, head.float("clip")])
    e.copy(first_turn.select(*recents[::-1]), tail + n_packed * row, e.smax(n_after - stop, 0) * row)


# --- attend


@dataclass(frozen=True)
class Work:
    """A thread's scratch memory, in bytes from its start.

    q: float32 [max_rows, d_k + n_rot], or closer together where the head has no rotating offset.
    terms: float32 [max_rows, n_rot], of a rotating offset.
    bounds: int32 arrays over the query rows, in the order of `BOUNDS`.
    """

    q: int
    terms: int
    sums: int
    totals: int
    tops: int
    bounds: tuple[int, ...]
    tile_k: int
    tile_v: int
    n_bytes: int


#: zero; end of the visible sinks; end of packed keys; of packed values; the smaller and the larger of the two; the end
#: of what a row sees. Ranges made of a pair of them are never negative.
BOUNDS = ("zero", "sinks", "k", "v", "min", "max", "end")


def work_layout(d_k: int, d_v: int, max_rows: int, n_rot: int = 0) -> Work:
    """Scratch memory for `max_rows` query rows; n_rot: channels that a rotating offset adds."""
    lanes = host_target().lanes
    places, at = [], 0
    sizes = [max_rows * (d_k + n_rot), max_rows * n_rot, max_rows * d_v, max_rows * lanes, max_rows + 8]
    sizes += [max_rows] * len(BOUNDS) + [(d_k + n_rot) * PAGE, d_v * PAGE]
    for size in sizes:
        places.append(at)
        at += -(-4 * size // 64) * 64
    q, terms, sums, totals, tops, *rest = places
    return Work(q, terms, sums, totals, tops, tuple(rest[: len(BOUNDS)]), rest[-2], rest[-1], at)


def attend_op(d_k: int, d_v: int, rows: int, max_rows: int, n_rot: int = 0, style: RopeStyle = "neox") -> Function:
    """`attend`, for blocks of `rows` query rows and at most `max_rows` of them in a unit.

    n_rot: channels that RoPE turns, in the given style, where some head has a rotating offset; 0 where none has.
    """
    name = f"attend_{d_k}_{d_v}_{rows}" + (f"_{n_rot}" if n_rot else "")

    def write() -> str:
        e = Emitter(name, OP_ARGS)
        _, thread, n_threads, base = e.args
        call = Fields(e, base, CALL)
        work = call.ptr("work") + thread.to(I64) * call.int("work_bytes")
        unit = _Unit(e, call, work, work_layout(d_k, d_v, max_rows, n_rot), d_k, d_v, rows, n_rot, style)
        n_chunks, n_parts = plan_units(e, call, n_threads)
        n_units = call.int("n_kv") * n_chunks * n_parts
        with e.repeat() as leave:
            index = e.atomic_add(call.ptr("counter"), 1)
            leave(index >= n_units)
            unit.run(index // (n_chunks * n_parts), index // n_parts % n_chunks, index % n_parts, n_parts, index)
        return e.finish()

    return compile_function(name, (d_k, d_v, rows, max_rows, n_rot, style), write)


class _Unit:
    """Writes the work on one unit: queries in, tile after tile through the core, results out."""

    def __init__(
        self, e: Emitter, call: Fields, work: Val, at: Work, d_k: int, d_v: int, rows: int, n_rot: int, style: RopeStyle
    ) -> None:
        self.e, self.call, self.work, self.at = e, call, work, at
        self.d_k, self.d_v, self.rows, self.n_rot, self.style = d_k, d_v, rows, n_rot, style
        self.step = Fields(e, call.ptr("step"), STEP)
        self.bounds = {name: work + place for name, place in zip(BOUNDS, at.bounds, strict=True)}

    def run(self, kv: Val, chunk: Val, part: Val, n_parts: Val, index: Val) -> None:
        """All of a unit."""
        e, call = self.e, self.call
        group, size = call.int("group"), call.int("chunk")
        self.first = chunk * size
        self.n_queries = e.smin(self.step.int("n") - self.first, size)
        n_rows = self.n_queries * group
        self.n_blocks = (n_rows + self.rows - 1) // self.rows
        self.k = Fields(e, call.ptr("heads_k") + kv * (8 * len(HEAD)), HEAD)
        self.v = Fields(e, call.ptr("heads_v") + kv * (8 * len(HEAD)), HEAD)
        self.q_bytes = e.const(I64, 4 * self.d_k)
        if self.n_rot:
            self.plain = self.k.int("mean").eq(0)
            self.q_bytes = self.plain.select(self.q_bytes, e.const(I64, 4 * (self.d_k + self.n_rot)))
            with e.when(~self.plain):
                fine = self.work + (self.at.tile_k + 4 * PAGE * self.d_k)
                e.copy(fine, call.ptr("fine"), e.const(I64, 4 * PAGE * self.n_rot))
        self._take_queries(kv, n_rows)
        n_tiles = self._tiles(None, None)
        self._tiles(part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts)
        with e.either(n_parts.eq(1)) as (whole, split):
            with whole:
                self._write_results(kv, n_rows)
            with split:
                self._write_part(call.ptr("parts") + index * self._part_bytes(), n_rows)

    def _part_bytes(self) -> Val:
        return self.call.int("chunk") * self.call.int("group") * (4 * (self.d_v + 2))

    def _take_queries(self, kv: Val, n_rows: Val) -> None:
        """Copy and scale the queries, a block filled up with copies of the last row; what each sees; empty sums."""
        e, call, d = self.e, self.call, self.d_k
        group, n_before, sinks = call.int("group"), self.step.int("n_before"), call.int("sinks")
        scale = call.float("scale")
        lanes = host_target().lanes
        with e.loop(0, self.n_blocks * self.rows) as i:
            row = e.smin(i, n_rows - 1)
            token = self.first + row // group
            source = call.ptr("q") + (kv * group + row % group) * call.int("q_head") + token * call.int("q_token")
            for c, width in column_blocks(d):
                x = e.load(vec(F32, width), source + 4 * c) * scale.splat(width)
                e.store(x, self.work + (self.at.q + 4 * c) + i * self.q_bytes)
            if self.n_rot:
                raw = call.ptr("raw") + (kv * group + row % group) * call.int("raw_head")
                raw = raw + token * call.int("raw_token")
                with e.when(~self.plain):
                    to = self.work + self.at.terms + i * (4 * self.n_rot)
                    write_pair_terms(e, raw, self.k.ptr("mean"), scale, to, self.n_rot, self.style)
            n = n_before + token + 1
            end_k, end_v = packed_end(e, n, call, "k"), packed_end(e, n, call, "v")
            seen = {
                "zero": e.const(I64, 0), "sinks": e.smin(sinks, n), "k": end_k, "v": end_v,
                "min": e.smin(end_k, end_v), "max": e.smax(end_k, end_v), "end": e.smax(n, e.smax(end_k, end_v)),
            }  # fmt: skip
            for name, value in seen.items():
                e.store(value.to(I32), self.bounds[name] + i * 4)
            e.store(e.const(F32, NOTHING), self.work + self.at.tops + i * 4)
            e.store(e.const(vec(F32, lanes), 0.0), self.work + self.at.totals + i * (4 * lanes))
            for c, width in column_blocks(self.d_v):
                e.store(e.const(vec(F32, width), 0.0), self.work + (self.at.sums + 4 * c) + i * (4 * self.d_v))

    def _bound(self, name: str, last: bool) -> Val:
        """A bound of the first or last row."""
        e = self.e
        at = self.bounds[name]
        if last:
            at = at + (self.n_blocks * self.rows - 1) * 4
        return Val(e, e.b.sext(e.load(I32, at).v, I64))

    def _tiles(self, start: Val | None, stop: Val | None) -> Val:
        """Count all tiles, or work on those from `start` to `stop`. The order: packed, mixed, sinks, tail."""
        e, call = self.e, self.call
        sinks, n_before = call.int("sinks"), self.step.int("n_before")
        tail = {side: packed_end(e, n_before, call, side) for side in ("k", "v")}
        done = e.const(I64, 0)
        # Where both sides pack, then where one side packs earlier than the other (their blocks differ), page by page;
        # then the sinks; then what no row sees packed.
        kinds = (
            ("zero", "min", "packed", "packed"),
            ("k", "max", "tail", "packed"),
            ("v", "max", "packed", "tail"),
            ("zero", "sinks", "sinks", "sinks"),
            ("max", "end", "tail", "tail"),
        )
        for low, high, source_k, source_v in kinds:
            last = self._bound(high, True)
            paged = "packed" in (source_k, source_v)
            if low == "zero":
                origin = sinks if paged else e.const(I64, 0)
            else:
                origin = self._bound(low, False)
                origin = sinks + (origin - sinks) // PAGE * PAGE if paged else origin
            if source_k != source_v:
                # A side never packs later than the other where its block divides the other's.
                late, soon = ("k", "v") if source_k == "tail" else ("v", "k")
                never = (call.int(f"block_{soon}") % call.int(f"block_{late}")).eq(0)
                last = never.select(origin, last)
            n_tiles = e.smax(last - origin + (PAGE - 1), 0) // PAGE
            if start is not None and stop is not None:
                with e.loop(e.smax(start - done, 0), e.smin(stop - done, n_tiles)) as i:
                    base = origin + i * PAGE
                    n_seen = e.smin(last - base, PAGE)
                    self._restore("k", source_k, base, sinks, tail["k"])
                    self._restore("v", source_v, base, sinks, tail["v"])
                    self._core(self.bounds[low], self.bounds[high], base, n_seen)
            done = done + n_tiles
        return done

    def _restore(self, side: SideName, source: str, base: Val, sinks: Val, tail_start: Val) -> None:
        """A tile of one side, from position `base` on."""
        e = self.e
        head = self.k if side == "k" else self.v
        out = self.work + (self.at.tile_k if side == "k" else self.at.tile_v)
        if source == "packed":
            page = (base - sinks) // PAGE
            args = [head.ptr("codes"), head.ptr("scale"), head.ptr("minimum"), page, out]
            assert [a.type for a in args] == list(UNPACK_ARGS)
            e.call(head.int("unpack"), args)
            return
        n_after = self.step.int("n_before") + self.step.int("n")
        if source == "sinks":
            args = [head.ptr("sinks"), base, e.smin(sinks, n_after), out]
        else:
            args = [head.ptr("tail"), base - tail_start, n_after - tail_start, out]
        assert [a.type for a in args] == list(LOAD_ARGS)
        e.call(self.call.int(f"load_{side}"), args)

    def _core(self, low: Val, high: Val, base: Val, n_seen: Val) -> None:
        work, at = self.work, self.at
        rows = [work + at.q, work + at.sums, work + at.totals, work + at.tops]
        args = [*rows, low, high, self.n_blocks, base, n_seen, work + at.tile_k, work + at.tile_v]
        assert [a.type for a in args] == list(CORE_ARGS)
        core = self.call.int("core")
        if self.n_rot:
            with self.e.when(~self.plain):
                self._turn(base)
            core = self.plain.select(core, self.call.int("core_turned"))
        self.e.call(core, args)

    def _turn(self, base: Val) -> None:
        """What a rotating offset adds to the queries, for the tile that begins at `base`."""
        e, n_rot = self.e, self.n_rot
        angles = self.call.ptr("angles") + base * (4 * n_rot)
        with e.loop(0, self.n_blocks * self.rows) as i:
            to = self.work + (self.at.q + 4 * self.d_k) + i * self.q_bytes
            write_turned(e, self.work + self.at.terms + i * (4 * n_rot), angles, to, n_rot)

    def _total(self, row: Val) -> Val:
        lanes = host_target().lanes
        return self.e.sum(self.e.load(vec(F32, lanes), self.work + self.at.totals + row * (4 * lanes)))

    def _write_results(self, kv: Val, n_rows: Val) -> None:
        e, call, d = self.e, self.call, self.d_v
        group = call.int("group")
        with e.loop(0, n_rows) as row:
            to = call.ptr("out") + (kv * group + row % group) * call.int("out_head")
            to = to + (self.first + row // group) * call.int("out_token")
            share = e.const(F32, 1.0) / self._total(row)
            for c, width in column_blocks(d):
                x = e.load(vec(F32, width), self.work + (self.at.sums + 4 * c) + row * (4 * d))
                e.store(x * share.splat(width), to + 4 * c)

    def _write_part(self, to: Val, n_rows: Val) -> None:
        """[rows, d_v + 2]: sums, total, scale."""
        e, d = self.e, self.d_v
        with e.loop(0, n_rows) as row:
            place = to + row * (4 * (d + 2))
            for c, width in column_blocks(d):
                x = e.load(vec(F32, width), self.work + (self.at.sums + 4 * c) + row * (4 * d))
                e.store(x, place + 4 * c)
            e.store(self._total(row), place + 4 * d)
            e.store(e.load(F32, self.work + self.at.tops + row * 4), place + (4 * d + 4))
