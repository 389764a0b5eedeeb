"""What the core does with news of other instances: sessions that moved away, and statistics to begin with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.directory.protocol import Statistics
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.residence import ResidenceTime

SPACE = "model"
BLOCK = 100
CHUNKS = 6


def path(name: str, chunks: int = CHUNKS) -> list[bytes]:
    return [f"{name}-{number}".encode() for number in range(chunks)]


def policy_with(*names: str) -> CachePolicy:
    policy = CachePolicy(PolicySettings(tau=1000.0))
    policy.add_namespace(SPACE, CacheGeometry(BLOCK, 1.0, 100.0))
    for name in names:
        policy.lookup(SPACE, path(name), 1.0)
        objects = [CacheObject(chunk, Kind.KV, 0, Tier.CPU, BLOCK) for chunk in path(name)]
        objects += [CacheObject(path(name)[place], Kind.SNAPSHOT, 0, Tier.CPU, BLOCK) for place in (2, 5)]
        policy.stored(SPACE, objects, 1.0)
    return policy


def value(policy: CachePolicy, name: str) -> float:
    policy.order.settle()
    return policy.order.value(policy.space(SPACE).nodes[path(name)[-1]], Tier.CPU)


def test_what_moved_away_goes_first_and_counts_again_when_it_comes_back() -> None:
    policy = policy_with("stays", "moves")
    before = value(policy, "stays")
    assert value(policy, "moves") == before
    assert policy.session_moved(SPACE, path("moves")[-1])
    assert not policy.session_moved(SPACE, path("moves")[-1]), "saying it again changes nothing"
    assert not policy.session_moved(SPACE, path("stays")[0]), "no path ends there"
    assert not policy.session_moved(SPACE, b"unknown")
    assert value(policy, "moves") < value(policy, "stays") == before
    victim = policy.next_victim(Tier.CPU, 2.0)
    assert victim is not None
    assert victim.objects[0].chunk_hash.startswith(b"moves")
    policy.hit(SPACE, path("moves"), CHUNKS * BLOCK, CHUNKS * BLOCK, 3.0)
    # Its own end hit raises it a little above its first value.
    assert value(policy, "moves") > before


def test_how_much_less_it_counts_is_learned() -> None:
    never, always = policy_with("a"), policy_with("a")
    for _ in range(50):
        for policy, comes_back in ((never, False), (always, True)):
            record = policy.reach.records[policy.space(SPACE).nodes[path("a")[-1]]]
            policy.access.observe_move(record)
            if comes_back:
                policy.access.observe(record, record.end, BLOCK)
            else:
                record.moved = False  # another session each time
    never.publish()
    always.publish()
    assert never.access.return_probability < 0.05
    assert always.access.return_probability > 0.9


def test_a_new_instance_begins_with_what_others_saw_and_does_not_pass_it_on() -> None:
    old = policy_with("a")
    for turn in range(40):
        old.hit(SPACE, path("a"), CHUNKS * BLOCK, CHUNKS * BLOCK, 10.0 + turn)
    for turn in range(10):
        old.hit(SPACE, path("a"), 3 * BLOCK, 3 * BLOCK, 60.0 + turn)
    old.removed(SPACE, [CacheObject(path("a")[5], Kind.SNAPSHOT, 0, Tier.CPU)], 101.0)
    seen = old.statistics(101.0)
    assert (round(seen.hits), round(seen.end_hits), round(sum(seen.distances))) == (50, 40, 10)
    assert seen.snapshot_departures == 1.0
    new = policy_with("b")
    assert new.access.end_probability == 0.5
    new.seed(seen + Statistics())
    assert 0.7 < new.access.end_probability < 0.8
    assert new.tree.snapshot_residence.mean(1.0) == old.tree.snapshot_residence.mean(101.0)
    assert new.statistics(1.0) == policy_with("b").statistics(1.0)
    assert new.reach.records.keys() == policy_with("b").reach.records.keys()


def test_numbers_that_make_no_sense_change_nothing() -> None:
    policy = policy_with("a")
    bins = len(policy.access.counts)
    for wrong in (
        Statistics(),
        Statistics(hits=-1.0, distances=(0.0,) * bins),
        Statistics(hits=1.0, end_hits=2.0, distances=(0.0,) * bins),
        Statistics(hits=2.0, end_hits=1.0, distances=(-1.0,) * bins, kv_exposure=-5.0, kv_departures=1.0),
        Statistics(hits=2.0, end_hits=1.0, distances=(1.0,), snapshot_exposure=5.0),
    ):
        policy.seed(wrong)
        assert policy.access.end_probability == 0.5
        assert policy.residence_ratio(2.0) == 1.0


@given(
    exposure=st.floats(0.0, 1e9),
    gone=st.floats(1e-3, 1e9),
    lifetimes=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=20),
)
def test_what_is_seen_here_replaces_what_others_saw(exposure: float, gone: float, lifetimes: list[float]) -> None:
    memory = 8.0
    seeded, plain = ResidenceTime(memory), ResidenceTime(memory)
    seeded.seed(exposure, gone)
    begun = seeded.mean(0.0)
    assert begun == pytest.approx(exposure / gone)
    now = 0.0
    for number in range(100):
        lifetime = lifetimes[number % len(lifetimes)]
        for residence in (seeded, plain):
            residence.arrived(now)
            residence.left(now + lifetime)
        now += lifetime
    # Of the seed, at most `memory` departures, 0.875^100 are left against about `memory` of our own.
    assert seeded.mean(now) == pytest.approx(plain.mean(now), rel=1e-4, abs=1e-4 * exposure / gone)
    assert seeded.counters(now) == plain.counters(now)
