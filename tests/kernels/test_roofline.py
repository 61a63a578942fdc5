"""The byte model counts what a store allocates."""

from __future__ import annotations

import pytest

from kvkernels.spec import QuantSpec, default_group
from kvkernels.store import PackedStore
from tools import roofline


@pytest.mark.parametrize("bits", [16, 4, 3, 2])
@pytest.mark.parametrize("shape", roofline.SHAPES)
def test_bytes_of_decode_are_those_of_the_store(shape: str, bits: int) -> None:
    n_head, n_kv, d = roofline.SHAPES[shape]
    spec = QuantSpec(bits, 0 if bits == 16 else default_group(d))
    store = PackedStore([spec] * n_kv, [1.0] * n_kv, 1024, d)
    assert roofline.decode(shape, bits, 1024).bytes == 2 * store.n_bytes + 2 * n_head * d * 2


def test_floors_are_the_slower_of_memory_and_arithmetic() -> None:
    assert roofline.floors(4.8e6, 0)[0] == pytest.approx(1.0)
    assert roofline.floors(0, 989e6)[0] == pytest.approx(1.0)
    assert len(list(roofline.rows())) == len({(r.kernel, r.shape, r.setting, r.tokens) for r in roofline.rows()})
