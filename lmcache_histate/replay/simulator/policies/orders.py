"""Other orders over HiState's units: Greedy-Dual-Size-Frequency and S3-FIFO.

Each replaces the `EvictionOrder` of a `CachePolicy`; what exists, what belongs together and what a loss strands stay the
same. The base class keeps the queues, orphans and offers; a subclass adds the value of a unit, which may rise silently but
must never fall without its node being reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lmcache_histate.scorer.eviction import EvictionOrder, Victim
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import Tier
from lmcache_histate.state_store.tree import NO_NODE
from lmcache_histate.state_store.units import MANAGED, UnitKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class UnitOrder(EvictionOrder):
    """An order whose value of a unit is `value` alone. Subclasses define `value`."""

    def __init__(self, policy: CachePolicy) -> None:
        settings = policy.settings
        super().__init__(policy.tree, policy.reach, policy.cost, 0.0, settings.orphan_s, settings.offer_again_s)
        self.tree = policy.tree

    def start_of(self, node: int) -> int:
        """Tokens up to the restore point before `node`: what is recomputed from if it goes. O(stretch)."""
        before = self.tree.previous_restorable(node)
        return self.tree.position[before] if before != NO_NODE else 0

    def freed_tokens(self, node: int, tier: Tier) -> float:
        """What evicting the unit frees, in tokens of KV. O(1)."""
        return max(self.tree.unit_bytes[tier][node] / self.tree.kv_bytes_per_token[self.tree.space[node]], 1e-9)

    def used(self, nodes: Sequence[int], now: float) -> None:
        """A hit read the KV of these nodes and resumed from the last. Called before their last access is set."""

    def _values(self, nodes: Ints, tier: Tier, start: Floats) -> Floats:
        return np.array([self.value(node, tier) for node in nodes.tolist()], dtype=np.float64)

    def _lower_path(self, end: int) -> None:
        """No value depends on how likely hits are."""


class OrderedPolicy(CachePolicy):
    """A `CachePolicy` with another order; captures, tiers and units are as ever.

    Args:
        settings: `eviction` must be `"lru"`, so that nothing tunes tau.
        order: Makes the order.
    """

    order: UnitOrder

    def __init__(self, settings: PolicySettings, order: Callable[[CachePolicy], UnitOrder]) -> None:
        super().__init__(settings)
        self.order = order(self)
        self.tree.watcher = self.order

    def hit(self, namespace: str, hashes: Sequence[bytes], matched: int, resumed: int, now: float) -> None:
        """As ever; the order learns what was used. O(path)."""
        space = self.space(namespace)
        self.order.used(self.tree.match(space, hashes[: resumed // space.geometry.block_tokens]).nodes, now)
        super().hit(namespace, hashes, matched, resumed, now)


class GdsfOrder(UnitOrder):
    """Greedy-Dual-Size-Frequency (Cherkasova, 1998): lowest L + frequency * cost / size.

    Cost is the tokens recomputed without the unit, size what it frees in tokens of KV. L, the clock, is the value of the
    last victim; a unit takes the clock of its last use.
    """

    def __init__(self, policy: CachePolicy) -> None:
        super().__init__(policy)
        self.clock = 0.0
        self._uses: dict[int, tuple[int, float]] = {}

    def value(self, node: int, tier: Tier) -> float:
        """L at the last use + frequency * cost / size."""
        if node not in self._uses:
            self._uses[node] = (1, self.clock)
        count, clock = self._uses[node]
        cost = self.tree.position[node] - self.start_of(node)
        return clock + count * cost / self.freed_tokens(node, tier)

    def used(self, nodes: Sequence[int], now: float) -> None:
        """One more use, besides that of coming in, at the clock as it is. O(nodes)."""
        uses, clock = self._uses, self.clock
        for node in nodes:
            uses[node] = (uses.get(node, (1, 0.0))[0] + 1, clock)

    def freed(self, node: int) -> None:
        """Its history goes with it."""
        super().freed(node)
        self._uses.pop(node, None)

    def next_victim(self, tier: Tier, now: float, spaces: Sequence[int] | None = None) -> Victim | None:
        """The lowest value; the clock follows it."""
        victim = super().next_victim(tier, now, spaces)
        if victim is not None and victim.kind != UnitKind.ORPHAN:
            self.clock = max(self.clock, victim.value)
        return victim


class S3FifoOrder(UnitOrder):
    """S3-FIFO (Yang et al., SOSP '23) over units, in bytes.

    New units enter a small queue of a tenth of the bytes, or the main one if the ghost queue remembers them. From the small
    queue, what was used more than once moves to the main queue and the rest goes and is remembered; in the main queue what
    was used goes round again with one use less.
    """

    SMALL = 0.1
    MOST_USES = 3

    def __init__(self, policy: CachePolicy) -> None:
        super().__init__(policy)
        self._small: list[OrderedDict[int, int]] = [OrderedDict() for _ in MANAGED]
        self._main: list[OrderedDict[int, int]] = [OrderedDict() for _ in MANAGED]
        self._bytes = [[0, 0] for _ in MANAGED]
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def value(self, node: int, tier: Tier) -> float:
        """Queues decide, not values."""
        return 0.0

    def used(self, nodes: Sequence[int], now: float) -> None:
        """One more use, up to three. O(nodes)."""
        for node in nodes:
            self._uses[node] = min(self._uses.get(node, 0) + 1, self.MOST_USES)

    def freed(self, node: int) -> None:
        """Out of all queues but the ghost's."""
        super().freed(node)
        self._uses.pop(node, None)
        for tier in MANAGED:
            self._out(node, tier)

    def _out(self, node: int, tier: Tier) -> None:
        for number, queue in enumerate((self._small[tier], self._main[tier])):
            nbytes = queue.pop(node, None)
            if nbytes is not None:
                self._bytes[tier][number] -= nbytes

    def _requeue(self, node: int, tier: Tier, priced: bool = True) -> None:
        super()._requeue(node, tier, priced=False)
        kind = self.tree.unit_kind[tier][node]
        if kind in (UnitKind.NONE, UnitKind.ORPHAN) or self.is_offered(node, tier):
            self._out(node, tier)
            return
        nbytes = self.tree.unit_bytes[tier][node]
        for number, queue in enumerate((self._small[tier], self._main[tier])):
            if node in queue:
                self._bytes[tier][number] += nbytes - queue[node]
                queue[node] = nbytes
                return
        number = 1 if self._ghost.pop(self.tree.hashes[node], True) is None else 0
        (self._small, self._main)[number][tier][node] = nbytes
        self._bytes[tier][number] += nbytes

    def _reprice_queues(self) -> None:
        """Nothing has a price."""

    def _lowest_of(self, tier: Tier, space: int | None) -> tuple[int, float] | None:
        small, main, sizes = self._small[tier], self._main[tier], self._bytes[tier]
        while small or main:
            if small and (not main or sizes[0] >= self.SMALL * sum(sizes)):
                node, nbytes = next(iter(small.items()))
                if self._uses.get(node, 0) <= 1:
                    return node, 0.0
                del small[node]
                main[node] = nbytes
                sizes[0] -= nbytes
                sizes[1] += nbytes
                self._uses[node] = 0
                continue
            node = next(iter(main))
            if not self._uses.get(node, 0):
                return node, 0.0
            self._uses[node] -= 1
            main.move_to_end(node)
        return None

    def _offer(self, node: int, tier: Tier, value: float, now: float, last_resort: bool = False) -> Victim:
        if node in self._small[tier]:
            self._ghost[self.tree.hashes[node]] = None
            while len(self._ghost) > len(self._small[tier]) + len(self._main[tier]):
                self._ghost.popitem(last=False)
        self._out(node, tier)
        return super()._offer(node, tier, value, now, last_resort)


class S3FifoPolicy(OrderedPolicy):
    """S3-FIFO in each tier; what leaves the upper one moves down."""

    def worth_moving(self, victim: Victim, to: Tier, free_bytes: float) -> bool:
        """Always, but for orphans and what has a copy."""
        return not victim.backed and victim.kind != UnitKind.ORPHAN
