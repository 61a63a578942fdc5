"""The cubic code: levels, codes, sizes, and the compiled version bit for bit."""

import numpy as np
import pytest
import torch

from kvkernels.attend.cpu_tiles import UNPACK_ARGS
from kvkernels.paged_store import PagedStore, call_function
from kvkernels.quantize import dequantize_cubic, quantize, quantize_cubic
from kvkernels.quantize.codes import decode, encode
from kvkernels.quantize.cubic import levels, polynomial, thresholds
from kvkernels.spec import CUBIC_WIDTHS, QuantSpec
from kvkernels.store import PackedStore


def hard_values(d: int) -> torch.Tensor:
    """float16 [2, 71, d]: noise of all sizes, zeros, equal values, both ends of f16, and values between two levels."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 71, d, generator=g) * torch.logspace(-7, 4, 71)[None, :, None]
    x[0, 0], x[0, 1] = 0.0, -2.5
    x[0, 2, ::2] = -0.0
    x[0, 3, 0], x[0, 3, 1], x[0, 3, 2] = 65504.0, -65504.0, 6e-8
    x[0, 4] = torch.linspace(-1, 1, d)
    return x.clamp(-65504, 65504).half()


@pytest.mark.parametrize("bits", CUBIC_WIDTHS)
def test_a_value_gets_the_nearest_level_of_its_group(bits: int) -> None:
    x, spec = hard_values(48), QuantSpec(bits, 24, code="cubic")
    codes, scale = quantize_cubic(x, spec, torch.tensor([1.0, 0.7]))
    groups = x.double().reshape(2, 71, 2, 24)
    largest = groups.abs().amax(-1) * torch.tensor([1.0, 0.7], dtype=torch.float64)[:, None, None]
    assert torch.allclose(scale.double(), largest, rtol=1e-3, atol=3e-8)
    table = torch.tensor(levels(bits), dtype=torch.float64)
    distance = (groups[..., None] - table * scale.double()[..., None, None]).abs()
    taken = distance.gather(-1, codes.reshape(groups.shape).long()[..., None])[..., 0]
    # A value in the middle may go either way; float32 says which.
    assert bool((taken <= distance.amin(-1) * (1 + 1e-5) + 1e-5 * scale.double()[..., None]).all())
    restored = dequantize_cubic(codes, scale, spec, torch.float64).reshape(groups.shape)
    assert torch.allclose((restored - groups).abs(), taken, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bits", CUBIC_WIDTHS)
def test_levels_are_odd_rising_and_what_the_polynomial_gives(bits: int) -> None:
    table = np.array(levels(bits))
    assert table[0] == -1 and table[-1] == 1 and (np.diff(table) > 0).all() and np.allclose(table, -table[::-1])
    y, (a, b) = 2 * np.arange(2**bits) - (2**bits - 1), polynomial(bits)
    np.testing.assert_allclose(y * (a + b * y * y), table, rtol=1e-13)
    assert len(thresholds(bits)) == 2 ** (bits - 1) - 1


def test_on_normally_distributed_values_it_saves_the_minimum() -> None:
    x = torch.randn(1, 3000, 64, generator=torch.Generator().manual_seed(0)).half()

    def error(spec: QuantSpec) -> float:
        clips = (1.0, 0.92, 0.84, 0.76, 0.7, 0.65, 0.6, 0.55)
        tried = (decode(encode(x, spec, torch.tensor([clip])), spec, torch.float64) - x.double() for clip in clips)
        return min(float(e.square().mean()) for e in tried)

    for bits in (2, 3, 4):
        cubic, uniform = QuantSpec(bits, 64, code="cubic"), QuantSpec(bits, 64)
        assert error(cubic) < 1.06 * error(uniform)
        assert cubic.bits_per_value(64) == uniform.bits_per_value(64) - 0.25


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(("bits", "group", "d"), [(2, 64, 64), (3, 40, 80), (4, 32, 96), (5, 24, 24), (6, 8, 40)])
def test_the_compiled_version_has_the_same_codes_and_values(side: str, bits: int, group: int, d: int) -> None:
    x, spec, clips = hard_values(d), QuantSpec(bits, group, code="cubic"), [1.0, 0.83]
    paged, plain = PagedStore(side, [spec] * 2, clips, 71, d), PackedStore([spec] * 2, clips, 71, d)  # type: ignore[arg-type]
    for store in (paged, plain):
        store.write(0, x[:, :40])
        store.write(40, x[:, 40:])
    codes, scale = quantize_cubic(x, spec, torch.tensor(clips))
    band = plain.bands[0]
    assert torch.equal(band.scale, scale) and band.minimum is None  # type: ignore[arg-type]
    expected = dequantize_cubic(codes, scale, spec, torch.float32)
    assert torch.equal(plain.read(71, torch.float32), expected)
    for head, one in zip(paged.heads, scale, strict=True):
        table = head.scale.transpose(0, 2, 1).reshape(-1, d // group)[:71]
        assert np.array_equal(table.view(np.uint16), one.numpy().view(np.uint16)) and head.minimum.size == 0
    # A code that differs by one is off by a tenth of the scale at least.
    limit = 1e-6 * scale.float().repeat_interleave(group, -1) + 1e-30
    assert bool(((paged.read(71, torch.float32) - expected).abs() <= limit).all())


def test_a_page_is_restored_whole() -> None:
    spec = QuantSpec(3, 64, code="cubic")
    store = PagedStore("v", [spec], [1.0], 32, 64)
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(1)).half()
    store.write(0, x)
    tile = np.full(32 * 64, np.nan, np.float32)
    call_function(store.heads[0].unpack, UNPACK_ARGS)(*store.heads[0].pointers, 0, tile.ctypes.data)
    assert np.isfinite(tile).all()


def test_only_what_can_be_stored_is_a_spec() -> None:
    for wrong in ((8, 64, "token"), (1, 64, "token"), (4, 32, "channel"), (4, 0, "token")):
        with pytest.raises(ValueError, match="cubic code"):
            QuantSpec(*wrong, code="cubic")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reads f16"):
        quantize_cubic(torch.zeros(1, 1, 32), QuantSpec(4, 32, code="cubic"))
    with pytest.raises(TypeError, match="reads f16"):
        quantize(torch.zeros(1, 1, 32), QuantSpec(4, 32))
