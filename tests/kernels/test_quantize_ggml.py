"""llama.cpp's q4_0 and q8_0 blocks in our store, held bit for bit to gguf's reference quantizers."""

import gguf
import numpy as np
import pytest
import torch

from kvkernels.quantize import dequantize_ggml, quantize_ggml, round_queries_ggml
from kvkernels.spec import QuantSpec
from kvkernels.store import PackedStore

SPECS = {"q4_0": QuantSpec(4, 32, code="q4_0"), "q8_0": QuantSpec(8, 32, code="q8_0")}
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def hard_values() -> torch.Tensor:
    """float16 [2, 40, 96]: noise of all sizes, zeros, ties of the largest value, halves, and both ends of f16."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2, 40, 96, generator=g) * torch.logspace(-6, 3, 40)[None, :, None]
    x[0, 0] = 0.0
    x[0, 1, ::2], x[0, 1, 1::2] = 3.0, -3.0
    x[0, 2] = torch.arange(96) % 17 - 8.0
    x[0, 3] = (torch.arange(96) % 255 - 127.0) / 2
    x[0, 4, 5], x[0, 4, 40], x[0, 4, 70] = 65504.0, -65504.0, 6e-8
    return x.half()


@pytest.mark.parametrize("name", SPECS)
def test_codes_and_scales_are_ggmls_bit_for_bit(name: str) -> None:
    x, spec = hard_values(), SPECS[name]
    blocks = gguf.quants.quantize(x.float().numpy().reshape(-1, 32), TYPES[name])
    scales = blocks[:, :2].copy().view(np.float16)[:, 0]
    if name == "q4_0":
        expected = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
    else:
        expected = (blocks[:, 2:].view(np.int8).astype(int) + 128).astype(np.uint8)
    codes, scale = quantize_ggml(x, spec)
    assert np.array_equal(codes.numpy().reshape(-1, 32), expected)
    assert np.array_equal(scale.numpy().reshape(-1).view(np.uint16), scales.view(np.uint16))


@pytest.mark.parametrize("name", SPECS)
def test_what_the_store_returns_is_what_ggml_restores(name: str) -> None:
    x, spec = hard_values(), SPECS[name]
    restored = gguf.quants.dequantize(gguf.quants.quantize(x.float().numpy().reshape(-1, 32), TYPES[name]), TYPES[name])
    store = PackedStore([spec, spec], [1.0, 1.0], 40, 96)
    store.write(0, x[:, :7])
    store.write(7, x[:, 7:])
    assert torch.equal(store.read(40, torch.float32), torch.from_numpy(restored.reshape(2, 40, 96)))
    codes, scale = quantize_ggml(x, spec)
    assert torch.equal(dequantize_ggml(codes, scale, spec, torch.float64).float(), store.read(40, torch.float32))


@pytest.mark.parametrize(("name", "bits"), [("q4_0", 4.5), ("q8_0", 8.5)])
def test_sizes_are_llama_cpps(name: str, bits: float) -> None:
    store = PackedStore([SPECS[name]] * 3, [1.0] * 3, 50, 64)
    assert store.n_bytes * 8 == bits * 3 * 50 * 64
    assert SPECS[name].bits_per_value(64) == bits


def test_blocks_that_llama_cpp_does_not_have_are_refused() -> None:
    for wrong in (
        (4, 64, "token", "q4_0"),
        (8, 32, "token", "q4_0"),
        (8, 32, "channel", "q8_0"),
        (4, 32, "token", "q5"),
    ):
        with pytest.raises(ValueError, match="no block of"):
            QuantSpec(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not divide"):
        SPECS["q4_0"].check_head_dim(80)


def test_queries_are_rounded_as_q8_0_blocks() -> None:
    q = hard_values()[:, :, :64].double()
    rounded = round_queries_ggml(q)
    blocks = gguf.quants.quantize(q.float().numpy().reshape(-1, 32), TYPES["q8_0"])
    expected = gguf.quants.dequantize(blocks, TYPES["q8_0"]).reshape(q.shape)
    assert rounded.dtype == q.dtype
    assert torch.equal(rounded.float(), torch.from_numpy(expected))
