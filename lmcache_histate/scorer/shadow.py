"""A sampled miniature of the cache that runs one candidate of the tuner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.cost import CostModel
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

if TYPE_CHECKING:
    from lmcache_histate.scorer.policy import CachePolicy

SHADOW_TIER = Tier.DISK
"""All tiers of the real cache are one here: what counts is what the cache as a whole still holds."""
MIN_VICTIMS = 256
"""Units that one turn may evict, besides two for each object that it stores."""


class ShadowCache:
    """One tier of a given capacity, filled by whole turns.

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

    def turn(self, namespace: str, hashes: Sequence[bytes], tokens: int, capacity: float, now: float) -> float:
        """Serve one turn that ends at `tokens` and keep within `capacity` bytes; return the work it recomputed.

        In token equivalents. O(path + objects evicted). One turn evicts a bounded number of units; after the capacity
        was halved it takes some turns to get there, in which all shadows hold more than they should alike.
        """
        policy, geometry = self._policy, self._geometry[namespace]
        block = geometry.block_tokens
        found = policy.lookup(namespace, hashes, now)
        if found.kv_tokens:
            policy.hit(namespace, hashes, found.kv_tokens, found.resume_tokens, now)
        kv, state = int(geometry.chunk_bytes), int(geometry.snapshot_bytes)
        saved = [CacheObject(chunk, Kind.KV, 0, SHADOW_TIER, kv) for chunk in hashes[found.kv_tokens // block :]]
        places = policy.place(namespace, found.resume_tokens, tokens, now)
        ends = (hashes[place // block - 1] for place in places if place // block <= len(hashes))
        saved.extend(CacheObject(chunk, Kind.SNAPSHOT, 0, SHADOW_TIER, state) for chunk in ends)
        policy.stored(namespace, saved, now)
        policy.end_turn(namespace, hashes, tokens, now)
        for _ in range(MIN_VICTIMS + 2 * len(saved)):
            if policy.tree.tier_bytes[SHADOW_TIER] <= capacity:
                break
            victim = policy.next_victim(SHADOW_TIER, now)
            if victim is None:
                break
            policy.discard(victim, now)
        return self._cost.recompute(float(found.resume_tokens), float(tokens))
