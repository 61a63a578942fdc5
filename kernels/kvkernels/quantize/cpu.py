"""Quantize and pack on the CPU: f16 rows in, pages out, the codes of the reference bit for bit."""

from __future__ import annotations

from typing import Literal

from ..jit import F16, F32, I8, I16, I32, I64, PTR, Emitter, Function, Val, compile_function, vec
from ..pack.cpu import PAGE, page_bytes, store_key, store_value
from ..spec import QuantSpec
from .cubic import thresholds
from .reference import F16_MAX

SideName = Literal["k", "v"]

#: `pack(rows, first, n, codes, scale, minimum, clip)`: see `pack_function`.
PACK_ARGS = (PTR, I64, I64, PTR, PTR, PTR, F32)


def pack_function(side: SideName, spec: QuantSpec, d: int) -> Function:
    """`pack(rows, first, n, codes, scale, minimum, clip)` for one head.

    rows: float16 [n, d].  first: index of the first token in the store; it and `n` are multiples of `spec.block`.
    codes, scale, minimum: the head's pages (`kvkernels.pack.cpu`).  clip: float32 in (0, 1].
    """
    if spec.emulates:
        raise ValueError(f"the CPU kernels have no {spec.code} blocks; the reference engine has")
    name = f"pack_{side}{spec.bits}"
    return compile_function(name, (side, spec, d), lambda: _write(name, side, spec, d))


def _write(name: str, side: SideName, spec: QuantSpec, d: int) -> str:
    e = Emitter(name, PACK_ARGS)
    if not spec.quantized:
        _copy(e, side, d)
    elif spec.axis == "token":
        _by_token(e, side, spec, d)
    else:
        _by_channel(e, side, spec, d)
    return e.finish()


def _place(first: Val, codes: Val, spec: QuantSpec, d: int) -> tuple[Val, Val, Val]:
    """(page number, the page, place in it) of a token."""
    number = first // PAGE
    return number, codes + number * page_bytes(d, spec.bits), first % PAGE


def _copy(e: Emitter, side: SideName, d: int) -> None:
    rows, first, n, codes, _, _, _ = e.args
    with e.loop(0, n) as i:
        _, page, lane = _place(first + i, codes, QuantSpec(16), d)
        if side == "v":
            e.store(e.load(vec(I16, d), rows + i * (2 * d)), page + lane * (2 * d))
        else:
            with e.loop(0, d) as c:
                e.store(e.load(I16, rows + (i * d + c) * 2), page + (c * PAGE + lane) * 2)


def _range(e: Emitter, low: Val, high: Val, clip: Val, spec: QuantSpec) -> tuple[Val, Val]:
    """Minimum and scale, float16, of groups with these extremes; the reference's arithmetic, step by step."""
    like = low.type
    keep = clip if not hasattr(like, "count") else clip.splat(like.count)
    cut = (high - low) * ((1.0 - keep) * 0.5)
    low, high = low + cut, high - cut
    minimum = low.to(F16)
    scale = (high - minimum.to(F32)) / float(2**spec.bits - 1)
    scale = e.minimum(e.maximum(scale, 0.0), F16_MAX).to(F16)
    return minimum, scale


def _codes(e: Emitter, x: Val, minimum: Val, scale: Val, spec: QuantSpec) -> Val:
    """Codes <n x i8> of values <n x float>; minimum and scale are float16 vectors of the same length."""
    step = scale.to(F32)
    usable = step > 0.0
    code = e.rint((x - minimum.to(F32)) / usable.select(step, e.const(step.type, 1.0)))
    code = e.minimum(e.maximum(usable.select(code, e.const(code.type, 0.0)), 0.0), float(2**spec.bits - 1))
    return code.to(I32).to(I8)


def _cubic_codes(e: Emitter, x: Val, scale: Val, spec: QuantSpec) -> Val:
    """Codes <n x i8> of values <n x float> as `quantize_cubic` has them; scale: float16, of the same length."""
    step = scale.to(F32)
    usable = step > 0.0
    size = e.maximum(x, 0.0 - x) / usable.select(step, e.const(step.type, 1.0))
    n, half = x.type.count, 2 ** (spec.bits - 1)
    above = e.const(vec(I32, n), 0)
    for threshold in thresholds(spec.bits):
        above = above + (size > threshold).select(e.const(above.type, 1), e.const(above.type, 0))
    return (x < 0.0).select(half - 1 - above, above + half).to(I8)


def _by_token(e: Emitter, side: SideName, spec: QuantSpec, d: int) -> None:
    rows, first, n, codes, scales, minima, clip = e.args
    g, n_groups = spec.group, d // spec.group
    spill = e.scratch(d)
    with e.loop(0, n) as i:
        number, page, lane = _place(first + i, codes, spec, d)
        with e.loop(0, n_groups) as group:
            x = e.load(vec(F16, g), rows + (i * d + group * g) * 2, 2).to(F32)
            low, high = e.reduce(e.minimum, x), e.reduce(e.maximum, x)
            at = ((number * n_groups + group) * PAGE + lane) * 2
            if spec.code == "cubic":
                scale = e.minimum(e.maximum(high, 0.0 - low) * clip, F16_MAX).to(F16)
                coded = _cubic_codes(e, x, scale.splat(g), spec)
            else:
                minimum, scale = _range(e, low, high, clip, spec)
                e.store(minimum, minima + at)
                coded = _codes(e, x, minimum.splat(g), scale.splat(g), spec)
            e.store(scale, scales + at)
            e.store(coded, spill + group * g, 1)
        store = store_key if side == "k" else store_value
        store(e, e.load(vec(I8, d), spill, 64), page, lane, spec, d)


def _by_channel(e: Emitter, side: SideName, spec: QuantSpec, d: int) -> None:
    rows, first, n, codes, scales, minima, clip = e.args
    g, t = spec.group, vec(F32, d)
    with e.loop(0, n, g) as i:
        start = e.load(vec(F16, d), rows + i * (2 * d), 2).to(F32)
        low, high = e.var(t, start), e.var(t, start)
        with e.loop(1, g) as j:
            x = e.load(vec(F16, d), rows + (i + j) * (2 * d), 2).to(F32)
            low.set(e.minimum(low.get(), x))
            high.set(e.maximum(high.get(), x))
        minimum, scale = _range(e, low.get(), high.get(), clip, spec)
        at = ((first + i) // g) * (2 * d)
        e.store(scale, scales + at)
        e.store(minimum, minima + at)
        with e.loop(0, g) as j:
            x = e.load(vec(F16, d), rows + (i + j) * (2 * d), 2).to(F32)
            _, page, lane = _place(first + i + j, codes, spec, d)
            store = store_key if side == "k" else store_value
            store(e, _codes(e, x, minimum, scale, spec), page, lane, spec, d)
