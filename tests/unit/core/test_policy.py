"""The policy's behaviour on cases small enough to work out by hand."""

from __future__ import annotations

import pytest

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.units import UnitKind

BLOCK = 100
KV, STATE = 1000, 5000
GEOMETRY = CacheGeometry(BLOCK, KV / BLOCK, STATE)


def make(**choices) -> CachePolicy:
    policy = CachePolicy(PolicySettings(**{"tau": 100.0, "cost_unit": "tokens", **choices}))
    policy.add_namespace("m", GEOMETRY)
    return policy


def path(name: str, chunks: int, start: int = 0) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(start, start + chunks)]


def put(policy, hashes, kind=Kind.KV, tier=Tier.CPU, now=1.0, rank=0):
    size = KV if kind == Kind.KV else STATE
    policy.stored("m", [CacheObject(h, kind, rank, tier, size) for h in hashes], now)


def serve(policy, hashes, snapshots, now=1.0, tier=Tier.CPU, state_tier=None):
    policy.lookup("m", hashes, now)
    put(policy, hashes, tier=tier, now=now)
    put(policy, [hashes[s - 1] for s in snapshots], Kind.SNAPSHOT, state_tier or tier, now)
    policy.end_turn("m", hashes, len(hashes) * BLOCK, now)


def evict(policy, tier=Tier.CPU, now=2.0):
    victim = policy.next_victim(tier, now)
    assert victim is not None
    policy.discard(victim, now)
    return victim


# -- the paper's Figure 7 ---------------------------------------------------------------------------------------------


def figure_7(hit: bool = True, **choices) -> CachePolicy:
    """B holds S1 after a long prefix, S2 a short gap later and S3 at its end; C holds only S6. B was used last."""
    policy = make(tau=1000.0, **choices)
    b, c = path("b", 80), path("c", 40)
    policy.lookup("m", b, 1.0)
    put(policy, b, now=1.0)
    put(policy, [b[39]], Kind.SNAPSHOT, Tier.DISK, 1.0)
    put(policy, [b[43]], Kind.SNAPSHOT, Tier.DISK, 2.0)
    serve(policy, c, [40], now=3.0, state_tier=Tier.DISK)
    put(policy, [b[79]], Kind.SNAPSHOT, Tier.DISK, 4.0)
    policy.end_turn("m", b, 8000, 4.0)
    if hit:
        policy.hit("m", b, 8000, 8000, 5.0)
    policy.order.settle()
    return policy


def first_to_go(policy) -> bytes:
    (snapshot,) = policy.next_victim(Tier.DISK, 6.0).objects
    return snapshot.chunk_hash


def test_figure_7_values():
    """The table of docs/model.md: tau * C / M of S1, S2, S3 and S6, before the hit."""
    policy = figure_7(hit=False)
    known = policy.tree.namespaces[0].nodes
    terms = []
    for chunk in (b"b39", b"b43", b"b79", b"c39"):
        node = known[chunk]
        terms.append(policy.order.value(node, Tier.DISK) - policy.tree.last_access[node])
    assert terms == pytest.approx([200, 180, 3600, 4000], abs=0.01)


def test_figure_7_lru_drops_s1():
    assert first_to_go(figure_7(eviction="lru", refresh="used")) == b"b39"


def test_figure_7_lru_with_refresh_drops_s6():
    assert first_to_go(figure_7(eviction="lru", refresh="all")) == b"c39"


def test_figure_7_histate_drops_s2():
    assert first_to_go(figure_7(refresh="all")) == b"b43"
    assert first_to_go(figure_7(refresh="used")) == b"b43"


# -- units ------------------------------------------------------------------------------------------------------------


def test_a_cold_session_unravels_from_its_tail():
    policy = make(eviction="lru", refresh="none")
    serve(policy, path("a", 9), [3, 6, 9])
    gone = []
    while policy.tree.tier_bytes[Tier.CPU]:
        victim = evict(policy)
        gone.append((victim.kind, victim.position, [obj.chunk_hash for obj in victim.objects]))
        assert policy.lookup("m", path("a", 9), 2.0).resume_tokens in (0, 300, 600, 900)
    snapshots = [entry for entry in gone if entry[0] == UnitKind.SNAPSHOT]
    bundles = [entry for entry in gone if entry[0] == UnitKind.BUNDLE]
    assert len(snapshots) + len(bundles) == 3
    assert bundles[-1][2][-1] == b"a0"


def test_the_tail_is_a_bundle_and_the_rest_are_snapshots():
    policy = make(tau=0.0)
    serve(policy, path("a", 9), [3, 6, 9])
    victims = {v.position: v for v in iter(lambda: policy.next_victim(Tier.CPU, 2.0), None)}
    assert {p: v.kind for p, v in victims.items()} == {
        300: UnitKind.SNAPSHOT,
        600: UnitKind.SNAPSHOT,
        900: UnitKind.BUNDLE,
    }
    assert victims[900].nbytes == 3 * KV + STATE
    assert victims[300].nbytes == STATE
    assert {obj.chunk_hash for obj in victims[900].objects} == {b"a6", b"a7", b"a8"}


def test_values_are_those_of_the_formula():
    policy = make(tau=100.0, end_prior=0.6)
    serve(policy, path("a", 9), [3, 6, 9])
    values = {v.position: v.value for v in iter(lambda: policy.next_victim(Tier.CPU, 2.0), None)}
    states, bundle = STATE / 10, (3 * KV + STATE) / 10
    assert values[300] == pytest.approx(1.0 - 300e-6 + 100.0 * (300 * 0.4 * 300 / 900) / states)
    assert values[900] == pytest.approx(1.0 - 900e-6 + 100.0 * (0.6 * 300) / bundle)


def test_what_is_equal_goes_from_the_tail():
    policy = make(eviction="lru", refresh="all")
    serve(policy, path("a", 9), [3, 6, 9])
    policy.hit("m", path("a", 9), 900, 900, 5.0)
    assert [evict(policy, now=6.0).position for _ in range(3)] == [900, 600, 300]


def test_shared_kv_goes_with_the_last_path_that_needs_it():
    policy = make(tau=0.0)
    shared = path("s", 4)
    serve(policy, shared + path("a", 2), [6], now=1.0)
    serve(policy, shared + path("b", 2), [6], now=2.0)
    first = evict(policy, now=3.0)
    assert {obj.chunk_hash for obj in first.objects} == {b"a0", b"a1"}
    second = evict(policy, now=3.0)
    assert {obj.chunk_hash for obj in second.objects} == {*shared, b"b0", b"b1"}
    assert not len(policy.tree)


def test_a_session_unravels_into_the_disk_and_stays_restorable():
    policy = make()
    hashes = path("a", 9)
    serve(policy, hashes, [3, 6, 9])
    seen = []
    while policy.tree.tier_bytes[Tier.CPU]:
        victim = policy.next_victim(Tier.CPU, 2.0)
        seen.append(victim.position)
        assert policy.worth_moving(victim, Tier.DISK, free_bytes=1e9)
        policy.moved(victim, Tier.DISK, 2.0)
        assert policy.lookup("m", hashes, 2.0) == (900, 900)
    assert seen[-1] == 300
    assert policy.tree.tier_bytes[Tier.DISK] == 9 * KV + 3 * STATE


def test_a_copy_in_another_tier_makes_a_loss_cheap_and_strands_nothing():
    policy = make()
    serve(policy, path("a", 3), [3])
    serve(policy, path("b", 3), [3])
    for kind in Kind:
        put(policy, path("b", 3) if kind == Kind.KV else [b"b2"], kind, Tier.DISK, 1.0)
    victim = policy.next_victim(Tier.CPU, 2.0)
    assert victim.backed
    assert victim.objects[0].chunk_hash == b"b2"
    assert victim.stranded == []
    assert not policy.worth_moving(victim, Tier.DISK, 1e9)
    policy.discard(victim, 2.0)
    assert policy.lookup("m", path("b", 3), 2.0) == (300, 300)


def test_what_would_be_useless_goes_too():
    policy = make(tau=0.0)
    hashes = path("a", 4)
    serve(policy, hashes, [4], state_tier=Tier.DISK)
    victim = policy.next_victim(Tier.DISK, 2.0)
    assert [obj.kind for obj in victim.objects] == [Kind.SNAPSHOT]
    assert {(obj.chunk_hash, obj.kind) for obj in victim.stranded} == {(h, Kind.KV) for h in hashes}


def test_a_chunk_counts_only_with_all_its_ranks():
    policy = CachePolicy(PolicySettings(tau=1.0))
    policy.add_namespace("m", CacheGeometry(BLOCK, 20, 2 * STATE, ranks=2))
    hashes = path("a", 2)
    policy.lookup("m", hashes, 1.0)
    put(policy, hashes)
    put(policy, [hashes[1]], Kind.SNAPSHOT)
    assert policy.lookup("m", hashes, 1.0) == (0, 0)
    put(policy, hashes, rank=1, tier=Tier.DISK)
    assert policy.lookup("m", hashes, 1.0) == (200, 0)
    put(policy, [hashes[1]], Kind.SNAPSHOT, rank=1)
    assert policy.lookup("m", hashes, 1.0) == (200, 200)


def test_stores_may_come_before_the_path_is_known():
    policy = make()
    hashes = path("a", 3)
    put(policy, [hashes[2]], Kind.SNAPSHOT)
    put(policy, reversed(hashes))
    assert policy.tree.match(policy.tree.namespaces[0], hashes).restorable == 0
    policy.link("m", hashes[0], hashes[1:], 1.0)
    policy.link("m", None, hashes[:1], 1.0)
    assert policy.lookup("m", hashes, 1.0) == (300, 300)
    assert policy.next_victim(Tier.CPU, 1.0).position == 300


def test_orphans_wait_and_then_go_first_from_the_tail():
    policy = make(orphan_s=60.0)
    policy.lookup("m", path("o", 2), 5.0)
    put(policy, path("o", 2), now=5.0)
    serve(policy, path("a", 2), [2], now=1.0)
    assert policy.next_victim(Tier.CPU, 6.0).kind == UnitKind.BUNDLE
    late = policy.next_victim(Tier.CPU, 65.0)
    assert (late.kind, late.objects[0].chunk_hash) == (UnitKind.ORPHAN, b"o1")
    policy.discard(late, 65.0)
    assert policy.next_victim(Tier.CPU, 65.0).objects[0].chunk_hash == b"o0"


def test_what_is_being_stored_stays_while_anything_else_is_there():
    """A burst: everything else was offered already, and is locked or still on its way out."""
    policy = make(orphan_s=60.0, offer_again_s=2.0)
    serve(policy, path("a", 2), [2], now=1.0)
    policy.lookup("m", path("n", 3), 10.0)
    put(policy, path("n", 3), now=10.0)
    victim = policy.next_victim(Tier.CPU, 10.0)
    assert victim.kind == UnitKind.BUNDLE
    assert policy.next_victim(Tier.CPU, 10.0) is None
    assert policy.next_victim(Tier.CPU, 12.0).node == victim.node
    policy.discard(victim, 12.0)
    assert policy.next_victim(Tier.CPU, 12.0).objects[0].chunk_hash == b"n2"


def test_of_what_is_being_stored_one_session_goes_before_the_next():
    policy = make(orphan_s=60.0)
    for name in ("new", "old"):
        policy.lookup("m", path(name, 3), 1.0)
    for now, name, chunk in [(1, "new", 0), (2, "old", 0), (3, "old", 1), (4, "old", 2), (5, "new", 1), (6, "new", 2)]:
        put(policy, [f"{name}{chunk}".encode()], now=float(now))
    gone = [evict(policy, now=7.0).objects[0].chunk_hash for _ in range(6)]
    assert gone == [b"old2", b"old1", b"old0", b"new2", b"new1", b"new0"]


def test_a_session_whose_snapshot_arrives_is_no_orphan_any_more():
    policy = make(orphan_s=60.0, offer_again_s=1000.0)
    policy.lookup("m", path("n", 2), 1.0)
    put(policy, path("n", 2), now=1.0)
    assert policy.next_victim(Tier.CPU, 1.0).kind == UnitKind.ORPHAN
    put(policy, [b"n1"], Kind.SNAPSHOT, now=1.5)
    assert policy.next_victim(Tier.CPU, 1.5).kind == UnitKind.BUNDLE


def test_what_is_left_of_a_victim_is_another_unit():
    policy = make(tau=0.0, offer_again_s=1000.0)
    serve(policy, path("a", 9), [3, 6, 9])
    seen = []
    while victim := policy.next_victim(Tier.CPU, 2.0):
        seen.append((victim.kind, victim.position))
        policy.removed("m", victim.objects, 2.0)
    assert seen == [(UnitKind.BUNDLE, 900), (UnitKind.BUNDLE, 600), (UnitKind.BUNDLE, 300)]
    assert policy.tree.tier_bytes[Tier.CPU] == 0


def test_a_victim_is_not_offered_twice_at_once():
    policy = make(offer_again_s=2.0)
    serve(policy, path("a", 2), [2])
    serve(policy, path("b", 2), [2], now=2.0)
    first, second = policy.next_victim(Tier.CPU, 10.0), policy.next_victim(Tier.CPU, 10.0)
    assert first.node != second.node
    assert policy.next_victim(Tier.CPU, 11.0) is None
    assert policy.next_victim(Tier.CPU, 12.0).node == first.node


def test_paths_that_were_only_looked_up_are_forgotten():
    policy = make(pending_s=60.0)
    policy.lookup("m", path("a", 5), 1.0)
    assert len(policy.tree) == 5
    policy.lookup("m", path("b", 1), 62.0)
    assert len(policy.tree) == 1


def test_a_path_that_is_gone_takes_nothing_from_the_next_one():
    """Node ids are reused: what a freed path left behind would be counted for another session."""
    policy = make()
    serve(policy, path("c", 1), [1])
    serve(policy, path("a", 3), [2, 3])
    policy.order.settle()
    for hashes, kinds in ((path("a", 1, start=2), Kind), (path("a", 2), [Kind.KV]), (path("a", 2), [Kind.SNAPSHOT])):
        policy.removed("m", [CacheObject(h, kind, 0, Tier.CPU) for h in hashes for kind in kinds], 2.0)
    policy.tree.expire(1000.0)
    serve(policy, path("b", 3), [3])
    policy.order.settle()
    assert policy.reach.share(policy.tree.namespaces[0].nodes[b"b2"]) == pytest.approx(0.5)


def test_two_namespaces_never_meet():
    policy = make()
    policy.add_namespace("n", GEOMETRY)
    serve(policy, path("a", 2), [2])
    assert policy.lookup("n", path("a", 2), 1.0) == (0, 0)
    with pytest.raises(ValueError, match="registered"):
        policy.add_namespace("n", CacheGeometry(1, 1, 1))
    with pytest.raises(KeyError):
        policy.lookup("other", path("a", 2), 1.0)


def test_victims_of_one_namespace_come_in_its_own_order():
    policy = make()
    policy.add_namespace("n", GEOMETRY)
    for now, name in enumerate(("a", "b", "c"), start=1):
        policy.lookup("n", path(name, 2), float(now))
        policy.stored("n", [CacheObject(h, Kind.KV, 0, Tier.CPU, KV) for h in path(name, 2)], float(now))
        policy.stored("n", [CacheObject(f"{name}1".encode(), Kind.SNAPSHOT, 0, Tier.CPU, STATE)], float(now))
    serve(policy, path("old", 2), [2], now=0.5)
    assert policy.held_bytes("n", Tier.CPU) == 3 * (2 * KV + STATE)
    order = []
    while victim := policy.next_victim(Tier.CPU, 10.0, ["n"]):
        assert victim.namespace == "n"
        assert not order or victim.value >= order[-1][1]
        order.append((victim.objects[0].chunk_hash, victim.value))
        policy.discard(victim, 10.0)
    assert [chunk for chunk, _ in order] == [b"a1", b"b1", b"c1"]
    assert policy.held_bytes("n", Tier.CPU) == 0
    assert policy.lowest_value(Tier.CPU, ["n"]) == float("inf")
    assert policy.next_victim(Tier.CPU, 10.0, []) is None
    left = policy.next_victim(Tier.CPU, 10.0)
    assert left is not None
    assert left.namespace == "m"


def test_what_one_namespace_is_storing_stays_while_it_holds_anything_else():
    policy = make(orphan_s=60.0)
    policy.add_namespace("n", GEOMETRY)
    serve(policy, path("a", 2), [2])
    policy.lookup("n", path("b", 2), 1.0)
    policy.stored("n", [CacheObject(b"b0", Kind.KV, 0, Tier.CPU, KV)], 1.0)
    victim = policy.next_victim(Tier.CPU, 2.0, ["n"])
    assert victim is not None
    assert victim.kind == UnitKind.ORPHAN  # it has nothing else, whatever others hold
    serve(policy, path("c", 2), [2])
    mine = policy.next_victim(Tier.CPU, 2.0, ["m"])
    assert mine is not None
    assert mine.kind == UnitKind.BUNDLE


# -- models without recurrent layers ----------------------------------------------------------------------------------


def test_an_attention_only_model_is_valued_chunk_by_chunk():
    policy = make()
    policy.add_namespace("plain", CacheGeometry(BLOCK, KV / BLOCK, 0))
    chunks = path("p", 3)
    policy.lookup("plain", chunks, 5.0)
    policy.stored("plain", [CacheObject(h, Kind.KV, 0, Tier.CPU, KV) for h in chunks], 5.0)
    assert policy.lookup("plain", chunks, 5.0) == (300, 300)
    serve(policy, path("a", 2), [2], now=1.0)
    order = []
    while victim := policy.next_victim(Tier.CPU, 1000.0):
        order.append((victim.namespace, victim.kind, [obj.chunk_hash for obj in victim.objects if obj.kind == Kind.KV]))
        policy.discard(victim, 1000.0)
    # Never as what nothing can be restored from: what was used last goes last, tails first.
    assert [kind for _, kind, _ in order] == [UnitKind.BUNDLE] * 4
    assert [chunks for space, _, chunks in order if space == "plain"] == [[b"p2"], [b"p1"], [b"p0"]]


@pytest.mark.parametrize("refresh", ["all", "used"])
def test_all_kv_of_an_attention_only_hit_is_recent_again(refresh):
    policy = make(refresh=refresh)
    policy.add_namespace("plain", CacheGeometry(BLOCK, KV / BLOCK, 0))
    chunks = path("p", 3)
    policy.lookup("plain", chunks, 1.0)
    policy.stored("plain", [CacheObject(h, Kind.KV, 0, Tier.CPU, KV) for h in chunks], 1.0)
    policy.hit("plain", chunks, 300, 300, 9.0)
    nodes = policy.space("plain").nodes
    assert [policy.tree.last_access[nodes[chunk]] for chunk in chunks] == [9.0] * 3


def test_events_that_cannot_be_are_refused():
    policy = make()
    with pytest.raises(ValueError, match="rank"):
        put(policy, path("a", 1), rank=1)
    policy.lookup("m", path("a", 3), 1.0)
    with pytest.raises(ValueError, match="two different prefixes"):
        policy.lookup("m", [b"x", b"a1"], 1.0)


# -- hits -------------------------------------------------------------------------------------------------------------


def test_a_path_that_is_rewound_a_lot_values_its_inside():
    policy = make()
    serve(policy, path("a", 9), [3, 9])
    before = policy.reach.share(policy.tree.namespaces[0].nodes[b"a2"])
    for _ in range(20):
        policy.hit("m", path("a", 9), 400, 300, 2.0)
    assert policy.reach.share(policy.tree.namespaces[0].nodes[b"a2"]) > 1.5 * before


def test_an_evicted_tail_leaves_its_hits_to_the_snapshot_before():
    policy = make(tau=0.0, end_prior=0.6)
    serve(policy, path("a", 8), [4, 8])
    policy.removed("m", [CacheObject(b"a7", Kind.SNAPSHOT, 0, Tier.CPU)], 2.0)
    policy.order.settle()
    share = policy.reach.share(policy.tree.namespaces[0].nodes[b"a3"])
    assert share == pytest.approx(0.6 + 0.4 * 400 / 800)


def test_a_path_keeps_its_end_when_its_tail_goes_and_moves_it_when_it_grows():
    policy = make(tau=0.0)

    def record():
        policy.order.settle()
        (only,) = policy.reach.records.values()
        return only

    serve(policy, path("a", 8), [4, 8])
    policy.hit("m", path("a", 8), 800, 800, 1.0)
    assert (record().end, record().hits, record().end_hits) == (800, 1, 1)
    policy.removed("m", [CacheObject(b"a7", Kind.SNAPSHOT, 0, Tier.CPU)], 2.0)
    assert record().end == 800
    policy.lookup("m", path("a", 12), 3.0)
    put(policy, path("a", 4, start=8), now=3.0)
    put(policy, [b"a11"], Kind.SNAPSHOT, now=3.0)
    assert (record().end, record().hits) == (1200, 1)
    policy.end_turn("m", path("a", 12), 1234, 3.0)
    assert record().end == 1234


# -- intervals --------------------------------------------------------------------------------------------------------


def test_interval_settings():
    assert make(interval="final-only").place("m", 0, 8050, 1.0) == [8000]
    assert make(interval=2050).place("m", 0, 8050, 1.0) == [2000, 4000, 6000, 8000]
    adaptive = make().place("m", 0, 8000, 1.0)
    assert adaptive[-1] == 8000
    assert len(adaptive) > 1


def test_snapshots_that_stay_longer_than_kv_are_placed_closer():
    policy = make()
    now = 0.0
    for i in range(200):
        now += 1.0
        policy.tree.kv_residence.arrived(now)
        policy.tree.snapshot_residence.arrived(now)
        if i > 5:
            policy.tree.kv_residence.left(now)
        if i > 100:
            policy.tree.snapshot_residence.left(now)
    assert policy.residence_ratio(now) < 1.0
    assert policy.interval("m", 50_000, now) < make().interval("m", 50_000, now)


def test_stops_that_cost_time_are_counted():
    policy = make()
    before = policy.interval("m", 50_000, 1.0)
    policy.observe_stop(500.0)
    assert policy.interval("m", 50_000, 1.0) > before


def test_learned_depths_move_the_snapshots():
    policy = make(placement="histogram", interval=1000)
    hashes = path("a", 100)
    serve(policy, hashes, [100])
    assert policy.place("m", 0, 10_000, 1.0) == [*range(1000, 10_001, 1000)]
    for _ in range(300):
        policy.hit("m", hashes, 9_000, 0, 1.0)
    policy.publish()
    places = policy.place("m", 0, 10_000, 1.0)
    assert len(places) == 10
    assert places[-1] == 10_000
    assert sum(place > 8000 for place in places) > 4


# -- plain data -------------------------------------------------------------------------------------------------------


def drain(policy) -> list[tuple[int, float, frozenset[CacheObject]]]:
    out = []
    while victim := policy.next_victim(Tier.CPU, 500.0):
        out.append((victim.position, round(victim.value, 6), frozenset(victim.objects)))
        policy.discard(victim, 500.0)
    return out


def test_a_policy_survives_plain_data():
    policy = make(placement="histogram", tau="auto")
    shared = path("s", 5)
    # Enough new chunks for the restored tree to be priced in one pass, and the original one by one.
    for i in range(60):
        hashes = shared + path(f"p{i}-", 5 + i % 7)
        serve(policy, hashes, [4, 7, len(hashes)], now=float(i))
        policy.hit("m", hashes, len(hashes) * BLOCK - 300, 700, float(i))
        policy.order.settle()
    put(policy, [b"loose"], now=30.0)
    policy.publish()
    again = CachePolicy(policy.settings)
    again.load(policy.dump(), 60.0)
    assert again.dump() == policy.dump()
    assert drain(again) == drain(policy)
    other = policy.dump()
    other["version"] = 99
    with pytest.raises(ValueError, match="version"):
        CachePolicy().load(other, 1.0)


def test_equal_calls_give_equal_answers():
    def run() -> list[object]:
        policy = make(tau="auto")
        for i in range(40):
            hashes = path(f"p{i % 9}-", 5 + i % 7)
            serve(policy, hashes, [3, len(hashes)], now=float(i))
        return drain(policy)

    assert run() == run()


@pytest.mark.parametrize(
    "choices",
    [
        {"eviction": "x"},
        {"refresh": "x"},
        {"interval": 0},
        {"interval": "x"},
        {"tau": -1.0},
        {"cost_unit": "x"},
        {"placement": "x"},
        {"end_prior": 1.0},
        {"taus": ()},
    ],
)
def test_settings_that_cannot_be_are_refused(choices):
    with pytest.raises(ValueError, match="must"):
        PolicySettings(**choices)
