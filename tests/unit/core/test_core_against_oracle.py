"""Random sequences of everything that can happen, checked against the definitions worked out from nothing.

`TEST_STEPS=long pytest tests/unit/core` runs thousands of steps instead of hundreds.
"""

from __future__ import annotations

import math
import os

from core_oracle import MANAGED, Oracle, Path, name, split
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.units import UnitKind

LONG = os.environ.get("TEST_STEPS") == "long"
BLOCK = 64
ORPHAN_S = 10.0
SIZE = {Kind.KV: 1000, Kind.SNAPSHOT: 1500}

# A few long paths that part in the middle, and their prefixes: forks, rewinds and shared stretches are then the rule.
LINES = ["aaaaaa", "aaaabb", "aaabbb", "aaabcc", "abbbbb", "cccc"]
paths = st.builds(
    lambda line, depth: tuple(line[:depth]), st.sampled_from(LINES), st.sampled_from([1, 2, 3, 4, 5, 6, 6])
)
tiers = st.sampled_from([Tier.CPU, Tier.CPU, Tier.DISK, Tier.DISK, Tier.REMOTE])


class CoreMachine(RuleBasedStateMachine):
    """Drives one policy object and the oracle with the same events."""

    @initialize(
        ranks=st.sampled_from([1, 1, 2]),
        hybrid=st.sampled_from([True, True, True, False]),
        refresh=st.sampled_from(["none", "used", "all"]),
        placement=st.sampled_from(["uniform", "histogram"]),
        cost_unit=st.sampled_from(["tokens", "ms"]),
        tau=st.sampled_from([0.0, 5.0, 50.0]),
        eager=st.booleans(),
        offer_again_s=st.sampled_from([0.0, 5.0]),
    )
    def begin(
        self,
        ranks: int,
        hybrid: bool,
        refresh: str,
        placement: str,
        cost_unit: str,
        tau: float,
        eager: bool,
        offer_again_s: float,
    ) -> None:
        snapshot_bytes = SIZE[Kind.SNAPSHOT] * ranks if hybrid else 0  # without recurrent layers there is none to save
        geometry = CacheGeometry(BLOCK, SIZE[Kind.KV] * ranks / BLOCK, snapshot_bytes, ranks)
        choice = PolicySettings(
            refresh=refresh,
            placement=placement,
            cost_unit=cost_unit,
            tau=tau,
            offer_again_s=offer_again_s,
            orphan_s=ORPHAN_S,
        )
        self.policy = CachePolicy(choice)
        self.policy.add_namespace("m", geometry)
        self.oracle = Oracle(geometry)
        self.ranks = ranks
        self.hybrid = hybrid
        self.eager = eager
        self.now = 1.0
        # (tier, anchor) -> what was offered: until when, as what, how large, and whether as a last resort.
        self.offered: dict[tuple[Tier, Path], tuple[float, UnitKind, int, bool]] = {}

    # -- events ---------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 1.0, 7.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(path=paths)
    def lookup(self, path: Path) -> None:
        result = self.policy.lookup("m", self.hashes(path), self.now)
        self.link(path)
        whole = [d for d in range(len(path) + 1) if d == 0 or self.oracle.whole(path[:d])]
        points = [d for d in whole if d == 0 or self.oracle.can_resume(path[:d])]
        assert result == (max(whole) * BLOCK, max(points) * BLOCK)

    @rule(
        path=paths, tier=tiers, saved=st.sets(st.integers(1, 6), min_size=1), look=st.sampled_from([True, True, False])
    )
    def serve(self, path: Path, tier: Tier, saved: set[int], look: bool) -> None:
        """A whole turn: KV of the path, snapshots at some places and at its end."""
        if look:
            self.lookup(path)
        for depth in range(1, len(path) + 1):
            self.put(path[:depth], Kind.KV, range(self.ranks), tier)
        for depth in {d for d in saved if d < len(path)} | {len(path)}:
            self.put(path[:depth], Kind.SNAPSHOT, range(self.ranks), tier)

    @rule(path=paths, kind=st.sampled_from(Kind), rank=st.integers(0, 1), tier=tiers)
    def store_one(self, path: Path, kind: Kind, rank: int, tier: Tier) -> None:
        self.put(path, kind, [rank % self.ranks], tier)

    @rule(path=paths, kind=st.sampled_from(Kind), rank=st.integers(0, 1), tier=tiers)
    def remove_one(self, path: Path, kind: Kind, rank: int, tier: Tier) -> None:
        self.take([(path, kind, rank % self.ranks, tier)])

    @precondition(lambda self: self.oracle.present)
    @rule(data=st.data())
    def remove_present(self, data: st.DataObject) -> None:
        self.take([data.draw(st.sampled_from(sorted(self.oracle.present)))] * 2)  # Seen twice.

    @rule(path=paths)
    def hit(self, path: Path) -> None:
        result = self.policy.lookup("m", self.hashes(path), self.now)
        self.link(path)
        resumed = result.resume_tokens
        self.policy.hit("m", self.hashes(path), result.kv_tokens, resumed, self.now)
        points = self.oracle.points()
        mode = self.policy.settings.refresh
        for depth in range(1, resumed // BLOCK + 1):
            prefix = path[:depth]
            saved = prefix in points and self.hybrid
            used = not saved or mode == "all" or depth == resumed // BLOCK
            if used and mode != "none":
                self.oracle.accessed[prefix] = self.now

    @rule(path=paths, extra=st.integers(0, 200))
    def end_turn(self, path: Path, extra: int) -> None:
        self.policy.end_turn("m", self.hashes(path), len(path) * BLOCK + extra, self.now)

    @rule(tau=st.sampled_from([None, 0.0, 5.0, 50.0]), really=st.integers(0, 3))
    def publish(self, tau: float | None, really: int) -> None:
        if really:  # Rarely: working everything out anew would hide what the small steps got wrong.
            return
        self.policy.observe_prefill(0, 1000, 60.0)
        self.policy.publish(tau)

    # -- questions ------------------------------------------------------------------------------------------------

    @rule(path=paths, keep=st.integers(1, 6))
    def drop_snapshot(self, path: Path, keep: int) -> None:
        """A snapshot is deleted in all tiers by someone else."""
        self.take([(path[:keep], Kind.SNAPSHOT, rank, tier) for rank in range(self.ranks) for tier in Tier])

    @rule(tier=st.sampled_from(MANAGED), action=st.sampled_from(["discard", "discard", "move", "ignore"]))
    def evict(self, tier: Tier, action: str) -> None:
        self.policy.tree.expire(self.now)
        units = [unit for unit in self.oracle.units(self.policy) if unit.tier == tier]
        waiting = {anchor for (where, anchor), offer in self.offered.items() if where == tier and offer[0] > self.now}
        free = [unit for unit in units if unit.anchor not in waiting]
        victim = self.policy.next_victim(tier, self.now)
        orphans = [unit for unit in free if unit.kind == UnitKind.ORPHAN]
        expired = [unit for unit in orphans if self.oracle.accessed[unit.anchor] + ORPHAN_S <= self.now]
        ranked = [unit for unit in free if unit.kind != UnitKind.ORPHAN]
        last_resort = not expired and not ranked
        still_there = any(not self.offered[tier, unit.anchor][3] for unit in units if unit.anchor in waiting)
        if not free or (last_resort and still_there):
            assert victim is None
            return
        assert victim is not None
        unit = next(u for u in units if name(u.anchor) == self.policy.tree.hashes[victim.node])
        assert unit in free
        if expired or not ranked:
            assert unit.kind == UnitKind.ORPHAN
            assert self.oracle.accessed[unit.anchor] == min(self.oracle.accessed[u.anchor] for u in orphans)
        else:
            assert unit.kind != UnitKind.ORPHAN
            lowest = min(u.value for u in ranked)
            assert math.isclose(unit.value, lowest, rel_tol=1e-7, abs_tol=1e-7)
        again = self.now + self.policy.settings.offer_again_s
        self.offered[tier, unit.anchor] = (again, unit.kind, unit.nbytes, last_resort)
        assert {(*split_key(obj),) for obj in victim.objects} == unit.objects
        assert (victim.nbytes, victim.backed, victim.kind) == (unit.nbytes, unit.backed, unit.kind)
        if action == "discard":
            before = self.oracle.useless()
            self.policy.discard(victim, self.now)
            for obj in [*victim.objects, *victim.stranded]:
                self.oracle.remove(*split(obj))
            # Nothing that could serve a hit before is left behind where it no longer can.
            assert self.oracle.useless() <= before
            if victim.backed:
                assert not victim.stranded
        elif action == "move":
            to = Tier.DISK if tier == Tier.CPU else Tier.REMOTE
            self.policy.moved(victim, to, self.now)
            for obj in victim.objects:
                path, kind, rank, _ = split(obj)
                self.oracle.present.setdefault((path, kind, rank, to), obj.nbytes)
                self.oracle.remove(path, kind, rank, tier)

    @invariant()
    def changed_units_are_offered_anew(self) -> None:
        if not hasattr(self, "policy") or not self.offered or not self.policy.settings.offer_again_s:
            return
        self.policy.order.settle()  # Both sides look after every step: what changes back in between is no change.
        units = {(unit.tier, unit.anchor): (unit.kind, unit.nbytes) for unit in self.oracle.units(self.policy)}
        self.offered = {key: offer for key, offer in self.offered.items() if units.get(key) == offer[1:3]}

    @invariant()
    def check_often(self) -> None:
        if hasattr(self, "policy") and self.eager:
            self.check_all_units()

    @rule()
    def check_all_units(self) -> None:
        policy, tree = self.policy, self.policy.tree
        policy.order.settle()
        expected = {(name(unit.anchor), unit.tier): unit for unit in self.oracle.units(policy)}
        found = {}
        for node in range(tree.capacity):
            for tier in MANAGED:
                if tree.unit_kind[tier][node]:
                    found[tree.hashes[node], tier] = node
        assert set(found) == set(expected)
        for key, unit in expected.items():
            node = found[key]
            assert tree.unit_kind[unit.tier][node] == unit.kind, key
            assert tree.unit_bytes[unit.tier][node] == unit.nbytes, key
            assert tree.unit_backed[unit.tier][node] == unit.backed, key
            assert tree.last_access[node] == self.oracle.accessed[unit.anchor], key
            if unit.kind != UnitKind.ORPHAN:
                assert math.isclose(policy.order.value(node, unit.tier), unit.value, rel_tol=1e-7, abs_tol=1e-7), key
                floor = policy.order.floor(node, unit.tier)
                assert floor <= unit.value + 1e-7 or policy.order.is_offered(node, unit.tier), key

    @invariant()
    def bytes_are_counted(self) -> None:
        if hasattr(self, "policy"):
            for tier in Tier:
                held = sum(size for (*_, where), size in self.oracle.present.items() if where == tier)
                assert self.policy.tree.tier_bytes[tier] == held

    def teardown(self) -> None:
        """Whatever happened, everything can be evicted, and then nothing is left."""
        if not hasattr(self, "policy"):
            return
        self.check_all_units()
        self.now += 1000.0
        for tier in MANAGED:
            while victim := self.policy.next_victim(tier, self.now):
                self.policy.discard(victim, self.now)
            assert self.policy.tree.tier_bytes[tier] == 0
        self.take([key for key in self.oracle.present if key[3] == Tier.REMOTE])
        self.policy.tree.expire(self.now + 1000.0)
        assert len(self.policy.tree) == 0
        assert not self.policy.reach.records

    # -- helpers --------------------------------------------------------------------------------------------------

    @staticmethod
    def hashes(path: Path) -> list[bytes]:
        return [name(path[:depth]) for depth in range(1, len(path) + 1)]

    def link(self, path: Path) -> None:
        self.oracle.linked.update(path[:depth] for depth in range(1, len(path) + 1))

    def put(self, path: Path, kind: Kind, ranks: object, tier: Tier) -> None:
        self.relink()
        if kind == Kind.SNAPSHOT and not self.hybrid:
            return
        for rank in ranks:  # type: ignore[attr-defined]
            self.policy.stored("m", [CacheObject(name(path), kind, rank, tier, SIZE[kind])], self.now)
            self.oracle.store(path, kind, rank, tier, SIZE[kind], self.now)

    def take(self, keys: list[tuple[Path, Kind, int, Tier]]) -> None:
        objects = [CacheObject(name(path), kind, rank, tier) for path, kind, rank, tier in keys]
        self.policy.removed("m", objects, self.now)
        for key in keys:
            self.oracle.remove(*key)
        self.relink()

    def relink(self) -> None:
        """A chunk that holds nothing and leads nowhere is forgotten, and with it the place where it hangs."""
        known = self.policy.tree.namespaces[0].nodes
        self.oracle.linked = {path for path in self.oracle.linked if name(path) in known}


def split_key(obj: CacheObject) -> tuple[bytes, Kind, int, Tier]:
    return obj.chunk_hash, Kind(obj.kind), obj.rank, Tier(obj.tier)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=1500 if LONG else 150,
    stateful_step_count=80 if LONG else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not LONG,
)
