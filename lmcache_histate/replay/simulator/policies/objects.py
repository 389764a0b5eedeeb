"""Tiers of single objects, as file-level caches have them: every KV block and every snapshot is an object of its own.

`ObjectTier` does the bookkeeping of one tier, subclasses add only the order in which objects go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmcache_histate.replay.simulator.objects import SNAPSHOT, kind_of, kv_key, snapshot_key
from lmcache_histate.replay.simulator.policies.base import Load, Match, Occupancy, Site, Tiers
from lmcache_histate.replay.simulator.prompts import Prompt


class ObjectTier(ABC):
    """One tier of bounded bytes.

    `add` makes room by letting go of what `victim` names, one by one, until the new object fits; an object larger than
    the tier is refused. Subclasses keep their order in `inserted`, `used` and `removed`, and must name a victim whenever
    the tier is not empty.

    Args:
        name: Of the tier, for the ledger.
        capacity: Bytes.
        evicted: Called as `evicted(tier, key, bytes)` for each object that had to go, once it is out.
    """

    def __init__(self, name: str, capacity: float, evicted: Callable[[str, int, float], None]) -> None:
        self.name = name
        self.capacity = capacity
        self._evicted = evicted
        self._sizes: dict[int, float] = {}
        self.bytes_by_kind = [0.0, 0.0]

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> float:
        """Bytes held."""
        return self.bytes_by_kind[0] + self.bytes_by_kind[1]

    def add(self, key: int, nbytes: float, now: float) -> bool:
        """Put an object in, or use it if it is there; False if it is refused. O(evicted) and the order's own cost."""
        if key in self._sizes:
            self.used(key, now)
            return True
        if nbytes > self.capacity:
            return False
        while self.nbytes + nbytes > self.capacity:
            self.evict(now)
        self._sizes[key] = nbytes
        self.bytes_by_kind[kind_of(key)] += nbytes
        self.inserted(key, nbytes, now)
        return True

    def evict(self, now: float) -> None:
        """Let go of the next victim."""
        key = self.victim(now)
        nbytes = self.discard(key)
        self._evicted(self.name, key, nbytes)

    def discard(self, key: int) -> float:
        """Take an object out without counting it as evicted; its bytes."""
        nbytes = self._sizes.pop(key)
        self.bytes_by_kind[kind_of(key)] -= nbytes
        self.removed(key)
        return nbytes

    @abstractmethod
    def inserted(self, key: int, nbytes: float, now: float) -> None:
        """A new object is in."""

    @abstractmethod
    def used(self, key: int, now: float) -> None:
        """An object was used."""

    @abstractmethod
    def removed(self, key: int) -> None:
        """An object is out."""

    @abstractmethod
    def victim(self, now: float) -> int:
        """The object that should go next; it is removed right after."""


class LruTier(ObjectTier):
    """What was used longest ago goes first."""

    def __init__(self, name: str, capacity: float, evicted: Callable[[str, int, float], None]) -> None:
        super().__init__(name, capacity, evicted)
        self._order: OrderedDict[int, None] = OrderedDict()

    def inserted(self, key: int, nbytes: float, now: float) -> None:
        """Most recent. O(1)."""
        self._order[key] = None

    def used(self, key: int, now: float) -> None:
        """Most recent again. O(1)."""
        self._order.move_to_end(key)

    def removed(self, key: int) -> None:
        """Forget it. O(1)."""
        del self._order[key]

    def victim(self, now: float) -> int:
        """The least recent. O(1)."""
        return next(iter(self._order))


class UnboundedTier(ObjectTier):
    """Nothing ever goes."""

    def inserted(self, key: int, nbytes: float, now: float) -> None:
        """Nothing to order."""

    def used(self, key: int, now: float) -> None:
        """Nothing to order."""

    def removed(self, key: int) -> None:
        """Nothing to order."""

    def victim(self, now: float) -> int:
        """Never called: everything fits."""
        raise AssertionError("an unbounded tier has no victim")


class ObjectTiers(Tiers):
    """CPU memory, disk and a remote store of single objects, each with an order of its own, written through.

    As LMCache does: what is stored goes to CPU memory and to every tier below; what is read from below is kept in CPU
    memory; a request that ends touches all its objects, deepest first, so that of one path the tail goes first.

    Args:
        site: What it runs on.
        tiers: From the fastest down. The first is `cpu`; `disk` and `remote` are read over their links.
    """

    def __init__(self, site: Site, tiers: Sequence[ObjectTier]) -> None:
        self.site = site
        self.tiers = list(tiers)
        self.sizes = (site.geometry.chunk_bytes, site.geometry.snapshot_bytes)

    def holds(self, key: int) -> bool:
        """Whether any tier has it."""
        return any(key in tier for tier in self.tiers)

    def lookup(self, prompt: Prompt, path: Sequence[int], now: float) -> Match:
        """Leading blocks of KV in any tier, and the last snapshot among them."""
        kv = 0
        for node in path:
            if not self.holds(kv_key(node)):
                break
            kv += 1
        resume = kv
        while resume and not self.holds(snapshot_key(path[resume - 1])):
            resume -= 1
        return Match(kv, resume)

    def load(self, prompt: Prompt, path: Sequence[int], start: int, end: int, now: float) -> Load:
        """Read what is not in CPU memory from below, keep it there, and copy everything to the GPU."""
        keys = [kv_key(node) for node in path[start:end]]
        keys.append(snapshot_key(path[end - 1]))
        below: dict[str, list[int]] = {}
        nbytes = 0.0
        for key in keys:
            tier = next(tier for tier in self.tiers if key in tier)
            nbytes += self.sizes[kind_of(key)]
            if tier is not self.tiers[0] or tier.name != "cpu":
                below.setdefault(tier.name, []).append(key)
        ready = now
        for name, wanted in below.items():
            link = self.site.links.disk_read if name == "disk" else self.site.links.remote_read
            ready = max(ready, link.transfer(sum(self.sizes[kind_of(key)] for key in wanted), now))
            if self.tiers[0].name == "cpu":
                for key in reversed(wanted):
                    self.tiers[0].add(key, self.sizes[kind_of(key)], now)
        ready = max(ready, self.site.links.to_gpu.transfer(nbytes, now))
        blocks = {name: sum(kind_of(key) != SNAPSHOT for key in wanted) for name, wanted in below.items()}
        return Load(ready, blocks.get("disk", 0), blocks.get("remote", 0))

    def store(
        self, prompt: Prompt, path: Sequence[int], start: int, end: int, snapshots: Sequence[int], now: float
    ) -> None:
        """Write to every tier."""
        keys = [kv_key(node) for node in path[start:end]] + [snapshot_key(path[place - 1]) for place in snapshots]
        for tier in self.tiers:
            fresh = 0.0
            for key in reversed(keys):
                nbytes = self.sizes[kind_of(key)]
                if key not in tier and tier.add(key, nbytes, now):
                    fresh += nbytes
            self.wrote(tier, fresh, now)

    def wrote(self, tier: ObjectTier, nbytes: float, now: float) -> None:
        """Charge the link of a tier for what was written to it."""
        if tier.name == "disk":
            self.site.links.disk_write.transfer(nbytes, now)
        elif tier.name == "remote":
            self.site.links.remote_write.transfer(nbytes, now)

    def finished(self, prompt: Prompt, path: Sequence[int], resumed: int, now: float) -> None:
        """Touch all objects of the request."""
        for tier in self.tiers:
            for node in reversed(path):
                for key in (kv_key(node), snapshot_key(node)):
                    if key in tier:
                        tier.used(key, now)

    def occupancy(self) -> Occupancy:
        """Bytes by tier and kind."""
        return Occupancy(
            {tier.name: tier.bytes_by_kind[0] for tier in self.tiers},
            {tier.name: tier.bytes_by_kind[1] for tier in self.tiers},
        )
