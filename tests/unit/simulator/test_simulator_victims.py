"""Who goes first under each baseline, worked out by hand."""

from __future__ import annotations

import pytest

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.replay.simulator.gpu_pool import BlockPool
from lmcache_histate.replay.simulator.hardware import StepTimes
from lmcache_histate.replay.simulator.objects import kv_key, snapshot_key
from lmcache_histate.replay.simulator.policies.marconi import MarconiOrder, MarconiPolicy
from lmcache_histate.replay.simulator.policies.objects import LruTier
from lmcache_histate.replay.simulator.policies.orders import GdsfOrder, OrderedPolicy, S3FifoOrder, S3FifoPolicy
from lmcache_histate.replay.simulator.policies.registry import LRU
from lmcache_histate.replay.simulator.policies.split import SplitLruTier
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

KV, STATE = 100, 500
"""Bytes: a token of KV is a byte, a block has 100 tokens, a snapshot is as large as 500 tokens."""
LINEAR = StepTimes(0.0, 0.0, token_s=1.0, attention_s=0.0, context_s=0.0, state_s=0.0)


# -- single objects -----------------------------------------------------------------------------------------------------


class Gone(list):
    def __call__(self, tier: str, key: int, nbytes: float) -> None:
        self.append(key)


def test_lru_lets_go_of_what_was_used_longest_ago():
    gone = Gone()
    tier = LruTier("cpu", 3, gone)
    for key in (2, 4, 6):
        tier.add(key, 1, 0.0)
    tier.used(2, 1.0)
    tier.add(8, 1, 2.0)
    assert gone == [4]
    tier.add(10, 2, 3.0)
    assert gone == [4, 6, 2]
    assert not tier.add(12, 4, 4.0)
    assert tier.nbytes == 3


def test_split_tiers_let_go_within_the_half_that_is_short():
    gone = Gone()
    tier = SplitLruTier("cpu", 4, gone)
    for node in (1, 2):
        tier.add(kv_key(node), 1, 0.0)
    tier.add(snapshot_key(1), 2, 0.0)
    tier.add(snapshot_key(2), 2, 1.0)
    assert gone == [snapshot_key(1)], "KV is older, but in the other half"
    tier.used(kv_key(1), 2.0)
    tier.add(kv_key(3), 1, 3.0)
    assert gone == [snapshot_key(1), kv_key(2)]
    assert not tier.add(snapshot_key(4), 3, 4.0), "larger than its half"


def test_the_pool_lets_go_of_the_tail_of_what_ended_first():
    gone: list[int] = []
    pool = BlockPool(8, 2, gone.append)
    pool.take([], 3)
    for node in (1, 2, 3):
        assert pool.fill(node)
    pool.save_state(3)
    pool.release([1, 2, 3], 0)
    assert pool.match([1, 2, 3, 4]) == (3, 3)
    # 8 = 3 of KV, 2 of a state, 3 free: two blocks and a state of its own take one object, the state that was freed first.
    pool.take([], 2)
    assert gone == [snapshot_key(3)]
    pool.release([], 2)
    pool.take([], 5)
    assert gone == [snapshot_key(3), kv_key(3), kv_key(2)], "of one path the tail goes first"
    assert pool.match([1, 2, 3]) == (1, 0)


def test_states_and_kv_have_pools_of_their_own_when_split():
    gone: list[int] = []
    pool = BlockPool(4, 2, gone.append, state_pool=4)
    pool.take([], 4)
    pool.fill(1)
    assert not pool.fits([], 1)
    assert pool.save_state(1)
    assert not pool.save_state(2) or gone == [snapshot_key(1)]
    assert kv_key(1) not in gone


# -- units --------------------------------------------------------------------------------------------------------------


def path(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(blocks)]


def store(policy: CachePolicy, name: str, blocks: int, now: float, tier: Tier = Tier.CPU) -> list[bytes]:
    """A session of whole blocks with a snapshot at its end: one bundle."""
    hashes = path(name, blocks)
    policy.lookup("m", hashes, now)
    policy.stored("m", [CacheObject(h, Kind.KV, 0, tier, KV) for h in hashes], now)
    policy.stored("m", [CacheObject(hashes[-1], Kind.SNAPSHOT, 0, tier, STATE)], now)
    policy.order.settle()
    return hashes


def hit(policy: CachePolicy, hashes: list[bytes], now: float) -> None:
    policy.hit("m", hashes, len(hashes) * 100, len(hashes) * 100, now)


def evict(policy: CachePolicy, now: float, tier: Tier = Tier.CPU) -> str:
    victim = policy.next_victim(tier, now)
    assert victim is not None
    policy.discard(victim, now)
    return victim.objects[0].chunk_hash.decode().rstrip("0123456789")


def added(policy: CachePolicy) -> CachePolicy:
    policy.add_namespace("m", CacheGeometry(100, 1.0, STATE))
    return policy


def test_gdsf_weighs_uses_cost_and_size():
    policy = added(OrderedPolicy(LRU, GdsfOrder))
    b = store(policy, "b", 2, 1.0)
    store(policy, "a", 10, 9.0)
    for now in (2.0, 3.0, 4.0):
        hit(policy, b, now)
    # b: 4 uses * 200 / 700 = 1.14; a: 1 * 1000 / 1500 = 0.67, although it was used last.
    assert evict(policy, 10.0) == "a"
    # The clock is 0.67 now. c: 0.67 + 100 / 600 = 0.83.
    store(policy, "c", 1, 11.0)
    assert evict(policy, 12.0) == "c"
    # The clock is 0.83. d: 0.83 + 1000 / 1500 = 1.5 outlives b, which was used four times, long ago.
    store(policy, "d", 10, 13.0)
    assert evict(policy, 14.0) == "b"


def test_s3fifo_keeps_what_was_used_twice_and_remembers_what_it_let_go():
    policy = added(S3FifoPolicy(LRU, S3FifoOrder))
    u = store(policy, "u", 1, 1.0)
    v = store(policy, "v", 1, 2.0)
    for name, now in (("w", 3.0), ("x", 4.0)):
        store(policy, name, 1, now)
    hit(policy, u, 5.0)
    hit(policy, u, 6.0)
    hit(policy, v, 7.0)
    # All are in the small queue, u first. It was used twice and moves on; v was used once and goes.
    assert evict(policy, 8.0) == "v"
    store(policy, "v", 1, 9.0)  # remembered: it enters the main queue, behind u
    assert evict(policy, 10.0) == "w"
    assert evict(policy, 11.0) == "x"
    # Only the main queue is left; u's uses were forgotten when it moved there, so it goes first.
    assert evict(policy, 12.0) == "u"
    assert evict(policy, 13.0) == "v"


def test_s3fifo_goes_round_in_the_main_queue():
    policy = added(S3FifoPolicy(LRU, S3FifoOrder))
    for name, now in (("u", 1.0), ("v", 2.0)):
        hashes = store(policy, name, 1, now)
        hit(policy, hashes, now + 5.0)
        hit(policy, hashes, now + 5.5)
    store(policy, "w", 1, 8.0)
    assert evict(policy, 9.0) == "w"  # u and v moved to the main queue
    hit(policy, path("u", 1), 10.0)
    assert evict(policy, 11.0) == "v"  # u was first, but goes round once


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, "a"), (1.0, "a"), (2.0, "b")])
def test_marconi_weighs_recency_against_flop_efficiency(alpha, expected):
    policy = added(MarconiPolicy(LRU, {}, LINEAR, alpha))
    store(policy, "a", 10, 1.0)
    store(policy, "b", 2, 11.0)
    policy.publish()
    # Efficiency: a 1000 / 1500 = 0.667, b 200 / 700 = 0.286. The spans are 10 s and 0.381, so that alpha adds
    # 17.5 * alpha to a's 1 s and 7.5 * alpha to b's 11 s: they are level at alpha = 1, where a's longer path decides.
    assert evict(policy, 12.0) == expected


def test_marconi_chooses_alpha_from_the_window_after_the_first_eviction():
    policy = added(MarconiPolicy(LRU, {Tier.CPU: 1600}, LINEAR))
    for number in range(20):
        policy.lookup("m", path(f"before{number}x", 1), 0.0)
    assert policy.next_victim(Tier.CPU, 0.0) is None
    # A long session comes back every third request, short ones never. It and a short one do not fit: recency loses the
    # long one each time, efficiency keeps it.
    for number in range(policy.MOST_RECORDED):
        assert policy.order.alpha == 0.0
        name = "long" if number % 3 == 0 else f"short{number}x"
        policy.lookup("m", path(name, 10 if number % 3 == 0 else 2), 10.0 * number)
        if policy._recorded is None:
            break
    assert policy.order.alpha > 0.0


# -- the paper's Figure 7 -------------------------------------------------------------------------------------------------


def figure_7(policy: CachePolicy) -> str:
    """KV in CPU memory, snapshots on a full disk: B has S1 after a long prefix, S2 a short gap later, S3 at its end, and
    was hit there last; C has S6. Which one goes?"""
    added(policy)
    b, c = path("b", 80), path("c", 40)
    names = {b[39]: "S1", b[43]: "S2", c[39]: "S6", b[79]: "S3"}
    policy.lookup("m", b, 1.0)
    policy.stored("m", [CacheObject(h, Kind.KV, 0, Tier.CPU, KV) for h in b], 1.0)
    policy.lookup("m", c, 1.0)
    policy.stored("m", [CacheObject(h, Kind.KV, 0, Tier.CPU, KV) for h in c], 1.0)
    for chunk, now in ((b[39], 1.0), (b[43], 2.0), (c[39], 3.0), (b[79], 4.0)):
        policy.stored("m", [CacheObject(chunk, Kind.SNAPSHOT, 0, Tier.DISK, STATE)], now)
        policy.order.settle()
    policy.hit("m", b, 8000, 8000, 5.0)
    policy.publish()
    victim = policy.next_victim(Tier.DISK, 6.0)
    assert victim is not None
    return names[victim.objects[0].chunk_hash]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (lambda: CachePolicy(PolicySettings(eviction="lru", refresh="used")), "S1"),
        (lambda: CachePolicy(PolicySettings(eviction="lru", refresh="all")), "S6"),
        (lambda: CachePolicy(PolicySettings(tau=1000.0)), "S2"),
        # Two uses of B's: S1 2 * 4000 / 500 = 16, S2 2 * 400 / 500 = 1.6, S3 14.4; C's one use: 8.
        (lambda: OrderedPolicy(LRU, GdsfOrder), "S2"),
        # None was used twice: the first that came in.
        (lambda: S3FifoPolicy(LRU, S3FifoOrder), "S1"),
        # As LRU, refreshing all.
        (lambda: MarconiPolicy(LRU, {}, LINEAR, 0.0), "S6"),
        # S2 saves 0.8 s a token that it takes, S6 saves 8.
        (lambda: MarconiPolicy(LRU, {}, LINEAR, 2.0), "S2"),
    ],
    ids=["lru-refresh-used", "lru-refresh-all", "histate", "gdsf", "s3fifo", "marconi-lru", "marconi"],
)
def test_figure_7(policy, expected):
    assert figure_7(policy()) == expected


def test_an_order_of_marconis_is_lru_until_it_is_weighed():
    policy = added(CachePolicy(LRU))
    order = MarconiOrder(policy, LINEAR, alpha=1.0)
    node = policy.tree.namespaces[0].root
    assert order.value(node, Tier.CPU) == policy.tree.last_access[node]
