"""Writing LLVM instructions from Python, with vectors as values.

An `Emitter` writes one function. What it hands out are `Val`s: values with Python's operators. Python loops and
conditions run while the code is written (a `for` over rows unrolls them); `loop` and `when` are loops and conditions of
the written code. `Var`s are variables; LLVM turns them into registers.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Union

from llvmlite import ir

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
PTR = ir.PointerType()
VOID = ir.VoidType()

Operand = Union["Val", int, float]


def vec(element: ir.Type, n: int) -> ir.Type:
    """A vector of `n` elements."""
    return ir.VectorType(element, n)


def _element(t: ir.Type) -> ir.Type:
    return t.element if isinstance(t, ir.VectorType) else t


def _is_float(t: ir.Type) -> bool:
    return isinstance(_element(t), ir.FloatType | ir.HalfType)


def _size(t: ir.Type) -> int:
    """Bytes in memory."""
    if isinstance(t, ir.VectorType):
        return t.count * _size(t.element)
    if isinstance(t, ir.PointerType):
        return 8
    if isinstance(t, ir.IntType):
        return max(t.width // 8, 1)
    return 2 if isinstance(t, ir.HalfType) else 4


class Val:
    """A value in the function being written: integers are signed in comparisons and divisions, `>>` is logical."""

    __slots__ = ("e", "v")

    def __init__(self, e: Emitter, v: Any) -> None:
        self.e, self.v = e, v

    @property
    def type(self) -> ir.Type:
        """LLVM's type."""
        return self.v.type

    def _pair(self, other: Operand) -> Any:
        return other.v if isinstance(other, Val) else self.e.const(self.type, other).v

    def _op(self, name: str, other: Operand, swap: bool = False) -> Val:
        kind = "f" + name if _is_float(self.type) else name
        a, b = self.v, self._pair(other)
        return Val(self.e, getattr(self.e.b, kind)(*((b, a) if swap else (a, b))))

    def __add__(self, other: Operand) -> Val:
        if isinstance(self.type, ir.PointerType):
            offset = other if isinstance(other, Val) else self.e.const(I64, other)
            return Val(self.e, self.e.b.gep(self.v, [offset.v], source_etype=I8))
        return self._op("add", other)

    def __radd__(self, other: Operand) -> Val:
        return self + other

    def __sub__(self, other: Operand) -> Val:
        return self._op("sub", other)

    def __rsub__(self, other: Operand) -> Val:
        return self._op("sub", other, swap=True)

    def __mul__(self, other: Operand) -> Val:
        return self._op("mul", other)

    def __rmul__(self, other: Operand) -> Val:
        return self * other

    def __truediv__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.fdiv(self.v, self._pair(other)))

    def __floordiv__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.sdiv(self.v, self._pair(other)))

    def __mod__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.srem(self.v, self._pair(other)))

    def __and__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.and_(self.v, self._pair(other)))

    def __or__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.or_(self.v, self._pair(other)))

    def __lshift__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.shl(self.v, self._pair(other)))

    def __rshift__(self, other: Operand) -> Val:
        return Val(self.e, self.e.b.lshr(self.v, self._pair(other)))

    def __invert__(self) -> Val:
        return Val(self.e, self.e.b.not_(self.v))

    def _compare(self, op: str, other: Operand) -> Val:
        compare = self.e.b.fcmp_ordered if _is_float(self.type) else self.e.b.icmp_signed
        return Val(self.e, compare(op, self.v, self._pair(other)))

    def __lt__(self, other: Operand) -> Val:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Val:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Val:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Val:
        return self._compare(">=", other)

    def eq(self, other: Operand) -> Val:
        """`self == other`."""
        return self._compare("==", other)

    def below(self, other: Operand) -> Val:
        """`self < other` of unsigned integers."""
        return Val(self.e, self.e.b.icmp_unsigned("<", self.v, self._pair(other)))

    def select(self, yes: Operand, no: Val) -> Val:
        """`yes` where this (a truth value or a vector of them) holds, else `no`."""
        return Val(self.e, self.e.b.select(self.v, no._pair(yes), no.v))

    def bitcast(self, t: ir.Type) -> Val:
        """The same bits as another type."""
        return Val(self.e, self.e.b.bitcast(self.v, t))

    def to(self, element: ir.Type) -> Val:
        """Converted, element by element; integers are unsigned when they widen, signed when they become floats."""
        old = _element(self.type)
        t = vec(element, self.type.count) if isinstance(self.type, ir.VectorType) else element
        b = self.e.b
        if old == element:
            return self
        if _is_float(old):
            if not _is_float(element):
                return Val(self.e, b.fptosi(self.v, t))
            return Val(self.e, (b.fpext if _size(old) < _size(element) else b.fptrunc)(self.v, t))
        if _is_float(element):
            return Val(self.e, b.sitofp(self.v, t))
        return Val(self.e, (b.zext if old.width < element.width else b.trunc)(self.v, t))

    def splat(self, n: int) -> Val:
        """A vector of `n` times this."""
        t = vec(self.type, n)
        one = self.e.b.insert_element(ir.Constant(t, ir.Undefined), self.v, ir.Constant(I32, 0))
        zeros = ir.Constant(vec(I32, n), [0] * n)
        return Val(self.e, self.e.b.shuffle_vector(one, ir.Constant(t, ir.Undefined), zeros))

    def shuffle(self, lanes: Sequence[int], other: Val | None = None) -> Val:
        """The vector of these lanes of `self` followed by `other`."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.v
        return Val(self.e, self.e.b.shuffle_vector(self.v, second, ir.Constant(vec(I32, len(lanes)), list(lanes))))


class Var:
    """A variable of the function being written."""

    __slots__ = ("e", "slot", "t")

    def __init__(self, e: Emitter, t: ir.Type) -> None:
        self.e, self.t = e, t
        with e.b.goto_entry_block():
            self.slot = e.b.alloca(t)

    def get(self) -> Val:
        """Its value."""
        return Val(self.e, self.e.b.load(self.slot, typ=self.t))

    def set(self, value: Operand) -> None:
        """Assign."""
        v = value if isinstance(value, Val) else self.e.const(self.t, value)
        self.e.b.store(v.v, self.slot)


class Emitter:
    """Writes one function `name(args)` that returns nothing, in a module of its own."""

    def __init__(self, name: str, args: Sequence[ir.Type]) -> None:
        self.name = name
        self.module = ir.Module(name=name)
        self.function = ir.Function(self.module, ir.FunctionType(VOID, list(args)), name=name)
        self.function.attributes.add("nounwind")
        self.b: ir.IRBuilder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.args = [Val(self, a) for a in self.function.args]

    def finish(self) -> str:
        """The text of the module."""
        self.b.ret_void()
        return str(self.module)

    def const(self, t: ir.Type, value: int | float) -> Val:
        """A constant, the same in every lane."""
        element = _element(t)
        if isinstance(element, ir.FloatType):
            value = struct.unpack("f", struct.pack("f", value))[0]
        else:
            value = float(value) if _is_float(element) else int(value)
        if isinstance(t, ir.VectorType):
            return Val(self, ir.Constant(t, [value] * t.count))
        return Val(self, ir.Constant(t, value))

    def lanes(self, element: ir.Type, n: int, start: int = 0) -> Val:
        """The vector `start, start + 1, ...`."""
        return Val(self, ir.Constant(vec(element, n), [start + i for i in range(n)]))

    def var(self, t: ir.Type, value: Operand | None = None) -> Var:
        """A new variable, assigned here if `value` is given."""
        out = Var(self, t)
        if value is not None:
            out.set(value)
        return out

    def scratch(self, n_bytes: int, align: int = 64) -> Val:
        """A pointer to fresh memory on the stack."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(I8, n_bytes))
            slot.align = align
        slot.type = PTR  # from here on an untyped pointer, as all others
        return Val(self, slot)

    def load(self, t: ir.Type, at: Val, align: int | None = None) -> Val:
        """What lies at a pointer; aligned to one element unless `align` (bytes) says more."""
        return Val(self, self.b.load(at.v, typ=t, align=align or _size(_element(t))))

    def store(self, value: Val, at: Val, align: int | None = None) -> None:
        """Write to a pointer; alignment as in `load`."""
        self.b.store(value.v, at.v, align=align or _size(_element(value.type)))

    def copy(self, target: Val, source: Val, n_bytes: Val) -> None:
        """Copy memory; the two places may overlap."""
        name = "llvm.memmove.p0.p0.i64"
        f = self._external(name, ir.FunctionType(VOID, [PTR, PTR, I64, I1]))
        self.b.call(f, [target.v, source.v, n_bytes.v, ir.Constant(I1, 0)])

    def _external(self, name: str, t: ir.FunctionType) -> Any:
        return self.module.globals.get(name) or ir.Function(self.module, t, name=name)

    def _intrinsic(self, name: str, args: Sequence[Val], result: ir.Type | None = None) -> Val:
        t = args[0].type
        element = _element(t)
        short = {F32: "f32", F16: "f16"}.get(element) or f"i{element.width}"
        suffix = f"v{t.count}{short}" if isinstance(t, ir.VectorType) else short
        f = self._external(f"llvm.{name}.{suffix}", ir.FunctionType(result or t, [a.type for a in args]))
        return Val(self, self.b.call(f, [a.v for a in args]))

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """`a * b + c`, rounded once."""
        return self._intrinsic("fma", [a, b, c])

    def maximum(self, a: Val, b: Operand) -> Val:
        """The larger of two floats; `b` where one is NaN (one instruction on x86, unlike LLVM's own `maxnum`)."""
        other = b if isinstance(b, Val) else self.const(a.type, b)
        return (a > other).select(a, other)

    def minimum(self, a: Val, b: Operand) -> Val:
        """The smaller of two floats; `b` where one is NaN."""
        other = b if isinstance(b, Val) else self.const(a.type, b)
        return (a < other).select(a, other)

    def smax(self, a: Val, b: Operand) -> Val:
        """The larger of two signed integers."""
        return self._intrinsic("smax", [a, b if isinstance(b, Val) else self.const(a.type, b)])

    def smin(self, a: Val, b: Operand) -> Val:
        """The smaller of two signed integers."""
        return self._intrinsic("smin", [a, b if isinstance(b, Val) else self.const(a.type, b)])

    def rint(self, a: Val) -> Val:
        """Rounded to whole numbers, halves to even."""
        return self._intrinsic("roundeven", [a])

    def reduce(self, combine: Callable[[Val, Val], Val], a: Val) -> Val:
        """One value from the lanes of a vector, pairs first."""
        n = a.type.count
        while n > 1:
            half = (n + 1) // 2
            low = a.shuffle(list(range(half)))
            # An odd lane in the middle meets itself, which changes no minimum and no maximum.
            high = a.shuffle([i + half if i + half < n else i for i in range(half)])
            a, n = combine(low, high), half
        return Val(self, self.b.extract_element(a.v, ir.Constant(I32, 0)))

    def sum(self, a: Val) -> Val:
        """Sum of the lanes, whose count is a power of two."""
        if a.type.count & (a.type.count - 1):
            raise ValueError("a sum by halves needs a power of two")
        return self.reduce(lambda x, y: x + y, a)

    def exp2(self, x: Val) -> Val:
        """2^x of floats, for x from -inf to 127; below -126 the result is 2^-126. Relative error about 2e-7."""
        x = self.maximum(x, -126.0)
        whole = self.rint(x)
        f = x - whole
        # Taylor's series of 2^f in f ln 2, |f| <= 1/2.
        terms = (1.5403530393381608e-4, 1.3333558146428443e-3, 9.618129107628477e-3, 5.550410866482158e-2,
                 0.2402265069591007, 0.6931471805599453, 1.0)  # fmt: skip
        y = self.const(x.type, terms[0])
        for term in terms[1:]:
            y = self.fma(y, f, self.const(x.type, term))
        bits = y.bitcast(vec(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32)
        return (bits + (whole.to(I32) << 23)).bitcast(x.type)

    def byte_dot(self, total: Val, codes: Val, weights: Val) -> Val:
        """`total` <16 x i32> plus dot products of four neighbouring bytes: unsigned `codes` times signed `weights`.

        codes, weights: <16 x i32> that hold four bytes per lane. Only where the target has VNNI.
        """
        args = [total, codes.bitcast(vec(I8, 64)), weights.bitcast(vec(I8, 64))]
        f = self._external("llvm.x86.avx512.vpdpbusd.512", ir.FunctionType(total.type, [a.type for a in args]))
        return Val(self, self.b.call(f, [a.v for a in args]))

    def atomic_add(self, at: Val, n: int) -> Val:
        """Add to the int64 at a pointer; returns what was there before."""
        return Val(self, self.b.atomic_rmw("add", at.v, ir.Constant(I64, n), "monotonic"))

    def call(self, function: Val, args: Sequence[Val]) -> None:
        """Call a function that returns nothing through its address (int64)."""
        t = ir.FunctionType(VOID, [a.type for a in args])
        self.b.call(self.b.inttoptr(function.v, t.as_pointer()), [a.v for a in args])

    def pointer(self, address: Val) -> Val:
        """An int64 as a pointer."""
        return Val(self, self.b.inttoptr(address.v, PTR))

    @contextlib.contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Val]:
        """`for i in range(start, stop, step)` of the written code; i is an int64."""
        i = self.var(I64, start)
        head = self.b.append_basic_block("head")
        body = self.b.append_basic_block("body")
        done = self.b.append_basic_block("done")
        self.b.branch(head)
        self.b.position_at_end(head)
        now = i.get()
        self.b.cbranch((now < stop).v, body, done)
        self.b.position_at_end(body)
        yield now
        i.set(now + step)
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextlib.contextmanager
    def repeat(self) -> Iterator[Callable[[Val], None]]:
        """An endless loop of the written code; the function handed out leaves it where its argument holds."""
        body = self.b.append_basic_block("body")
        done = self.b.append_basic_block("done")
        self.b.branch(body)
        self.b.position_at_end(body)

        def leave(condition: Val) -> None:
            on = self.b.append_basic_block("on")
            self.b.cbranch(condition.v, done, on)
            self.b.position_at_end(on)

        yield leave
        self.b.branch(body)
        self.b.position_at_end(done)

    @contextlib.contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        """`if condition` of the written code."""
        with self.b.if_then(condition.v):
            yield

    @contextlib.contextmanager
    def either(self, condition: Val) -> Iterator[tuple[Any, Any]]:
        """`if condition ... else ...` of the written code: two context managers."""
        with self.b.if_else(condition.v) as branches:
            yield branches
