"""Access model, optimal placement, prices, residence times."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_histate.scorer.access import AccessModel, PathRecord
from lmcache_histate.scorer.cost import CostModel
from lmcache_histate.scorer.placement import MAX_CANDIDATES, best_places, expected_recompute
from lmcache_histate.state_store.objects import Tier
from lmcache_histate.state_store.residence import ResidenceTime


def test_uniform_reach_is_the_papers_access_model():
    model = AccessModel(end_prior=0.6)
    path = PathRecord(end=1000.0)
    assert model.reach(path, 0.0) == pytest.approx(1.0)
    assert model.reach(path, 1000.0) == pytest.approx(0.6)
    # A quarter of the path takes a quarter of the inner hits.
    assert model.reach(path, 250.0) - model.reach(path, 500.0) == pytest.approx(0.4 / 4)


def test_reach_of_many_positions_is_that_of_each():
    model = AccessModel("histogram")
    path = PathRecord(end=50_000.0)
    for position in (49_000.0, 48_000.0, 30_000.0):
        model.observe(path, position, 64.0)
    model.publish()
    positions = np.linspace(0, 50_000, 50)
    many = model.reach(path, positions)
    assert many == pytest.approx([model.reach(path, float(p)) for p in positions])
    assert np.all(np.diff(many) <= 1e-12)


def test_nothing_learned_is_live_before_it_is_published():
    model = AccessModel(end_prior=0.5)
    path = PathRecord(end=1000.0)
    for _ in range(100):
        model.observe(path, 1000.0, 64.0)
    assert model.end_probability == 0.5
    model.publish()
    assert model.end_probability > 0.9


def test_a_path_with_habits_of_its_own_differs_from_the_fleet_but_is_shrunk_to_it():
    model = AccessModel(end_prior=0.5)
    assert model.path_end_probability(PathRecord(1000.0)) == 0.5
    once = model.path_end_probability(PathRecord(1000.0, hits=1, end_hits=1))
    often = model.path_end_probability(PathRecord(1000.0, hits=100, end_hits=100))
    assert 0.5 < once < often < 1.0


def test_learned_distances_gather_the_weight_where_hits_were():
    model = AccessModel("histogram")
    for _ in range(200):
        model.observe(PathRecord(end=100_000.0), 98_000.0, 64.0)
    model.publish()
    weights = model.hit_weights(0, 100_000 - 100_000 % 64, 64)
    assert weights[-64:].sum() > 0.8 * weights.sum()
    assert AccessModel().hit_weights(0, 6400, 64) == pytest.approx(np.full(100, 0.5 / 100))


def test_access_model_survives_plain_data():
    model = AccessModel("histogram")
    for position in (900.0, 100.0, 1000.0):
        model.observe(PathRecord(end=1000.0), position, 64.0)
    model.publish()
    again = AccessModel("histogram")
    again.load(model.dump())
    assert again.reach(PathRecord(1000.0), 300.0) == model.reach(PathRecord(1000.0), 300.0)


@settings(deadline=None)
@given(weights=st.lists(st.floats(0, 1), min_size=1, max_size=9), count=st.integers(0, 5))
def test_placement_equals_brute_force(weights, count):
    array = np.array(weights)
    places = best_places(array, count)
    assert places == sorted(set(places))
    assert all(0 < place < len(weights) for place in places)
    options = combinations(range(1, len(weights)), min(count, len(weights) - 1))
    best = min(expected_recompute(array, list(option)) for option in options)
    assert expected_recompute(array, places) == pytest.approx(best)


def test_placement_beats_the_grid_on_skewed_depths():
    weights = np.geomspace(1e-4, 1.0, 128)
    grid = list(range(16, 128, 16))
    assert expected_recompute(weights, best_places(weights, len(grid))) < 0.6 * expected_recompute(weights, grid)


def test_placement_of_flat_depths_is_the_grid():
    assert best_places(np.ones(64), 3) == [16, 32, 48]


def test_long_segments_are_grouped():
    places = best_places(np.ones(MAX_CANDIDATES * 4), 3)
    assert places == pytest.approx([256, 512, 768], abs=4)


def test_a_late_token_costs_more_in_milliseconds():
    cost = CostModel("ms")
    assert cost.recompute(100_000.0, 101_000.0) > cost.recompute(0.0, 1000.0)
    assert CostModel("tokens").recompute(100_000.0, 101_000.0) == 1000.0


def test_prefill_prices_follow_what_was_observed():
    cost = CostModel("ms")
    for start, end in [(0, 2048), (2048, 4096), (60_000, 62_000), (100_000, 104_000), (0, 512)] * 60:
        cost.observe_prefill(start, end, 0.2 * (end - start) + 3e-6 * (end**2 - start**2) / 2)
    cost.observe_prefill(10, 10, 5.0)
    cost.observe_prefill(0, 10, -1.0)
    cost.publish()
    assert cost.linear_ms == pytest.approx(0.2, rel=0.02)
    assert cost.quadratic_ms == pytest.approx(3e-6, rel=0.05)
    again = CostModel("ms")
    again.load(cost.dump())
    assert again.recompute(0.0, 9000.0) == cost.recompute(0.0, 9000.0)


def test_restores_are_priced_by_tier():
    cost = CostModel()
    assert cost.fetch(1e9, Tier.CPU) < cost.fetch(1e9, Tier.DISK) < cost.fetch(1e9, Tier.REMOTE)
    before = cost.fetch(1e9, Tier.DISK)
    for _ in range(200):
        cost.observe_restore(Tier.DISK, 1e9, 2000.0)
    assert cost.fetch(1e9, Tier.DISK) == pytest.approx(before * 10, rel=0.01)


def test_residence_time_of_things_that_left():
    time = ResidenceTime()
    assert time.mean(0.0) is None
    for i in range(4000):
        time.arrived(float(i))
        if i >= 50:
            time.left(float(i))
    assert time.mean(4000.0) == pytest.approx(50.0, rel=0.1)
    assert time.present == 50


def test_an_idle_cache_does_not_freeze_the_residence_time():
    time = ResidenceTime()
    time.arrived(0.0, 10)
    time.left(1.0)
    early = time.mean(2.0)
    assert time.mean(1000.0) > 100 * early


def test_a_clock_that_steps_back_adds_nothing():
    time = ResidenceTime()
    time.arrived(100.0)
    time.left(50.0)
    assert time.mean(60.0) == 0.0
