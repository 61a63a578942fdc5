"""Codes, scales, bit planes and stores."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkernels.pack import pack, packed_bytes, unpack
from kvkernels.quantize import dequantize, quantize
from kvkernels.spec import WIDTHS, QuantSpec, default_group
from kvkernels.store import PackedStore

CODED = [w for w in WIDTHS if w != 16]


def naive(x: np.ndarray, bits: int, clip: float) -> tuple[np.ndarray, np.float16, np.float16]:
    """One group, written out in numpy float32."""
    low, high = np.float32(x.min()), np.float32(x.max())
    if clip != 1.0:
        cut = (high - low) * ((np.float32(1) - np.float32(clip)) * np.float32(0.5))
        low, high = low + cut, high - cut
    top = np.float32(2**bits - 1)
    minimum = np.float16(low)
    scale = np.float16(min(max((high - np.float32(minimum)) / top, 0), 65504))
    if scale == 0:
        return np.zeros(len(x), np.uint8), scale, minimum
    codes = np.round((x.astype(np.float32) - np.float32(minimum)) / np.float32(scale))
    return np.clip(codes, 0, top).astype(np.uint8), scale, minimum


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from(CODED),
    axis=st.sampled_from(["token", "channel"]),
    clip=st.sampled_from([1.0, 0.9, 0.5]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 999),
)
def test_codes_equal_the_definition_group_by_group(bits: int, axis: str, clip: float, size: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 16, 24, generator=g) * size + size).half()
    spec = QuantSpec(bits, 8, axis)  # type: ignore[arg-type]
    codes, scale, minimum = quantize(x, spec, torch.full((2,), clip) if clip != 1.0 else None)
    values = dequantize(codes, scale, minimum, spec, torch.float32)
    for head in range(2):
        for outer in range(16 if axis == "token" else 2):
            for inner in range(3 if axis == "token" else 24):
                if axis == "token":
                    at: tuple = (head, outer, slice(8 * inner, 8 * inner + 8))
                else:
                    at = (head, slice(8 * outer, 8 * outer + 8), inner)
                c, s, m = naive(x[at].numpy(), bits, clip)
                assert codes[at].numpy().tolist() == c.tolist()
                assert scale[head, outer, inner].item() == s and minimum[head, outer, inner].item() == m
                expected = c.astype(np.float32) * np.float32(s) + np.float32(m)
                assert np.allclose(values[at].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", CODED)
def test_error_is_at_most_half_a_step_inside_the_range(bits: int) -> None:
    x = torch.randn(3, 40, 64).half()
    spec = QuantSpec(bits, 32)
    codes, scale, minimum = quantize(x, spec)
    error = (dequantize(codes, scale, minimum, spec, torch.float64) - x.double()).abs().reshape(3, 40, 2, 32)
    # Rounding the step to f16 adds at most 2^-11 of the range, once for every step below the value.
    slack = scale.double()[..., None] * (0.5 + (2**bits - 1) * 2**-11)
    assert bool((error <= slack).all())


def test_constant_groups_are_restored_exactly() -> None:
    x = torch.full((1, 2, 32), 3.25).half()
    spec = QuantSpec(4, 32)
    codes, scale, minimum = quantize(x, spec)
    assert int(codes.sum()) == 0 and torch.equal(dequantize(codes, scale, minimum, spec, torch.float32), x.float())


def test_only_f16_is_read() -> None:
    with pytest.raises(TypeError, match="f16"):
        quantize(torch.zeros(1, 1, 32), QuantSpec(4, 32))


@given(bits=st.sampled_from(CODED), d=st.sampled_from([8, 24, 64, 80, 112]), seed=st.integers(0, 999))
def test_packing_loses_nothing_and_wastes_nothing(bits: int, d: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, d), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, d * bits // 8) and packed_bytes(d, bits) * 8 == d * bits
    assert torch.equal(unpack(packed, bits), codes)


def test_layout_is_the_documented_one() -> None:
    codes = torch.arange(8, dtype=torch.uint8)  # three bits: a plane of two and a plane of one
    packed = pack(codes, 3)
    low = [codes[j] % 4 | (codes[j + 2] % 4) << 2 | (codes[j + 4] % 4) << 4 | (codes[j + 6] % 4) << 6 for j in range(2)]
    high = sum(int(codes[i] >> 2) << i for i in range(8))
    assert packed.tolist() == [int(low[0]), int(low[1]), high]


@pytest.mark.parametrize(("d", "group"), [(64, 64), (128, 64), (96, 32), (80, 80), (112, 112), (256, 64), (32, 32)])
def test_default_group_divides_the_head(d: int, group: int) -> None:
    assert default_group(d) == group


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 32), "bits"),
        ((4, 0), "group"),
        ((16, 32), "groups"),
        ((4, 12, "channel"), "multiple of 8"),
        ((4, 8, "x"), "axis"),
    ],
)
def test_specs_that_make_no_sense_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(*arguments)


def test_store_keeps_heads_of_different_widths_apart() -> None:
    specs = [QuantSpec(4, 32), QuantSpec(16), QuantSpec(2, 8), QuantSpec(4, 32)]
    store = PackedStore(specs, [1.0] * 4, 21, 32)
    x = torch.randn(4, 21, 32).half()
    store.write(0, x[:, :7])
    store.write(7, x[:, 7:])
    got = store.read(21, torch.float32)
    for head, spec in enumerate(specs):
        if not spec.quantized:
            assert torch.equal(got[head], x[head].float())
            continue
        codes, scale, minimum = quantize(x[head : head + 1], spec)
        assert torch.equal(got[head], dequantize(codes, scale, minimum, spec, torch.float32)[0])
    assert store.n_bytes == sum(round(21 * 32 * spec.bits_per_value(32) / 8) for spec in specs)
