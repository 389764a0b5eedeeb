"""Moves snapshots that a later one has overtaken to disk: historical ones do not belong in CPU memory (paper, tiers)."""

from __future__ import annotations

from collections import deque

from lmcache_histate.backends.layout import Namespace
from lmcache_histate.backends.limits import SETTLE_SECONDS
from lmcache_histate.backends.mover import Mover
from lmcache_histate.backends.room import RoomMaker
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE
from lmcache_histate.state_store.units import UnitKind


class HistoricalSnapshots:
    """Remembers which snapshots were overtaken, and moves them once that has settled.

    Args:
        policy: The core.
        room: Moves objects down.
        mover: Says whether a move may start.
    """

    def __init__(self, policy: CachePolicy, room: RoomMaker, mover: Mover) -> None:
        self._policy = policy
        self._room = room
        self._mover = mover
        self._overtaken: deque[tuple[float, Namespace, bytes]] = deque(maxlen=100_000)
        self.counts = {"demoted_snapshots": 0}

    def stored(self, namespace: Namespace, chunk_hash: bytes, now: float) -> None:
        """A snapshot arrived: the one before it on its path, and itself if it came late, may be historical now.

        O(chunks between them).
        """
        tree = self._policy.tree
        node = self._node(namespace, chunk_hash)
        if node == NO_NODE:
            return
        before = tree.previous_restorable(node)
        for other in (before, node):
            if other != NO_NODE and tree.hashes[other]:
                self._overtaken.append((now + SETTLE_SECONDS, namespace, tree.hashes[other]))

    def move(self, now: float) -> None:
        """Write historical snapshots to disk and let CPU memory go of them. O(snapshots that became historical).

        As many as may be on their way at a time; the rest waits. What the day's write budget does not hold stays in CPU
        memory, to be evicted in its turn.
        """
        tree = self._policy.tree
        while self._overtaken and self._overtaken[0][0] <= now:
            _, namespace, chunk_hash = self._overtaken[0]
            node = self._node(namespace, chunk_hash)
            self._policy.order.settle()
            if node != NO_NODE and tree.unit_kind[Tier.CPU][node] == UnitKind.SNAPSHOT:
                objects = tree.objects(node, Kind.SNAPSHOT, Tier.CPU)
                nbytes = sum(entry.nbytes for entry in objects)
                if not self._mover.has_room(nbytes, now) and self._mover.within_budget(nbytes, now):
                    return
                if self._mover.within_budget(nbytes, now):
                    self.counts["demoted_snapshots"] += self._room.move_down(namespace, objects) > 0
            self._overtaken.popleft()

    def _node(self, namespace: Namespace, chunk_hash: bytes) -> int:
        return self._policy.space(namespace.name).nodes.get(chunk_hash, NO_NODE)
