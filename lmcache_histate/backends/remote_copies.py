"""What remote tiers are known to hold: from finished stores, and from what every lookup found there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lmcache.v1.distributed.api import ObjectKey

from lmcache_histate.backends.layout import ModelLayout, Namespace
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE

MAX_CHUNKS = 1 << 17
"""Chunks with a remote copy that are remembered; a remote tier may hold more, and forgets without telling."""


class RemoteCopies:
    """Keeps the core's picture of the remote tiers current, and bounded.

    A remote tier has an eviction of its own and other writers, so this is a hint: what a copy is worth follows it, what is
    served never does.

    Args:
        policy: The core.
    """

    def __init__(self, policy: CachePolicy) -> None:
        self._policy = policy
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def stored(self, namespace: Namespace, chunk_hashes: Iterable[bytes], now: float) -> None:
        """Objects of these chunks are in a remote tier (the core has been told); the oldest others are forgotten.

        O(chunks), amortised.
        """
        name = namespace.name
        for chunk_hash in chunk_hashes:
            self._known[name, chunk_hash] = None
            self._known.move_to_end((name, chunk_hash))
        while len(self._known) > MAX_CHUNKS:
            (name, chunk_hash), _ = self._known.popitem(last=False)
            self._policy.removed(name, self._copies(name, chunk_hash), now)

    def found(
        self,
        namespace: Namespace,
        layout: ModelLayout,
        rows: Iterable[tuple[Sequence[ObjectKey], Sequence[int]]],
        now: float,
    ) -> None:
        """A lookup asked the remote tiers for all objects of a prompt.

        Args:
            namespace: Whose prompt.
            layout: Its model's layout.
            rows: Keys of one object group and rank in prompt order, and the indices of those that are there.
            now: Seconds, monotonic.

        O(objects of the prompt), and nothing when none is there and none was known.
        """
        rows = list(rows)
        if not self._known and not any(indices for _, indices in rows):
            return
        held: list[CacheObject] = []
        gone: list[CacheObject] = []
        for keys, indices in rows:
            there = set(indices)
            for index, key in enumerate(keys):
                if index in there:
                    held += layout.objects_of(key, Tier.REMOTE)
                elif (namespace.name, key.chunk_hash) in self._known:
                    gone += layout.objects_of(key, Tier.REMOTE)
        self._policy.removed(namespace.name, gone, now)
        self._policy.stored(namespace.name, held, now)
        self.stored(namespace, dict.fromkeys(entry.chunk_hash for entry in held), now)

    def _copies(self, name: str, chunk_hash: bytes) -> list[CacheObject]:
        tree = self._policy.tree
        node = self._policy.space(name).nodes.get(chunk_hash, NO_NODE)
        if node == NO_NODE:
            return []
        return [entry for kind in Kind for entry in tree.objects(node, kind, Tier.REMOTE)]
