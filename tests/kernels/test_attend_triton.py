"""Decode attention in Triton against the reference: in the interpreter, or on the device where there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvkernels.attend import Side, attend
from kvkernels.device_store import DeviceSide
from kvkernels.rope_offset import RopeStyle, offset_scores
from kvkernels.spec import QuantSpec
from kvkernels.store import PackedStore
from kvrun.visibility import packed_end
from tests.assertions import assert_rms_ratio

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")

from kvkernels.attend.triton import DeviceLayer, DeviceOffset, decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16 = QuantSpec(16)


def by_token(bits: int, group: int) -> QuantSpec:
    """Groups of neighbouring channels."""
    return QuantSpec(bits, group)


def by_channel(bits: int, group: int = 32) -> QuantSpec:
    """Groups of neighbouring tokens."""
    return QuantSpec(bits, group, "channel")


@dataclass(frozen=True)
class Case:
    """One setting. lengths: tokens of each sequence.  k, v: one storage per KV head."""

    d: int
    group: int
    k: tuple[QuantSpec, ...]
    v: tuple[QuantSpec, ...]
    lengths: tuple[int, ...] = (150,)
    sinks: int = 0
    window: int = 0
    d_v: int = 0
    sliding: int = 0
    cap: float = 0.0
    rope: RopeStyle | None = None
    n_rot: int = 0
    undo: bool = False
    dtype: torch.dtype = torch.float32
    n_splits: int = 2


# Every head size, group size, width, axis, and kind of window meets several of the others.
CASES = {
    "d64 g1 4 bits": Case(64, 1, (by_token(4, 64),) * 2, (by_token(4, 64),) * 2, (201,), 4, 32),
    "d64 g3 3 and 2 bits": Case(
        64, 3, (by_token(3, 32), by_token(2, 64)), (by_token(2, 32), by_token(3, 64)), (97,), 1, 0
    ),
    "d80 g4 whole head": Case(80, 4, (by_token(5, 80),), (by_token(2, 80),), (131, 70), 0, 7),
    "d96 g7 groups of 32": Case(96, 7, (by_token(6, 32),), (by_token(4, 32),), (150,), 3, 17, undo=True),
    "d112 g8 mixed axes": Case(112, 8, (by_channel(4),), (by_token(8, 112),), (171,), 5, 9),
    "d128 g16 2 bits": Case(128, 16, (by_token(2, 64),), (by_token(2, 64),), (257,), 4, 31, undo=True, n_splits=3),
    "d128 g4 channel keys": Case(128, 4, (by_channel(2), by_channel(3, 16)), (by_token(3, 64),) * 2, (160, 33), 2, 0),
    "d256 g4 channel values": Case(256, 4, (by_token(4, 64),), (by_channel(5),), (140,), 0, 1),
    "both channel axes": Case(64, 7, (by_channel(6, 64),), (by_channel(8, 32),), (230,), 1, 5),
    "f16 beside codes": Case(80, 3, (F16, by_token(4, 80)), (by_token(8, 80), F16), (90,), 0, 3),
    "nothing packed": Case(96, 16, (by_token(4, 96),), (by_channel(2),), (20, 1), 4, 32),
    "one token": Case(64, 3, (by_token(4, 64),), (by_token(4, 64),), (1,), 0, 0),
    "all are sinks": Case(112, 1, (by_token(3, 112),), (by_token(6, 112),), (70,), 100, 0),
    "two widths of head": Case(128, 8, (by_token(4, 128),), (by_token(4, 32),), (100,), 2, 11, d_v=64, undo=True),
    "soft cap, bf16": Case(
        256, 4, (by_token(4, 128),), (by_token(4, 128),), (90,), 0, 3, cap=5.0, dtype=torch.bfloat16
    ),
    "sliding": Case(64, 4, (by_channel(4),), (by_token(4, 64),), (220, 40), 4, 9, sliding=77),
    "sliding into the window": Case(64, 4, (by_token(4, 64),), (by_token(4, 64),), (120,), 4, 40, sliding=21),
    "rotating offset": Case(64, 3, (by_token(3, 64),) * 2, (by_token(4, 64),) * 2, (170,), 3, 6, rope="neox", n_rot=64),
    "rotating part of a head": Case(
        96, 4, (by_channel(4),), (by_token(4, 96),), (99,), 1, 2, rope="interleaved", n_rot=48
    ),
}


@dataclass
class Inputs:
    """What both sides are given. k, v: float16 [batch, n_kv, n, d]."""

    q: Tensor
    raw: Tensor | None
    k: Tensor
    v: Tensor
    layer: DeviceLayer


def angles_of(n: int, n_rot: int) -> Tensor:
    """float64 [n, n_rot]: cosines and sines of every position's angles."""
    frequency = 10000.0 ** (-torch.arange(n_rot // 2, dtype=torch.float64) * 2 / n_rot)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1)


def make(case: Case) -> Inputs:
    """Random tokens, packed as far as the rule says, and a layer that knows them."""
    n_kv, batch, n = len(case.k), len(case.lengths), max(case.lengths)
    d_v = case.d_v or case.d
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(batch, n_kv, n, case.d, generator=generator) * (torch.rand(case.d, generator=generator) * 3 + 0.1)
    v = torch.randn(batch, n_kv, n, d_v, generator=generator) * 0.02 + 0.01
    q = torch.randn(batch, n_kv * case.group, case.d, generator=generator)
    sides = []
    for specs, x in ((case.k, k), (case.v, v)):
        block = max(spec.block for spec in specs)
        side = DeviceSide(
            specs,
            [1.0, 0.9][:n_kv],
            max(n - case.sinks - case.window, 0),
            x.shape[-1],
            sinks=case.sinks,
            slots=case.window + block - 1,
            batch=batch,
            device=DEVICE,
        )
        for i, length in enumerate(case.lengths):
            end = packed_end(length, case.sinks, case.window, block)
            tokens = x[i].half().to(DEVICE)
            if end > case.sinks:
                side.write(i, 0, tokens[:, case.sinks : end])
            side.write_full(i, 0, tokens[:, : min(case.sinks, length)])
            side.write_full(i, end, tokens[:, end:length])
        sides.append(side)
    inverse = torch.randn(n_kv, d_v, d_v, generator=generator) if case.undo else None
    offset = None
    if case.rope is not None:
        angles = angles_of(n, case.n_rot).float().to(DEVICE)
        mu = torch.randn(n_kv, case.d, generator=generator) * 5
        mu[1:] = 0
        offset = DeviceOffset(mu.to(DEVICE), angles, angles_of(64, case.n_rot).float().to(DEVICE), case.rope)
    raw = q @ torch.linalg.qr(torch.randn(case.d, case.d, generator=generator))[0] if offset else None
    layer = DeviceLayer(
        *sides,
        window=case.window,
        scale=case.d**-0.5,
        inverse=None if inverse is None else inverse.to(DEVICE),
        offset=offset,
        sliding=case.sliding,
        cap=case.cap,
    )
    return Inputs(q.to(case.dtype), None if raw is None else raw.to(case.dtype), k.half(), v.half(), layer)


def seen(specs: tuple[QuantSpec, ...], x: Tensor, case: Case) -> Side:
    """What the newest query of one sequence sees. x: float16 [n_kv, n, d]."""
    n = x.shape[1]
    store = PackedStore(specs, [1.0, 0.9][: len(specs)], n, x.shape[2])
    end = packed_end(n, case.sinks, case.window, store.block)
    if end > case.sinks:
        store.write(0, x[:, case.sinks : end])
    return Side(store, case.sinks, torch.tensor([end]), x, torch.arange(n))


def dense(side: Side) -> Tensor:
    """float64 [n_kv, n, d]: every token as it is seen."""
    out, n = side.full.double(), int(side.packed_end[0]) - side.start
    if n > 0:
        out[:, side.start : side.start + n] = side.store.read(n, torch.float64)
    return out


def expected(case: Case, inputs: Inputs) -> Tensor:
    """The definition in float64, soft cap and sliding window included, [batch, n_head, d_v]."""
    outs = []
    for i, n in enumerate(case.lengths):
        k, v = seen(case.k, inputs.k[i, :, :n], case), seen(case.v, inputs.v[i, :, :n], case)
        q = inputs.q[i].double()
        bias = torch.zeros(q.shape[0], 1, n, dtype=torch.float64)
        if inputs.layer.offset is not None and inputs.raw is not None:
            offset = inputs.layer.offset
            mu, angles = offset.offset.cpu().double(), angles_of(n, case.n_rot)
            bias = offset_scores(inputs.raw[i, :, None].double(), mu, angles, offset.style)
        scale = inputs.layer.scale
        if not case.sliding and not case.cap:
            out = attend(q[:, None], k, v, torch.tensor([n - 1]), scale, bias)[:, 0]
        else:
            keys, values = (dense(side).repeat_interleave(case.group, 0) for side in (k, v))
            scores = ((keys @ q[:, :, None])[..., 0] + bias[:, 0]) * scale
            if case.cap:
                scores = case.cap * torch.tanh(scores / case.cap)
            if case.sliding:
                scores[:, : max(n - case.sliding, 0)] = -torch.inf
            out = (torch.softmax(scores, -1)[:, None] @ values)[:, 0]
        if inputs.layer.inverse is not None:
            matrix = inputs.layer.inverse.cpu().double().repeat_interleave(case.group, 0)
            out = (matrix @ out[..., None])[..., 0]
        outs.append(out)
    return torch.stack(outs)


def run(case: Case, inputs: Inputs) -> Tensor:
    """What the kernels give."""
    raw = None if inputs.raw is None else inputs.raw.to(DEVICE)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    return decode(inputs.layer, inputs.q.to(DEVICE), lengths, raw=raw, n_splits=case.n_splits)


@pytest.mark.parametrize("name", CASES)
def test_decode_is_the_reference(name: str) -> None:
    case = CASES[name]
    inputs = make(case)
    actual = run(case, inputs)
    assert actual.dtype == case.dtype
    # Queries and weights are rounded to f16 on the way to the matrix units; outputs may be bf16.
    ratio = 4e-3 if case.dtype == torch.bfloat16 else 6e-4
    assert_rms_ratio(name, expected(case, inputs), actual, ratio)


def test_the_number_of_parts_changes_nothing() -> None:
    case = replace(CASES["d128 g16 2 bits"], group=3)
    inputs = make(case)
    # More than 16 parts take the combine a second step; most of these 19 have no tokens.
    one, some, many = (run(replace(case, n_splits=n), inputs) for n in (1, 3, 19))
    assert_rms_ratio("3 parts against 1", one, some, 2e-4)
    assert_rms_ratio("19 parts against 1", one, many, 2e-4)


def test_large_scores_do_not_overflow() -> None:
    """Scores of several hundred: only their differences may meet the exponential. Their rounding is large as well."""
    case = Case(64, 3, (by_token(8, 64),), (by_token(8, 64),), (230,), 4, 20)
    inputs = make(case)
    inputs.q *= 100
    assert_rms_ratio("scores of hundreds", expected(case, inputs), run(case, inputs), 0.05)


def test_small_values_do_not_vanish() -> None:
    """One token takes nearly all the weight; weight times scale of the others lies below what f16 can hold."""
    case = Case(64, 2, (by_token(8, 64),), (by_token(4, 64),), (250,))
    inputs = make(case)
    inputs = replace_values(case, inputs, inputs.v * 1e-3)
    assert_rms_ratio("values of 1e-5", expected(case, inputs), run(case, inputs), 1e-2)


def replace_values(case: Case, inputs: Inputs, v: Tensor) -> Inputs:
    """The same inputs with other values."""
    for i, n in enumerate(case.lengths):
        inputs.layer.v.write(i, 0, v[i, :, :n].to(DEVICE))
    return replace(inputs, v=v)


def test_what_the_kernels_cannot_do_is_refused() -> None:
    inputs = make(CASES["one token"])
    lengths = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match="at most 16"):
        decode(inputs.layer, torch.zeros(1, 17, 64), lengths)
    with pytest.raises(ValueError, match="rotating offset"):
        decode(inputs.layer, inputs.q, lengths, raw=inputs.q)
    with pytest.raises(ValueError, match="multiple of 16"):
        DeviceSide([QuantSpec(4, 24)], [1.0], 1, 72)
    with pytest.raises(ValueError, match="q4_0"):
        DeviceSide([QuantSpec(4, 32, code="q4_0")], [1.0], 1, 64)
    with pytest.raises(ValueError, match="tokens in a group"):
        DeviceSide([by_channel(4, 24)], [1.0], 1, 64)
