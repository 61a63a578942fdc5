"""The visibility rule, against its own words."""

from hypothesis import given
from hypothesis import strategies as st

from kvrun.visibility import n_packed, packed_end, packed_reads

sizes = st.integers(0, 70)


@given(n=st.integers(0, 300), sinks=sizes, window=sizes, block=st.sampled_from([1, 8, 32]))
def test_sinks_and_window_stay_in_full_precision(n: int, sinks: int, window: int, block: int) -> None:
    packed = set(range(sinks, packed_end(n, sinks, window, block)))
    assert len(packed) == n_packed(n, sinks, window, block)
    assert not packed & set(range(min(sinks, n))) and not packed & set(range(n - window, n))
    left = [j for j in range(sinks, n - window) if j not in packed]
    assert len(left) < block and len(packed) % block == 0


@given(n=st.integers(0, 200), sinks=sizes, window=sizes, block=st.sampled_from([1, 32]))
def test_what_is_packed_stays_packed(n: int, sinks: int, window: int, block: int) -> None:
    assert packed_end(n, sinks, window, block) <= packed_end(n + 1, sinks, window, block)


def test_reads_are_counted_query_by_query() -> None:
    assert packed_reads(0, 40, 4, 32, 1) == 1 + 2 + 3 + 4
    assert packed_reads(0, 36, 4, 32, 1) == 0
    assert packed_reads(99, 100, 0, 0, 32) == 96
