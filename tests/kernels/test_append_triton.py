"""The append kernel against the reference: what it stores, bit for bit; in the interpreter, or on a device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvkernels.device_store import DeviceSide
from kvkernels.rope_offset import RopeStyle, turned_offset
from kvkernels.spec import QuantSpec
from kvkernels.transform import apply, transform_matrix
from kvrun.visibility import packed_end
from tests.assertions import assert_codes_equal, assert_rms_ratio

pytest.importorskip("triton", reason="triton is not installed: it exists for Linux only")

from kvkernels.append.triton import Incoming, append
from kvkernels.attend.triton import DeviceLayer, DeviceOffset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16 = QuantSpec(16)


@dataclass(frozen=True)
class Case:
    """One setting. k, v: one storage per KV head.  chunks: how the tokens arrive.  lead: tokens that the second
    sequence has before the first chunk.
    """

    d: int
    k: tuple[QuantSpec, ...]
    v: tuple[QuantSpec, ...]
    chunks: tuple[int, ...]
    sinks: int = 0
    window: int = 0
    d_v: int = 0
    transform: str = ""
    offset: bool = False
    rope: RopeStyle | None = None
    n_rot: int = 0
    lead: int | None = None
    dtype: torch.dtype = torch.float32


def by_token(bits: int, group: int) -> QuantSpec:
    """Groups of neighbouring channels."""
    return QuantSpec(bits, group)


def by_channel(bits: int, group: int = 32) -> QuantSpec:
    """Groups of neighbouring tokens."""
    return QuantSpec(bits, group, "channel")


CASES = {
    "token by token": Case(64, (by_token(4, 64),) * 2, (by_token(3, 32),) * 2, (1,) * 9, 2, 3, transform="order"),
    "one chunk": Case(
        64, (by_token(2, 64), by_token(5, 32)), (by_token(6, 64), F16), (45,), 4, 7, transform="hadamard"
    ),
    "uneven chunks": Case(80, (by_token(8, 80),), (by_token(1, 80),), (3, 20, 1, 17), 5, 0, offset=True, lead=11),
    "channel keys": Case(96, (by_channel(2),), (by_token(4, 96),), (30, 1, 1, 1, 40), 1, 2, transform="order"),
    "both by channel": Case(
        64, (by_channel(3, 16),) * 2, (by_channel(6, 32), by_channel(4, 16)), (33, 50), 0, 5, lead=7
    ),
    "only sinks": Case(128, (by_token(4, 128),), (by_token(4, 112),), (1, 6), 20, 4, d_v=112, offset=True),
    "bf16 model": Case(256, (by_token(4, 64),), (by_token(5, 256),), (20,), 0, 3, dtype=torch.bfloat16),
}
ROTATING = {
    "rotating offset": Case(64, (by_token(8, 64),) * 2, (F16,) * 2, (9, 1, 14), 1, 2, rope="neox", n_rot=64),
    "rotating part": Case(
        96, (F16,), (F16,), (19,), 3, 5, rope="interleaved", n_rot=48, transform="order", offset=True
    ),
}


def matrices(case: Case, n_kv: int, d: int) -> Tensor | None:
    """float64 [n_kv, d, d]; a Hadamard matrix of 64 has entries of 1/8, so that sums are exact."""
    if case.transform == "order":
        return torch.stack([transform_matrix(d, order=torch.randperm(d)) for _ in range(n_kv)])
    if case.transform == "hadamard":
        return torch.stack([transform_matrix(d, hadamard=64)] * n_kv)
    return None


def grid(*shape: int) -> Tensor:
    """Random multiples of 1/32, which f16, bf16 and sums in float32 hold exactly."""
    return torch.randint(-128, 129, shape).double() / 32


def check(case: Case, ratio: float = 0.0) -> None:
    """Append chunk by chunk and compare with the definition: bit for bit, or by RMS ratio where one is given."""
    n_kv, d_v, batch = len(case.k), case.d_v or case.d, 1 if case.lead is None else 2
    leads = [0] if case.lead is None else [0, case.lead]
    total = max(leads) + sum(case.chunks)
    x = {"k": grid(batch, n_kv, total, case.d), "v": grid(batch, n_kv, total, d_v)}
    offset = {"k": grid(n_kv, case.d) if case.offset else None, "v": None}
    matrix = {"k": matrices(case, n_kv, case.d), "v": matrices(case, n_kv, d_v)}
    device_offset, turned = None, torch.zeros(n_kv, total, case.d, dtype=torch.float64)
    if case.rope is not None:
        angle = torch.arange(total)[:, None] * 10.0 ** (-torch.arange(case.n_rot // 2) / 8.0).double()
        angles = torch.cat([angle.cos(), angle.sin()], -1)
        mu = grid(n_kv, case.d)
        turned = turned_offset(mu, angles, case.rope)
        device_offset = DeviceOffset(mu.float().to(DEVICE), angles.float().to(DEVICE), angles.float(), case.rope)
    stored, sides = {}, {}
    for name, specs in (("k", case.k), ("v", case.v)):
        block, d = max(spec.block for spec in specs), x[name].shape[-1]
        y = x[name] - turned if name == "k" else x[name]
        stored[name] = torch.stack([apply(rows, matrix[name], offset[name]) for rows in y]).half().to(DEVICE)
        slots = case.window + block - 1 + max(case.chunks)
        made = []
        for _ in range(2):
            side = DeviceSide(
                specs, [1.0, 0.75][:n_kv], total, d, sinks=case.sinks, slots=slots, batch=batch, device=DEVICE
            )
            side.codes.zero_(), side.params.zero_()
            made.append(side)
        sides[name] = made
        for i, lead in enumerate(leads):
            for side in made:
                fill(side, i, stored[name][i, :, :lead], case)
            n = lead + sum(case.chunks)
            end = packed_end(n, case.sinks, case.window, block)
            if end > case.sinks:
                made[1].write(i, 0, stored[name][i, :, case.sinks : end])
    layer = DeviceLayer(sides["k"][0], sides["v"][0], case.window, 1.0, offset=device_offset)
    incoming = {
        name: Incoming(
            None if matrix[name] is None else matrix[name].float().to(DEVICE),  # type: ignore[union-attr]
            None if offset[name] is None else offset[name].float().to(DEVICE),  # type: ignore[union-attr]
        )
        for name in "kv"
    }
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    before = torch.tensor(leads, dtype=torch.int32, device=DEVICE)
    for n in case.chunks:
        k, v = (
            torch.stack([rows[:, at : at + n] for rows, at in zip(x[name], before.tolist(), strict=True)])
            for name in "kv"
        )
        k, v = k.to(DEVICE, case.dtype), v.to(DEVICE, case.dtype)
        append(layer, k, v, before, keys=incoming["k"], values=incoming["v"], bad=bad)
        before += n
    assert int(bad) == 0
    for name, (actual, expected) in sides.items():
        if ratio == 0.0 or name == "v":
            assert_codes_equal(f"{name} codes", expected.codes, actual.codes)
            assert_codes_equal(f"{name} scales", expected.params, actual.params)
        else:
            assert_rms_ratio(f"{name} scales", expected.params, actual.params, ratio)
        for i, n in enumerate(before.tolist()):
            end = packed_end(n, case.sinks, case.window, actual.block)
            at = [*range(min(case.sinks, n)), *range(end, n)]
            slots_of = [j if j < case.sinks else case.sinks + (j - case.sinks) % actual.slots for j in at]
            reference, got = stored[name][i][:, at], actual.full[i][:, slots_of]
            if ratio == 0.0 or name == "v":
                assert_codes_equal(f"{name} in full precision", reference, got)
            else:
                assert_rms_ratio(f"{name} in full precision", reference, got, ratio)


def fill(side: DeviceSide, sequence: int, x: Tensor, case: Case) -> None:
    """Tokens that were there before."""
    n = x.shape[1]
    end = packed_end(n, case.sinks, case.window, side.block)
    if end > case.sinks:
        side.write(sequence, 0, x[:, case.sinks : end])
    side.write_full(sequence, 0, x[:, : min(case.sinks, n)])
    side.write_full(sequence, end, x[:, end:n])


@pytest.mark.parametrize("name", CASES)
def test_what_is_stored_is_the_reference(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", ROTATING)
def test_rotating_offsets(name: str) -> None:
    check(ROTATING[name], ratio=1e-3)


def test_what_does_not_fit_f16_is_told() -> None:
    side = [DeviceSide((F16,), [1.0], 16, 64, slots=4, device=DEVICE) for _ in range(2)]
    layer = DeviceLayer(*side, window=1, scale=1.0)
    before = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    x = torch.ones(1, 1, 2, 64, device=DEVICE)
    append(layer, x, x, before, bad=bad)
    assert int(bad) == 0
    for wrong in (70000.0, float("nan")):
        bad.zero_()
        y = x.clone()
        y[0, 0, 1, 40] = wrong
        append(layer, x, y, before, bad=bad)
        assert int(bad) == 1, wrong


def test_more_tokens_than_the_ring_has_room_for_are_refused() -> None:
    side = [DeviceSide((F16,), [1.0], 16, 64, slots=4, device=DEVICE) for _ in range(2)]
    layer = DeviceLayer(*side, window=1, scale=1.0)
    x = torch.ones(1, 1, 5, 64, device=DEVICE)
    with pytest.raises(ValueError, match="5 new tokens do not fit the 3 spare slots"):
        append(layer, x, x, torch.zeros(1, dtype=torch.int32, device=DEVICE))
