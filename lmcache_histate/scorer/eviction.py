"""What goes first: the value of every unit, one queue for each tier that can run short.

A unit's value is a time (paper, eviction):

    H = t + tau * C / M

`t` is its last access, `C` the expected extra work if it goes (token equivalents), `M` what that frees in the short
tier (in tokens of KV), so `tau` is in seconds: how much longer a unit whose loss costs as much as its bytes may stay
idle than one that costs nothing. `C` is the hits that would suffer, times what each of them would lose:

- a snapshot: the hits that resume exactly there, times the recomputation from the restore point before it;
- a bundle: all hits at or beyond its end, times the same;
- where another tier has a copy, the same hits times fetching that copy instead of recomputing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_histate.scorer.cost import CostModel
from lmcache_histate.scorer.queue import ABSENT, FloorQueue
from lmcache_histate.scorer.reach import PathReach
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE
from lmcache_histate.state_store.units import MANAGED, UnitKind, UnitTree

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TAIL_FIRST = 1e-6
"""Seconds per token by which later positions of one hit count as accessed earlier. One hit gives a whole path the same
time; what is equal otherwise must go from the tail, where it serves the fewest hits (LMCache's LRU does the same)."""


@dataclass(frozen=True)
class Victim:
    """A unit that should leave a tier.

    Attributes:
        namespace: name of its namespace.
        tier: the tier that it should leave.
        kind: snapshot, bundle or orphan.
        node: id of its anchor; valid until the next event.
        position: tokens in the prefix that ends with its anchor.
        value: H in seconds, -inf for an orphan.
        nbytes: bytes that it takes in `tier`.
        backed: every object a hit needs has a copy elsewhere: deleting loses time, not work.
        objects: what to delete from (or copy out of) `tier`, deepest chunk first. Whole families of ranks.
        find_stranded: what `stranded` asks, once; whoever moves the victim never does.
    """

    namespace: str
    tier: Tier
    kind: UnitKind
    node: int
    position: int
    value: float
    nbytes: int
    backed: bool
    objects: list[CacheObject]
    find_stranded: Callable[[], list[CacheObject]]

    @cached_property
    def stranded(self) -> list[CacheObject]:
        """Objects in any tier that become useless when `objects` are deleted without a copy; delete them too.

        Where the path goes on in another tier that is all of its rest, and moving is the better choice: its value is then
        only a lower bound of what would be lost. To be asked before the next event.
        """
        return self.find_stranded()


class Offer(NamedTuple):
    """A unit that was named as a victim and waits outside of its queue; one that has changed since is another unit."""

    until: float
    """When it is queued again, in seconds."""
    kind: int
    nbytes: int
    last_resort: bool
    """It was an orphan that had not waited `orphan_s` yet."""
    space: int
    """Number of its namespace."""


class EvictionOrder:
    """The order of victims in every managed tier.

    Args:
        tree: what exists.
        reach: expected hits.
        cost: prices.
        tau: seconds; 0 is least recently used.
        orphan_s: seconds that an orphan may wait for what it lacks. Until then it stays while the tier holds anything
            else; after that it goes ahead of everything.
        offer_again_s: seconds until a victim that was offered and is still there is offered again.
    """

    def __init__(
        self, tree: UnitTree, reach: PathReach, cost: CostModel, tau: float, orphan_s: float, offer_again_s: float
    ) -> None:
        self.tau = tau
        self._tree = tree
        self._reach = reach
        self._cost = cost
        self._orphan_s = orphan_s
        self._offer_again_s = offer_again_s
        self._queues = [FloorQueue(tree.space) for _ in MANAGED]
        self._orphans = [FloorQueue(tree.space) for _ in MANAGED]
        # Offered units stay out of the queue for a while: a locked one costs its next scan nothing.
        self._offered: list[dict[int, Offer]] = [{} for _ in MANAGED]
        self._offers: list[deque[tuple[float, int]]] = [deque() for _ in MANAGED]
        # How many of them are no last resort, by namespace: while there is one, fresh orphans are not offered.
        self._leaving: list[Counter[int]] = [Counter() for _ in MANAGED]

    # -- told by the tree (this object is its watcher) --------------------------------------------------------------

    def rearranging(self) -> None:
        """Restore points are about to change in another way than a path growing."""
        self._reach.settle()

    def entered(self, node: int) -> None:
        """`node` can be resumed from."""
        self._reach.entered(node)

    def left(self, node: int) -> None:
        """`node` cannot be resumed from any more."""
        self._reach.left(node)

    def freed(self, node: int) -> None:
        """`node`'s id may be reused."""
        self._reach.freed(node)
        for tier in MANAGED:
            self._withdraw(node, tier)

    def grown(self, nodes: int) -> None:
        """There are `nodes` more ids."""
        self._reach.grown(nodes)
        for queue in (*self._queues, *self._orphans):
            queue.grow(nodes)

    def queued(self, tier: Tier) -> int:
        """Units that can be evicted from `tier`, orphans included."""
        return len(self._queues[tier]) + len(self._orphans[tier]) + len(self._offered[tier])

    # -- values ---------------------------------------------------------------------------------------------------

    def value(self, node: int, tier: Tier) -> float:
        """H of the unit anchored at `node`, in seconds. O(stretch)."""
        tree = self._tree
        kind = tree.unit_kind[tier][node]
        nbytes = tree.unit_bytes[tier][node]
        hits = self._reach.reach[node] if kind == UnitKind.BUNDLE else self._reach.share(node)
        if tree.unit_backed[tier][node]:
            price = self._cost.fetch(float(nbytes), self._copy_tier(node, tier))
        else:
            before = tree.previous_restorable(node)
            start = float(tree.position[before]) if before != NO_NODE else 0.0
            price = self._cost.recompute(start, float(tree.position[node]))
        freed = nbytes / tree.kv_bytes_per_token[tree.space[node]]
        accessed = tree.last_access[node] - TAIL_FIRST * tree.position[node]
        return accessed + self.tau * max(0.0, hits) * price / max(freed, 1e-9)

    def floor(self, node: int, tier: Tier) -> float:
        """What the queue of `tier` holds for `node`: at most its value; infinite if it is not queued. O(1)."""
        return self._queues[tier].floor(node)

    def is_offered(self, node: int, tier: Tier) -> bool:
        """Whether `node` was offered as a victim of `tier` and waits outside of the queue. O(1)."""
        return node in self._offered[tier]

    def _copy_tier(self, node: int, tier: Tier) -> Tier:
        """The fastest other tier that holds a copy of the unit's anchor."""
        for other in Tier:
            if other != tier and (self._tree.size(node, Kind.KV, other) or self._tree.size(node, Kind.SNAPSHOT, other)):
                return other
        return Tier.REMOTE

    def _values(self, nodes: Ints, tier: Tier, start: Floats) -> Floats:
        """`value` for many units that are no orphans; `start` is the position of the restore point before each."""
        tree = self._tree
        kinds = np.frombuffer(tree.unit_kind[tier], dtype=np.uint8)[nodes]
        nbytes = np.frombuffer(tree.unit_bytes[tier], dtype=np.uint64)[nodes].astype(np.float64)
        reach = np.frombuffer(self._reach.reach, dtype=np.float64)[nodes]
        passed = np.frombuffer(self._reach.passed, dtype=np.float64)[nodes]
        hits = np.maximum(0.0, np.where(kinds == UnitKind.BUNDLE, reach, reach - passed))
        position = np.frombuffer(tree.position, dtype=np.int32)[nodes].astype(np.float64)
        price = self._cost.recompute(start, position)
        for index in np.flatnonzero(np.frombuffer(tree.unit_backed[tier], dtype=np.uint8)[nodes]).tolist():
            price[index] = self._cost.fetch(float(nbytes[index]), self._copy_tier(int(nodes[index]), tier))
        per_token = np.frombuffer(tree.kv_bytes_per_token, dtype=np.float64)
        freed = nbytes / per_token[np.frombuffer(tree.space, dtype=np.uint32)[nodes]]
        accessed = np.frombuffer(tree.last_access, dtype=np.float64)[nodes] - TAIL_FIRST * position
        values: Floats = accessed + self.tau * hits * price / np.maximum(freed, 1e-9)
        return values

    # -- keeping up -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring units and queues up to date with the events since the last call. O(what they touched)."""
        reach = self._reach
        reach.settle()
        changed = self._tree.settle()
        if len(changed) > self._tree.capacity // 4:
            # Much of the tree is new: one pass over arrays is cheaper than a queue operation for each.
            reach.stale_paths.clear()
            reach.stale_nodes.clear()
            for node, tier in changed:
                self._requeue(node, tier, priced=False)
            self._reprice_queues()
            return
        for node in reach.stale_paths:
            self._lower_path(node)
        reach.stale_paths.clear()
        for node, tier in changed:
            self._requeue(node, tier)
        for node in reach.stale_nodes:
            for tier in MANAGED:
                self._requeue(node, tier)
        reach.stale_nodes.clear()

    def _requeue(self, node: int, tier: Tier, priced: bool = True) -> None:
        kind = self._tree.unit_kind[tier][node]
        offer = self._offered[tier].get(node)
        if offer is not None:
            if offer.kind == kind and offer.nbytes == self._tree.unit_bytes[tier][node]:
                return
            self._withdraw(node, tier)
        if kind == UnitKind.ORPHAN:
            self._queues[tier].discard(node)
            self._orphans[tier].set(node, self._tree.last_access[node])
            return
        self._orphans[tier].discard(node)
        if kind == UnitKind.NONE:
            self._queues[tier].discard(node)
        elif priced:
            self._queues[tier].set(node, self.value(node, tier))

    def _lower_path(self, end: int) -> None:
        """Hits along the path to `end` changed: report the units on it that lost value. Vectorised, O(path)."""
        tree = self._tree
        nodes = tree.path(end)
        if not len(nodes):
            return
        position = np.frombuffer(tree.position, dtype=np.int32)[nodes].astype(np.float64)
        marked = np.frombuffer(tree.restorable.marked, dtype=np.uint8)[nodes] != 0
        start = np.concatenate(([0.0], np.maximum.accumulate(np.where(marked, position, 0.0))[:-1]))
        for tier in MANAGED:
            kinds = np.frombuffer(tree.unit_kind[tier], dtype=np.uint8)[nodes]
            here = np.flatnonzero((kinds == UnitKind.SNAPSHOT) | (kinds == UnitKind.BUNDLE))
            if not len(here):
                continue
            values = self._values(nodes[here], tier, start[here])
            lower = np.flatnonzero(values < self._queues[tier].floors(nodes[here]))
            for index in lower.tolist():
                node = int(nodes[here[index]])
                if node not in self._offered[tier]:
                    self._queues[tier].lower(node, float(values[index]))

    def reprice(self, tau: float | None = None) -> None:
        """Work out every value anew, after tau, the prices or the access model changed. O(n), vectorised."""
        self.settle()
        if tau is not None:
            self.tau = tau
        self._reprice_queues()

    def _reprice_queues(self) -> None:
        tree = self._tree
        marked = np.frombuffer(tree.restorable.marked, dtype=np.uint8) != 0
        parent = np.frombuffer(tree.parent, dtype=np.int32).astype(np.int64)
        ids = np.arange(len(parent))
        # Pointer jumping: after k rounds a node points 2^k steps up, or to the first stop on the way.
        jump = np.where(marked | (parent < 0), ids, parent)
        while True:
            further = jump[jump]
            if np.array_equal(further, jump):
                break
            jump = further
        before = jump[np.maximum(parent, 0)]
        positions = np.frombuffer(tree.position, dtype=np.int32)
        start = np.where((parent >= 0) & marked[before], positions[before], 0).astype(np.float64)
        for tier in MANAGED:
            kinds = np.frombuffer(tree.unit_kind[tier], dtype=np.uint8)
            nodes = np.flatnonzero((kinds == UnitKind.SNAPSHOT) | (kinds == UnitKind.BUNDLE))
            floors = np.full(len(kinds), ABSENT)
            floors[nodes] = self._values(nodes, tier, start[nodes])
            floors[list(self._offered[tier])] = ABSENT
            self._queues[tier].replace_all(floors)

    # -- victims --------------------------------------------------------------------------------------------------

    def next_victim(self, tier: Tier, now: float, spaces: Sequence[int] | None = None) -> Victim | None:
        """The unit that should leave `tier` first, None when nothing in it can be evicted.

        Orphans that waited `orphan_s` come first, then the lowest H. A victim is offered once and again only after
        `offer_again_s`, or when it has changed, so a locked one is passed over without a scan. Fresh orphans are what is
        being stored right now: they are offered only when the tier holds nothing else, victims that were offered and
        are still there included; then the one that was stored to longest ago first, from its tail.

        O(log n + what is listed), amortised, times the namespaces named.

        Args:
            tier: CPU or DISK.
            now: seconds.
            spaces: numbers of the namespaces to choose from, as if the tier held nothing else; all if None.
        """
        self.settle()
        self._take_back(tier, now)
        orphan = self._oldest_orphan(tier, spaces)
        if orphan is not None and self._tree.last_access[orphan] + self._orphan_s <= now:
            return self._offer(orphan, tier, -ABSENT, now)
        best = self._lowest(tier, spaces)
        if best is not None:
            return self._offer(best[0], tier, best[1], now)
        leaving = self._leaving[tier]
        if orphan is None or (leaving if spaces is None else any(space in leaving for space in spaces)):
            return None
        return self._offer(orphan, tier, -ABSENT, now, last_resort=True)

    def lowest_value(self, tier: Tier, spaces: Sequence[int] | None = None) -> float:
        """H of the next victim of `tier` that is no orphan, infinite if there is none. O(log n) amortised."""
        self.settle()
        best = self._lowest(tier, spaces)
        return ABSENT if best is None else best[1]

    def _lowest(self, tier: Tier, spaces: Sequence[int] | None = None) -> tuple[int, float] | None:
        found = [best for space in _groups(spaces) if (best := self._lowest_of(tier, space)) is not None]
        return min(found, key=lambda best: best[1], default=None)

    def _lowest_of(self, tier: Tier, space: int | None) -> tuple[int, float] | None:
        queue = self._queues[tier]
        while (node := queue.peek(space)) is not None:
            value = self.value(node, tier)
            if value <= queue.floor(node):
                return node, value
            queue.set(node, value)  # It was refreshed since; each hit or change is paid for once.
        return None

    def _oldest_orphan(self, tier: Tier, spaces: Sequence[int] | None = None) -> int | None:
        found = [node for space in _groups(spaces) if (node := self._oldest_orphan_of(tier, space)) is not None]
        return min(found, key=self._tree.last_access.__getitem__, default=None)

    def _oldest_orphan_of(self, tier: Tier, space: int | None) -> int | None:
        queue = self._orphans[tier]
        while (node := queue.peek(space)) is not None:
            accessed = self._tree.last_access[node]
            if accessed <= queue.floor(node):
                return node
            queue.set(node, accessed)
        return None

    def _offer(self, node: int, tier: Tier, value: float, now: float, last_resort: bool = False) -> Victim:
        tree = self._tree
        self._queues[tier].discard(node)
        self._orphans[tier].discard(node)
        until = now + self._offer_again_s
        kind, nbytes = tree.unit_kind[tier][node], tree.unit_bytes[tier][node]
        self._offered[tier][node] = Offer(until, kind, nbytes, last_resort, tree.space[node])
        self._offers[tier].append((until, node))
        if not last_resort:
            self._leaving[tier][tree.space[node]] += 1
        objects = tree.unit_objects(node, tier)
        return Victim(
            namespace=tree.namespaces[tree.space[node]].name,
            tier=tier,
            kind=UnitKind(kind),
            node=node,
            position=tree.position[node],
            value=value,
            nbytes=nbytes,
            backed=bool(tree.unit_backed[tier][node]),
            objects=objects,
            find_stranded=lambda: tree.stranded_by(node, tier, objects),
        )

    def _withdraw(self, node: int, tier: Tier) -> None:
        """`node` is no longer on offer, if it was."""
        offer = self._offered[tier].pop(node, None)
        if offer is not None and not offer.last_resort:
            leaving = self._leaving[tier]
            leaving[offer.space] -= 1
            if not leaving[offer.space]:
                del leaving[offer.space]

    def _take_back(self, tier: Tier, now: float) -> None:
        offers, offered = self._offers[tier], self._offered[tier]
        while offers and offers[0][0] <= now:
            until, node = offers.popleft()
            if node in offered and offered[node].until == until:
                self._withdraw(node, tier)
                self._requeue(node, tier)


def _groups(spaces: Sequence[int] | None) -> Sequence[int | None]:
    """What to ask a queue for: each namespace on its own, or everything at once."""
    return (None,) if spaces is None else spaces
