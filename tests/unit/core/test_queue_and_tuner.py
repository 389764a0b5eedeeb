"""The eviction queue against a sorted list, and the tuner against shadows whose work is known."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.queue import ABSENT, MIN_FRONT, FloorQueue
from lmcache_histate.scorer.settings import AUTO_START, PolicySettings
from lmcache_histate.scorer.shadow import ShadowCache
from lmcache_histate.scorer.tuner import CHECK_TURNS, MAX_WAITING, MEMORY_TURNS, TauTuner, Turn
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

NODES = 400
values = st.one_of(st.integers(0, 5).map(float), st.floats(0, 100))
steps = st.lists(
    st.tuples(st.sampled_from(["set", "lower", "discard", "pop", "pop"]), st.integers(0, NODES - 1), values)
)


@given(first=st.dictionaries(st.integers(0, NODES - 1), values, max_size=NODES), then=steps)
def test_the_queue_gives_the_lowest_floor(first, then):
    queue, model = FloorQueue(), dict(first)
    queue.grow(NODES)
    for node, value in first.items():
        queue.set(node, value)
    for action, node, value in then:
        if action == "set":
            queue.set(node, value)
            model[node] = value
        elif action == "lower":
            queue.lower(node, value)
            model[node] = min(value, model.get(node, ABSENT))
        elif action == "discard":
            queue.discard(node)
            model.pop(node, None)
        else:
            found = queue.peek()
            assert (found is None) == (not model)
            if found is not None:
                assert model.pop(found) == min([*model.values(), queue.floor(found)])
                queue.discard(found)
        assert len(queue) == len(model)


GROUPS = 3
group_steps = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "discard", "pop", "pop", "replace", "move"]),
        st.integers(0, NODES - 1),
        values,
        st.sampled_from([None, 0, 1, 2]),
    )
)


@given(first=st.dictionaries(st.integers(0, NODES - 1), values, max_size=NODES), then=group_steps)
def test_the_queue_gives_the_lowest_floor_of_a_group(first, then):
    groups = array("I", [node % GROUPS for node in range(NODES)])
    queue, model = FloorQueue(groups), dict(first)
    queue.grow(NODES)
    for node, value in first.items():
        queue.set(node, value)
    for action, node, value, group in then:
        if action == "set":
            queue.set(node, value)
            model[node] = value
        elif action == "discard":
            queue.discard(node)
            model.pop(node, None)
        elif action == "move":  # an id is freed and given to another group
            queue.discard(node)
            groups[node] = (groups[node] + 1) % GROUPS
            model.pop(node, None)
        elif action == "replace":
            model = {node: value + floor % 7 for node, floor in model.items()}
            floors = np.full(NODES, ABSENT)
            floors[list(model)] = list(model.values())
            queue.replace_all(floors)
        else:
            candidates = {node: value for node, value in model.items() if group in (None, groups[node])}
            found = queue.peek(group)
            assert (found is None) == (not candidates)
            if found is not None:
                assert candidates[found] == min(candidates.values())
                queue.discard(found)
                del model[found]


def test_a_group_is_not_searched_again_for_each_of_its_units(monkeypatch):
    groups = array("I", [node % 10 for node in range(100_000)])
    queue = FloorQueue(groups)
    queue.grow(100_000)
    queue.replace_all(np.arange(100_000, dtype=np.float64))
    cuts = []
    cut = FloorQueue._cut
    monkeypatch.setattr(FloorQueue, "_cut", lambda *of: (cuts.append(of), cut(*of)))
    for number in range(1000):
        node = queue.peek(7)
        assert node == 7 + 10 * number
        queue.discard(node)
    assert len(cuts) <= 1 + 1000 // (10_000 // 64 - 64)


def test_many_equal_floors_come_in_bounded_cuts():
    queue = FloorQueue()
    queue.grow(100_000)
    queue.replace_all(np.full(100_000, 7.0))
    for _ in range(5000):
        node = queue.peek()
        queue.discard(node)
        assert len(queue._front.heap) <= 2 * max(MIN_FRONT, 100_000 // 64)
    assert len(queue) == 95_000


def test_new_floors_for_everything():
    queue = FloorQueue()
    queue.grow(3)
    queue.set(0, 5.0)
    queue.replace_all(np.array([ABSENT, 2.0, 1.0]))
    assert (len(queue), queue.peek(), queue.floor(0)) == (2, 2, ABSENT)


ROOM = {Tier.CPU: 1000.0}


class KnownShadow:
    """A shadow whose work a turn is given by its tau."""

    def __init__(self, tau: float, work: dict[float, float]) -> None:
        self.tau, self.work, self.turns, self.chunks = tau, work, 0, 0
        self.capacities: dict[Tier, float] = {}

    def add_namespace(self, name, geometry):
        pass

    def turn(self, namespace, hashes, tokens, capacities, now):
        self.turns += 1
        self.capacities = capacities
        return self.work.get(self.tau, 100.0)


def tuner_of(
    work: dict[float, float], live: float = 600.0, max_chunks: int = 100
) -> tuple[TauTuner, list[KnownShadow]]:
    made: list[KnownShadow] = []

    def shadow(tau: float) -> KnownShadow:
        made.append(KnownShadow(tau, work))
        return made[-1]

    return TauTuner([0.0, 60.0, 600.0], live, shadow, max_chunks), made


def replay(tuner: TauTuner, lineage: int, now: float) -> list[float]:
    """One turn on all candidates; the changes of the live tau that it led to."""
    tuner.offer(Turn(lineage, "m", [b"a"], 10, now))
    changes = []
    while tuner.waiting:
        changes.append(tuner.step(ROOM))
    return [tau for tau in changes if tau is not None]


def run(tuner: TauTuner, turns: int) -> list[float]:
    return [tau for i in range(turns) for tau in replay(tuner, i % 256, float(i))]


def test_the_live_tau_follows_the_best_and_then_stays():
    tuner, _ = tuner_of({0.0: 80.0, 60.0: 50.0, 600.0: 100.0})
    assert run(tuner, CHECK_TURNS * 10) == [60.0]
    assert tuner.live == 60.0


def test_plain_lru_wins_where_it_is_best():
    tuner, _ = tuner_of({0.0: 10.0})
    run(tuner, CHECK_TURNS * 4)
    assert tuner.live == 0.0


def test_differences_within_the_margin_change_nothing():
    tuner, _ = tuner_of({60.0: 99.5})
    assert run(tuner, CHECK_TURNS * 20) == []


def test_one_lucky_session_of_a_sample_changes_nothing():
    work = {60.0: 0.0}
    tuner, _ = tuner_of(work)
    tuner.classes = 64
    for _ in range(CHECK_TURNS // 2):
        replay(tuner, 7, 0.0)
    work[60.0] = 99.0
    assert run(tuner, 256) == []
    work[60.0] = 80.0  # Now all sessions gain.
    assert run(tuner, 1024) == [60.0]


def test_what_no_longer_beats_lru_gives_way_to_it():
    work = {0.0: 100.0, 60.0: 90.0, 600.0: 120.0}
    tuner, _ = tuner_of(work, live=0.0)
    assert run(tuner, 256) == [60.0]
    work[60.0] = 100.5  # Too little for the margin, but it is a loss.
    assert run(tuner, 4096) == [0.0]


def test_every_lookup_of_a_sampled_session_is_a_turn():
    """A server that never reports the end of a turn tunes tau all the same."""
    policy = CachePolicy(PolicySettings(tau="auto"), capacities={Tier.CPU: 100_000})
    policy.add_namespace("m", CacheGeometry(100, 10, 3000))
    for turn in range(5):
        policy.lookup("m", [b"a%d" % i for i in range(4)], float(turn))
    assert not any(policy.stats(5.0).recomputed_by_tau.values())  # A request does not pay for it.
    while policy.tune():
        pass
    # The first one has nothing to resume from in any shadow, the others resume at its end.
    assert set(policy.stats(5.0).recomputed_by_tau) == {0.0, *PolicySettings().taus}
    assert all(390 < work <= 400 for work in policy.stats(5.0).recomputed_by_tau.values())


def test_turns_wait_and_what_is_too_many_is_left_out_for_all_candidates():
    tuner, shadows = tuner_of({})
    for i in range(MAX_WAITING + 10):
        tuner.offer(Turn(0, "m", [b"a"], 10, float(i)))
    assert tuner.waiting == MAX_WAITING
    tuner.step(ROOM)
    assert [shadow.turns for shadow in shadows] == [1, 0, 0]  # One candidate at a time.
    assert tuner.work == {0.0: 0.0, 60.0: 0.0, 600.0: 0.0}  # Compared only once all of them were shown the turn.
    tuner.step(ROOM)
    tuner.step(ROOM)
    assert tuner.waiting == MAX_WAITING - 1
    assert tuner.work == {0.0: 100.0, 60.0: 100.0, 600.0: 100.0}


def test_a_waiting_turn_that_is_no_longer_sampled_is_not_replayed():
    tuner, shadows = tuner_of({})
    tuner.offer(Turn(200, "m", [b"a"], 10, 0.0))
    tuner.classes = 128
    tuner.step(ROOM)
    assert tuner.waiting == 0
    assert not any(shadow.turns for shadow in shadows)


def test_sampling_gets_sparser_when_a_shadow_is_full():
    tuner, shadows = tuner_of({})
    run(tuner, 256)
    assert tuner.rate == 1.0
    shadows[0].chunks = 101
    replay(tuner, 0, 0.0)
    shadows[0].chunks = 0
    assert tuner.rate == 0.5
    before = shadows[0].turns
    run(tuner, 256)
    assert shadows[0].turns - before == 128
    assert shadows[0].capacities == {Tier.CPU: 500.0}


@pytest.mark.parametrize(("seconds", "rate"), [(0.3, 1.0), (0.2, 0.5)])
def test_sampling_gets_sparser_when_requests_are_many(seconds, rate):
    tuner, _ = tuner_of({})
    for i in range(2 * MEMORY_TURNS):
        replay(tuner, i % 128, i * seconds)
        if tuner.rate < 1.0:
            break
    assert tuner.rate == rate


def test_a_shadow_keeps_to_its_tiers_and_moves_what_it_has_no_room_for():
    policy = CachePolicy(PolicySettings(tau=60.0, interval=200, cost_unit="tokens"))
    shadow = ShadowCache(policy, policy.cost)
    shadow.add_namespace("m", CacheGeometry(100, 10, 3000, ranks=2))
    room = {Tier.CPU: 20_000.0, Tier.DISK: 40_000.0}
    a, b = [b"a%d" % i for i in range(10)], [b"b%d" % i for i in range(10)]
    assert shadow.turn("m", a, 1000, room, 1.0) == 1000
    held = policy.tree.tier_bytes
    assert held[:2] == [13_000, 12_000]  # KV and the final snapshot above, four historical ones below.
    assert shadow.turn("m", b, 1000, room, 2.0) == 1000
    assert held[Tier.CPU] <= room[Tier.CPU]
    assert held[Tier.CPU] + held[Tier.DISK] == 50_000
    assert shadow.turn("m", a, 1000, room, 3.0) == 0  # Its tail is below, and is read back.
    for turn in range(10):
        shadow.turn("m", [b"%d-%d" % (turn, i) for i in range(10)], 1000, room, 4.0 + turn)
        assert held[Tier.CPU] <= room[Tier.CPU]
        assert held[Tier.DISK] <= room[Tier.DISK]


def drive(policy: CachePolicy, capacity: int) -> int:
    """Sessions used in bursts, one after the other, over a background of one-off prompts; returns tokens recomputed."""
    recomputed, now = 0, 0.0
    lengths = dict.fromkeys(range(12), 8)
    for turn in range(600):
        now += 10.0
        if turn % 3 == 0:
            path = [b"once%d-%d" % (turn, i) for i in range(10)]
        else:
            session = (turn // 60 + turn % 2) % 12
            lengths[session] = lengths[session] % 40 + 2
            path = [b"s%d-%d" % (session, i) for i in range(lengths[session])]
        found = policy.lookup("m", path, now)
        if found.kv_tokens:
            policy.hit("m", path, found.kv_tokens, found.resume_tokens, now)
        recomputed += len(path) * 100 - found.resume_tokens
        policy.stored("m", [CacheObject(h, Kind.KV, 0, Tier.CPU, 1000) for h in path], now)
        places = policy.place("m", found.resume_tokens, len(path) * 100, now)
        policy.stored("m", [CacheObject(path[p // 100 - 1], Kind.SNAPSHOT, 0, Tier.CPU, 3000) for p in places], now)
        policy.end_turn("m", path, len(path) * 100, now)
        while policy.tune():
            pass
        while policy.tree.tier_bytes[Tier.CPU] > capacity:
            victim = policy.next_victim(Tier.CPU, now)
            assert victim is not None
            policy.discard(victim, now)
    return recomputed


def test_the_tuned_policy_is_close_to_the_best_fixed_one():
    capacity = 300_000

    def recomputed(tau) -> int:
        choice = PolicySettings(tau=tau, taus=(0.0, 60.0, 600.0), interval=400)
        policy = CachePolicy(choice, capacities={Tier.CPU: capacity})
        policy.add_namespace("m", CacheGeometry(100, 10, 3000))
        work = drive(policy, capacity)
        if tau == "auto":
            stats = policy.stats(6000.0)
            assert stats.tau in (0.0, 60.0, 600.0)
            assert stats.sampling_rate == 1.0
            assert set(stats.recomputed_by_tau) == {0.0, 60.0, 600.0}
            assert stats.tier_bytes[Tier.CPU] <= capacity
        return work

    fixed = {tau: recomputed(tau) for tau in (0.0, 60.0, 600.0)}
    assert recomputed("auto") <= 1.03 * min(fixed.values())


@pytest.mark.parametrize("capacities", [None, {}])
def test_without_capacities_tau_stays_where_it_starts(capacities):
    policy = CachePolicy(PolicySettings(), capacities)
    assert policy.tuner is None
    assert policy.tau == AUTO_START
