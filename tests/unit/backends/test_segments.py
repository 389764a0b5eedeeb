"""Expected hits inside a segment."""

from __future__ import annotations

import pytest

from lmcache_histate.backends.segments import SegmentStatistics


def test_nothing_is_claimed_before_the_first_segment() -> None:
    assert SegmentStatistics().internal_hits_per_token == 0.0


def test_the_prior_is_one_hit_a_segment_and_fades() -> None:
    statistics = SegmentStatistics()
    statistics.looked_up(1000, inside=False)
    assert statistics.internal_hits_per_token == pytest.approx(8 / 9 / 1000)
    for _ in range(799):
        statistics.looked_up(1000, inside=False)
    assert statistics.internal_hits_per_token == pytest.approx(0.01 / 1000, rel=0.1)


def test_a_workload_that_rewinds_every_other_turn_is_learned() -> None:
    statistics = SegmentStatistics()
    for number in range(1000):
        statistics.looked_up(500, inside=number % 2 == 0)
    assert statistics.internal_hits_per_token == pytest.approx(0.5 / 500, rel=0.05)
