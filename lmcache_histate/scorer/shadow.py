"""A sampled miniature of the cache that runs one candidate of the tuner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.cost import CostModel
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

if TYPE_CHECKING:
    from lmcache_histate.scorer.policy import CachePolicy

MIN_VICTIMS = 256
"""Units that one turn may evict from a tier, besides two for each object that it stores."""


class ShadowCache:
    """The tiers of the real cache, smaller, filled by whole turns.

    KV and final snapshots go to the upper tier, historical snapshots to the lower one; KV that is read back is copied up;
    what the upper tier has no room for moves down if it is worth it there. With one tier, all of that is in it.

    Args:
        policy: a policy of its own, with a fixed tau.
        cost: the real cache's prices.
    """

    def __init__(self, policy: CachePolicy, cost: CostModel) -> None:
        self._policy = policy
        self._cost = cost
        self._geometry: dict[str, CacheGeometry] = {}

    @property
    def chunks(self) -> int:
        """Chunks that it holds."""
        return len(self._policy.tree)

    def add_namespace(self, name: str, geometry: CacheGeometry) -> None:
        """Register a namespace. Ranks come and go together here, so one object stands for all of them."""
        single = CacheGeometry(geometry.block_tokens, geometry.kv_bytes_per_token, geometry.snapshot_bytes)
        self._geometry[name] = single
        self._policy.add_namespace(name, single)

    def turn(
        self, namespace: str, hashes: Sequence[bytes], tokens: int, capacities: Mapping[Tier, float], now: float
    ) -> float:
        """Serve one turn that ends at `tokens`, keep every tier within its bytes; return the work it recomputed.

        In token equivalents. O(path + objects evicted). One turn evicts a bounded number of units; after the capacity
        was halved it takes some turns to get there, in which all shadows hold more than they should alike.
        """
        policy, block = self._policy, self._geometry[namespace].block_tokens
        policy.cost.follow(self._cost)
        upper, lower = min(capacities), max(capacities)
        found = policy.lookup(namespace, hashes, now)
        if found.kv_tokens:
            policy.hit(namespace, hashes, found.kv_tokens, found.resume_tokens, now)
        places = [place // block for place in policy.place(namespace, found.resume_tokens, tokens, now)]
        ends = [hashes[place - 1] for place in places if place <= len(hashes)]
        stored = self._kv(namespace, hashes[found.kv_tokens // block :], upper)
        if lower != upper:
            stored += self._read_back(namespace, hashes[: found.resume_tokens // block], upper)
        stored += self._snapshots(namespace, ends[:-1], lower) + self._snapshots(namespace, ends[-1:], upper)
        policy.stored(namespace, stored, now)
        if ends and found.resume_tokens and lower != upper:
            self._overtaken(namespace, hashes[found.resume_tokens // block - 1], upper, lower, now)
        policy.end_turn(namespace, hashes, tokens, now)
        for tier in sorted(capacities):
            self._make_room(tier, lower, capacities, MIN_VICTIMS + 2 * len(stored), now)
        return self._cost.recompute(float(found.resume_tokens), float(tokens))

    def _kv(self, namespace: str, hashes: Sequence[bytes], tier: Tier) -> list[CacheObject]:
        nbytes = int(self._geometry[namespace].chunk_bytes)
        return [CacheObject(chunk, Kind.KV, 0, tier, nbytes) for chunk in hashes]

    def _read_back(self, namespace: str, hashes: Sequence[bytes], tier: Tier) -> list[CacheObject]:
        """The KV of a path's known start that `tier` does not hold."""
        tree = self._policy.tree
        nodes = tree.match(self._policy.space(namespace), hashes).nodes
        return self._kv(namespace, [hashes[index] for index in tree.not_in(nodes, Kind.KV, tier)], tier)

    def _snapshots(self, namespace: str, hashes: Sequence[bytes], tier: Tier) -> list[CacheObject]:
        nbytes = int(self._geometry[namespace].snapshot_bytes)
        return [CacheObject(chunk, Kind.SNAPSHOT, 0, tier, nbytes) for chunk in hashes]

    def _overtaken(self, namespace: str, chunk: bytes, upper: Tier, lower: Tier, now: float) -> None:
        """The snapshot that the turn resumed from is historical now."""
        self._policy.stored(namespace, self._snapshots(namespace, [chunk], lower), now)
        self._policy.removed(namespace, self._snapshots(namespace, [chunk], upper), now)

    def _make_room(self, tier: Tier, lower: Tier, capacities: Mapping[Tier, float], limit: int, now: float) -> None:
        policy, held = self._policy, self._policy.tree.tier_bytes
        for _ in range(limit):
            victim = policy.next_victim(tier, now) if held[tier] > capacities[tier] else None
            if victim is None:
                return
            if tier != lower and policy.worth_moving(victim, lower, capacities[lower] - held[lower]):
                policy.moved(victim, lower, now)
            else:
                policy.discard(victim, now)
