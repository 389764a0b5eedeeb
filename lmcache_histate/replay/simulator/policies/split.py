"""SGLang's HiCache: every tier is split half and half into a pool of KV and a pool of states, each least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lmcache_histate.replay.simulator.objects import KV, SNAPSHOT, kind_of
from lmcache_histate.replay.simulator.policies.objects import ObjectTier


class SplitLruTier(ObjectTier):
    """Half of the bytes for KV, half for snapshots: each is LRU, whatever the other half has free."""

    def __init__(self, name: str, capacity: float, evicted: Callable[[str, int, float], None]) -> None:
        super().__init__(name, capacity, evicted)
        self._orders: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._short = KV

    def add(self, key: int, nbytes: float, now: float) -> bool:
        """Make room in the object's own half first. O(evicted)."""
        kind = kind_of(key)
        if key not in self:
            if nbytes > self.capacity / 2:
                return False
            self._short = kind
            while self.bytes_by_kind[kind] + nbytes > self.capacity / 2:
                self.evict(now)
        return super().add(key, nbytes, now)

    def inserted(self, key: int, nbytes: float, now: float) -> None:
        """Most recent of its half. O(1)."""
        self._orders[kind_of(key)][key] = None

    def used(self, key: int, now: float) -> None:
        """Most recent again. O(1)."""
        self._orders[kind_of(key)].move_to_end(key)

    def removed(self, key: int) -> None:
        """Forget it. O(1)."""
        del self._orders[kind_of(key)][key]

    def victim(self, now: float) -> int:
        """The least recent of the half that is short. O(1)."""
        order = self._orders[self._short] or self._orders[SNAPSHOT if self._short == KV else KV]
        return next(iter(order))
