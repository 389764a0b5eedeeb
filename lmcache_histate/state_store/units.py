"""Units of eviction: what goes together, in each tier that can run short.

Within one tier, the objects of the tree fall into

- *snapshots*: one restorable node whose KV, or later KV of the same path, is still in the tier. It goes alone.
- *bundles*: where the KV in the tier ends. The chunks from there up to the previous restorable node, or to the fork
  where another path shares them, with the snapshot at their end. After it went, the stretch before it is the next
  bundle, so a cold session unravels from its tail.
- *orphans*: bytes from which nothing can be restored (yet): KV with no snapshot after it, a snapshot whose KV is not
  whole, one rank without its siblings. They wait a while for what is missing, last in line, and then go first; deepest first.

At most one unit is anchored at a node, per tier. KV that several paths share, and KV before an intermediate snapshot,
is in no unit until what depends on it has left the tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

from lmcache_histate.state_store.columns import KINDS, TIER_LIST
from lmcache_histate.state_store.frontier import Frontier
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE, PrefixTree

MANAGED = (Tier.CPU, Tier.DISK)
"""Tiers that are evicted from here; copies further away only make a loss cheaper."""


class UnitKind(IntEnum):
    """What is anchored at a node in one tier."""

    NONE = 0
    SNAPSHOT = 1
    BUNDLE = 2
    ORPHAN = 3


# Reading a member off an enum class costs more than the comparisons it is read for.
NONE, SNAPSHOT, BUNDLE, ORPHAN = UnitKind


class RestorableWatcher(Protocol):
    """Told when restore points come and go, after the tree has changed and before units are settled."""

    def rearranging(self) -> None:
        """Restore points are about to change in another way than a path growing: the last moment to see them as told."""

    def entered(self, node: int) -> None:
        """`node` can be resumed from."""

    def left(self, node: int) -> None:
        """`node` cannot be resumed from any more."""

    def freed(self, node: int) -> None:
        """`node`'s id may be reused."""

    def grown(self, nodes: int) -> None:
        """There are `nodes` more ids."""


class UnitTree(PrefixTree):
    """A prefix tree that keeps the units of every managed tier.

    Events only note which nodes they touched; `settle` works out the consequences once, before the next question.
    Columns `unit_kind`, `unit_bytes` and `unit_backed` are per managed tier and indexed by node.
    """

    def __init__(self, pending_s: float = 60.0) -> None:
        super().__init__(pending_s)
        self.kv_in_tier = [Frontier(self.parent) for _ in MANAGED]
        self.unit_kind = [bytearray() for _ in MANAGED]
        self.unit_backed = [bytearray() for _ in MANAGED]
        """1 where every object of the unit that a hit needs has a copy in another tier."""
        self.unit_bytes = [array("Q") for _ in MANAGED]
        self.watcher: RestorableWatcher | None = None
        self._dirty: set[int] = set()
        self._held = [False for _ in MANAGED]

    # -- hooks of the tree ----------------------------------------------------------------------------------------

    def _grow(self, nodes: int) -> None:
        super()._grow(nodes)
        for tier in MANAGED:
            self.kv_in_tier[tier].grow(nodes)
            self.unit_kind[tier].extend(bytes(nodes))
            self.unit_backed[tier].extend(bytes(nodes))
            self.unit_bytes[tier].frombytes(bytes(8 * nodes))
        if self.watcher is not None:
            self.watcher.grown(nodes)

    def _changed(self, node: int) -> None:
        self._dirty.add(node)

    def _kv_in(self, node: int, tier: int) -> None:
        if tier < len(MANAGED):
            self._note_run(self.kv_in_tier[tier].mark(node), tier)

    def _kv_out(self, node: int, tier: int) -> None:
        if tier < len(MANAGED):
            self._note_run(self.kv_in_tier[tier].unmark(node), tier)

    def _attached(self, node: int) -> None:
        for tier in MANAGED:
            if self.kv_in_tier[tier].alive(node):
                self._note_run(self.kv_in_tier[tier].link(node), tier)

    def _note_run(self, node: int, tier: int) -> None:
        """A branch below `node` came or went: `node` may be an end now, or a fork that cuts another branch's bundle."""
        if node == NO_NODE:
            return
        self._dirty.add(node)
        if self.kv_in_tier[tier].kids[node] == 2:
            # It was one branch until now (or two are left of three, which changes nothing): both may be shorter.
            self._dirty.update(child for child in self.children(node) if self.kv_in_tier[tier].alive(child))

    def _note_restorable(self, node: int) -> None:
        """`node` came or went: its own unit, the stretch before it, and who owns KV below a fork that came or went."""
        self._dirty.add(node)
        marked, kids = self.restorable.marked, self.restorable.kids
        if kids[node]:
            return  # The chunks before it lead to restorable ones with or without it.
        above = self.parent[node]
        while above != NO_NODE:
            self._dirty.add(above)
            if marked[above] or kids[above] > 1:
                break
            above = self.parent[above]

    def _rearranging(self) -> None:
        if self.watcher is not None:
            self.watcher.rearranging()

    def _entered(self, node: int) -> None:
        self._note_restorable(node)
        if self.watcher is not None:
            self.watcher.entered(node)

    def _left(self, node: int) -> None:
        self._note_restorable(node)
        if self.watcher is not None:
            self.watcher.left(node)

    def _released(self, node: int) -> None:
        self._dirty.add(node)
        if self.watcher is not None:
            self.watcher.freed(node)

    # -- units ----------------------------------------------------------------------------------------------------

    def settle(self) -> list[tuple[int, Tier]]:
        """Bring the units up to date with the events since the last call; return those that may have changed.

        O(chunks touched + stretches they belong to), amortised over the events.
        """
        if not self._dirty:
            return []
        changed = []
        dirty, self._dirty = self._dirty, set()
        for tier in MANAGED:
            held, self._held[tier] = self._held[tier], self.tier_bytes[tier] > 0
            if not held and not self._held[tier]:
                continue
            anchors = set(dirty)
            passed: set[int] = set()
            for node in dirty:
                anchors.add(self._owner(node, tier, passed))
            for node in sorted(anchors):
                if self._measure(node, tier):
                    changed.append((node, tier))
        return changed

    def _owner(self, node: int, tier: int, passed: set[int]) -> int:
        """The node below `node` where the bundle of its chunk would be anchored. `passed` saves walking twice."""
        frontier, marked = self.kv_in_tier[tier], self.restorable.marked
        kids, xor = frontier.kids, frontier.xor
        first = True
        while kids[node] == 1 and (first or not marked[node]) and node not in passed:
            passed.add(node)
            node = xor[node]
            first = False
        return node

    def useful(self, node: int) -> bool:
        """Whether a hit can use the KV of `node`: the prefix is whole and it leads to a restorable node. O(1)."""
        return self._whole[node] != 0 and self.restorable.alive(node)

    def _classify(self, node: int, tier: Tier) -> UnitKind:
        frontier = self.kv_in_tier[tier]
        if frontier.marked[node] and not frontier.kids[node]:
            return BUNDLE if self.useful(node) else ORPHAN
        if self._columns.ranks(node, Kind.SNAPSHOT, tier):
            return SNAPSHOT if self.restorable.marked[node] else ORPHAN
        return NONE

    def _measure(self, node: int, tier: Tier) -> bool:
        """Work out the unit at `node`; whether there was or is one."""
        kind = self._classify(node, tier)
        if kind is NONE and not self.unit_kind[tier][node]:
            return False
        nbytes, backed = 0, kind is SNAPSHOT or kind is BUNDLE
        if kind:
            nbytes = self.size(node, Kind.SNAPSHOT, tier)
            if nbytes and self.restorable.marked[node]:
                backed = self.complete_outside(node, Kind.SNAPSHOT, tier)
        if kind is BUNDLE or kind is ORPHAN:
            for chunk in self._run(node, tier, kind):
                own = self.size(chunk, Kind.KV, tier)
                nbytes += own
                backed = backed and (not own or self.complete_outside(chunk, Kind.KV, tier))
        self.unit_kind[tier][node] = kind
        self.unit_bytes[tier][node] = nbytes
        self.unit_backed[tier][node] = backed and kind is not ORPHAN
        return True

    def _run(self, node: int, tier: Tier, kind: UnitKind) -> Iterator[int]:
        """Chunks whose KV is in the unit anchored at `node`, deepest first."""
        if kind is ORPHAN:
            if self.kv_in_tier[tier].is_end(node):
                yield node
            return
        kids, marked = self.kv_in_tier[tier].kids, self.restorable.marked
        paths = self.restorable.kids
        yield node
        node = self.parent[node]
        while self.parent[node] != NO_NODE and not marked[node] and kids[node] < 2 and paths[node] < 2:
            yield node
            node = self.parent[node]

    def previous_restorable(self, node: int) -> int:
        """The nearest restorable node above `node`, NO_NODE if a hit would start from nothing. O(stretch)."""
        marked, parents = self.restorable.marked, self.parent
        node = parents[node]
        while node != NO_NODE and not marked[node]:
            node = parents[node]
        return node

    def next_restorable(self, node: int) -> list[int]:
        """The restorable nodes below `node` with none in between. O(chunks in between)."""
        found, todo = [], [node]
        while todo:
            for child in self.children(todo.pop()):
                if self.restorable.marked[child]:
                    found.append(child)
                elif self.restorable.kids[child]:
                    todo.append(child)
        return found

    def unit_objects(self, node: int, tier: Tier) -> list[CacheObject]:
        """The objects of the unit anchored at `node` in its tier, deepest chunk first. O(what is listed)."""
        objects = self.objects(node, Kind.SNAPSHOT, tier)
        for chunk in self._unit_chunks(node, tier):
            objects.extend(self.objects(chunk, Kind.KV, tier))
        return objects

    def _unit_chunks(self, node: int, tier: Tier) -> list[int]:
        kind = UnitKind(self.unit_kind[tier][node])
        return list(self._run(node, tier, kind)) if kind is BUNDLE or kind is ORPHAN else []

    def stranded_by(self, node: int, tier: Tier, objects: list[CacheObject]) -> list[CacheObject]:
        """Objects in any tier that nothing could be restored from if the unit's `objects` were deleted.

        Empty if all of them have copies. O(what is listed + one stretch).
        """
        kind = self.unit_kind[tier][node]
        if kind in (NONE, ORPHAN) or self.unit_backed[tier][node]:
            return []
        stranded: list[CacheObject] = []
        lost = [chunk for chunk in self._unit_chunks(node, tier) if self.size(chunk, Kind.KV, tier)]
        lost = [chunk for chunk in lost if not self.complete_outside(chunk, Kind.KV, tier)]
        if lost:
            top = lost[-1]
            for below in self.subtree(top):
                # All KV below `top` in this tier is the unit's own, and so is its anchor's snapshot.
                own = (Kind.KV, Kind.SNAPSHOT) if below == node else (Kind.KV,)
                stranded.extend(self._without(below, tier, own))
            above, alone = self.parent[top], True
        else:
            for other in (other for other in Tier if other != tier):
                stranded.extend(self.objects(node, Kind.SNAPSHOT, other))
            above, alone = node, self.restorable.kids[node] == 0
        if alone:
            taken = set(objects)
            useless = self._useless_above(above, skip_first_mark=not lost)
            stranded.extend(obj for obj in useless if obj not in taken)
        return stranded

    def _useless_above(self, node: int, skip_first_mark: bool) -> Iterator[CacheObject]:
        """KV of `node` and upwards that served only the branch that goes."""
        marked, kids = self.restorable.marked, self.restorable.kids
        while self.parent[node] != NO_NODE and (skip_first_mark or not marked[node]) and kids[node] < 2:
            for tier in Tier:
                yield from self.objects(node, Kind.KV, tier)
            skip_first_mark = False
            node = self.parent[node]

    def _without(self, node: int, tier: Tier, own: tuple[Kind, ...]) -> list[CacheObject]:
        """The objects of `node`, without those of the kinds `own` that are in `tier`."""
        return [
            obj
            for kind in KINDS
            for where in TIER_LIST
            if (where != tier or kind not in own) and self._columns.nbytes(node, kind, where)
            for obj in self.objects(node, kind, where)
        ]
