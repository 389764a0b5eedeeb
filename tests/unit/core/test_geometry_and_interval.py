"""The paper's worked numbers: sizes, reads, access ratios, intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_histate.geometry import GIB, MIB, CacheGeometry, access_ratio, read_seconds
from lmcache_histate.scorer.interval import MULTIPLES, choose_interval, grid, interval_cost, optimal_interval

QWEN = CacheGeometry(block_tokens=528, kv_bytes_per_token=32 * 1024, snapshot_bytes=49.1 * MIB)


def test_a_snapshot_of_qwen_is_as_large_as_1572_tokens_of_kv():
    assert QWEN.snapshot_tokens == pytest.approx(1572, abs=1)


def test_states_at_32k_take_more_than_the_kv():
    assert QWEN.state_bytes(32 * 1024, 1024) == pytest.approx(1.6e9, rel=0.04)
    assert QWEN.kv_bytes(32 * 1024) == pytest.approx(1.1e9, rel=0.04)


def test_reading_a_snapshot_is_short_whatever_the_context():
    assert read_seconds(QWEN.snapshot_bytes, 5e9) == pytest.approx(0.010, rel=0.05)
    assert read_seconds(QWEN.kv_bytes(128 * 1024), 5e9) == pytest.approx(0.86, rel=0.01)


def test_access_ratios_at_32k():
    assert access_ratio(32 * 1024, 1024) == pytest.approx(0.031, abs=0.0005)
    assert access_ratio(32 * 1024, 4096) == pytest.approx(0.125)


@pytest.mark.parametrize(
    "sizes", [(0, 1.0, 1.0, 1), (1, 0.0, 1.0, 1), (1, 1.0, -1.0, 1), (1, 1.0, 1.0, 0), (1, 1.0, 1.0, 33)]
)
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ValueError, match="must"):
        CacheGeometry(*sizes)


def test_geometry_aligns_to_blocks():
    assert (QWEN.align(1055), QWEN.align(1056), QWEN.blocks(1056)) == (528, 1056, 2)
    assert QWEN.chunk_bytes * 1e3 < GIB * 20


def test_optimal_interval_of_the_paper():
    assert optimal_interval(8000, 100) == pytest.approx(1265, abs=0.5)
    assert optimal_interval(8000, 100, ratio=4) == pytest.approx(2530, abs=0.5)


@given(
    length=st.integers(1, 200_000),
    states=st.floats(1, 3000),
    block=st.sampled_from([64, 528, 576]),
    ratio=st.floats(0.01, 100),
    stop=st.floats(0, 500),
)
def test_the_chosen_interval_is_the_cheapest_supported_one(length, states, block, ratio, stop):
    chosen = choose_interval(length, states, block, ratio, stop)
    supported = [block * m for m in MULTIPLES if block * m < length] + [max(length, block)]
    assert chosen in supported
    costs = [interval_cost(i, length, states, ratio, stop) for i in supported]
    assert interval_cost(chosen, length, states, ratio, stop) == min(costs)
    # The cost is convex: the choice neighbours the continuous optimum.
    optimum = optimal_interval(length, states, ratio, stop)
    if chosen != supported[-1] and chosen != supported[0]:
        at = supported.index(chosen)
        assert supported[at - 1] <= optimum <= supported[at + 1]


def test_short_segments_get_only_their_final_snapshot():
    assert choose_interval(1000, 1572, 528) == 1000


def test_stops_that_cost_time_are_spread_further():
    assert choose_interval(50_000, 100, 64, stop_tokens=2000) > choose_interval(50_000, 100, 64)


@given(start=st.integers(0, 5000), length=st.integers(0, 20_000), interval=st.integers(1, 40))
def test_grid_ends_with_the_last_block_boundary(start, length, interval):
    block = 64
    places = grid(start, start + length, interval * block, block)
    last = (start + length) // block * block
    assert places == sorted(set(places))
    assert all(place % block == 0 and start - start % block < place <= last for place in places)
    if last > start - start % block:
        assert places[-1] == last
        gaps = [b - a for a, b in zip([start - start % block, *places], places, strict=False)]
        assert all(gap == interval * block for gap in gaps[:-1])
        assert gaps[-1] <= interval * block
    else:
        assert places == []
