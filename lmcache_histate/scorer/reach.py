"""Expected hits at every restore point, kept current while paths come, grow, fork and go.

For a node, `reach` is the sum over the paths through it of the probability that the path's next hit lands at or after
it; `passed` is the part of it that later restore points serve. The difference is the node's own share: the hits that
would resume exactly there. When a restore point goes, its share falls to the one before it, so an eviction changes two
numbers, and an access model of any shape costs one pass over a path when that path's end or habits change.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lmcache_histate.scorer.access import AccessModel, PathRecord
from lmcache_histate.state_store.tree import NO_NODE
from lmcache_histate.state_store.units import UnitTree

Floats = npt.NDArray[np.float64]


class PathReach:
    """Reaches of all nodes of a tree, and the record of every path.

    A path is a restorable node with no restorable node below it, and has one `PathRecord`. When a path grows its record
    moves on to the new end; when its tail is evicted the record moves back to the restore point before, with its
    logical end unchanged; it is dropped when it would have to share a restore point with other paths.

    `stale_paths` and `stale_nodes` collect what may have lost value since they were last emptied: all restore points on
    the way to a node, or single ones.
    """

    def __init__(self, tree: UnitTree, model: AccessModel) -> None:
        self.records: dict[int, PathRecord] = {}
        self.reach = array("d")
        self.passed = array("d")
        self.stale_paths: set[int] = set()
        self.stale_nodes: set[int] = set()
        # Paths that grew since their reach was last worked out: new end -> (end, record) that is counted now, if any.
        # A turn that saves many snapshots moves its end many times; only the last move is worth a pass over the path.
        self._grown: dict[int, tuple[int, PathRecord] | None] = {}
        self._tree = tree
        self._model = model

    def share(self, node: int) -> float:
        """Expected hits that resume at the restorable `node`. O(1)."""
        return max(0.0, self.reach[node] - self.passed[node])

    # -- told by the tree -----------------------------------------------------------------------------------------

    def grown(self, nodes: int) -> None:
        """There are `nodes` more ids."""
        self.reach.frombytes(bytes(8 * nodes))
        self.passed.frombytes(bytes(8 * nodes))

    def freed(self, node: int) -> None:
        """`node`'s id may be reused."""
        self.stale_paths.discard(node)
        self.stale_nodes.discard(node)

    def entered(self, node: int) -> None:
        """`node` can be resumed from. O(stretch), and O(path) once for all growth of a path until the next question."""
        tree = self._tree
        before = tree.previous_restorable(node)
        if tree.restorable.kids[node]:
            # It takes over the hits between itself and what comes next from the restore point before it.
            following = tree.next_restorable(node)
            self.passed[node] = sum(self.reach[later] for later in following)
            if before != NO_NODE:
                self.passed[before] += self.reach[node] - self.passed[node]
                self.stale_nodes.add(before)
            self.stale_nodes.update(following)
            return
        end = float(tree.position[node])
        record = self.records.pop(before, None)
        if record is None:
            record = PathRecord(end)
            self._grown[node] = None
        else:
            self._grown[node] = self._grown.pop(before) if before in self._grown else (before, replace(record))
            record.end = max(record.end, end)
        self.records[node] = record

    def left(self, node: int) -> None:
        """`node` cannot be resumed from any more. O(path) when a path ends for good, else O(stretch)."""
        tree = self._tree
        before = tree.previous_restorable(node)
        if tree.restorable.kids[node]:
            if before != NO_NODE:
                self.passed[before] += self.passed[node] - self.reach[node]
            self.passed[node] = 0.0
            return
        record = self.records.pop(node)
        share = self.reach[node]
        above = node
        while above != NO_NODE and not tree.restorable.alive(above):
            self.reach[above] = self.passed[above] = 0.0
            above = tree.parent[above]
        if before == NO_NODE and above == NO_NODE:
            return
        if above == before and tree.restorable.kids[before] == 0:
            self.passed[before] = 0.0
            self.records[before] = record
            return
        if before != NO_NODE:
            self.passed[before] -= share
        self._count(above, lost=record)

    # -- told by the policy ---------------------------------------------------------------------------------------

    def path_of(self, node: int) -> int:
        """The end of a path through `node`, or of the one it hangs off; NO_NODE if there is none. O(path).

        Where paths part, the one that was begun last is taken.
        """
        tree = self._tree
        alive = tree.restorable
        while node != NO_NODE and not alive.alive(node):
            node = tree.parent[node]
        if node == NO_NODE:
            return NO_NODE
        while alive.kids[node]:
            if alive.kids[node] == 1:
                node = alive.xor[node]
            else:
                node = next(child for child in tree.children(node) if alive.alive(child))
        return node

    def settle(self) -> None:
        """Count the paths that grew. O(path) each."""
        if not self._grown:
            return
        grown, self._grown = self._grown, {}
        for end, counted in grown.items():
            if counted is not None:
                self._count(counted[0], lost=counted[1])
            self._count(end, self.records[end])

    def update(self, end: int, change: Callable[[PathRecord], None]) -> None:
        """Apply `change` to the record of the path that ends at `end`, and to the reaches along it. O(path)."""
        self.settle()
        record = self.records[end]
        former = replace(record)
        change(record)
        if record != former:
            self._count(end, record, former)

    def rebuild(self) -> int:
        """Work everything out anew from the records, with the access model as it is now.

        O(sum of path lengths); returns that sum, in chunks.
        """
        self._grown.clear()
        self.reach = array("d", bytes(8 * self._tree.capacity))
        self.passed = array("d", bytes(8 * self._tree.capacity))
        chunks = 0
        for end, record in self.records.items():
            chunks += self._count(end, record)
        self.stale_paths.clear()
        return chunks

    def _count(self, node: int, gained: PathRecord | None = None, lost: PathRecord | None = None) -> int:
        """Add one path's reach to all nodes from the root to `node`, take another's away; returns their number."""
        if node == NO_NODE:
            return 0
        tree = self._tree
        nodes = tree.path(node)
        if not len(nodes):
            return 0
        positions = np.frombuffer(tree.position, dtype=np.int32)[nodes].astype(np.float64)
        change: Floats = np.zeros(len(nodes))
        if gained is not None:
            change += self._model.reach(gained, positions)
        if lost is not None:
            change -= self._model.reach(lost, positions)
        np.frombuffer(self.reach, dtype=np.float64)[nodes] += change
        marked = np.frombuffer(tree.restorable.marked, dtype=np.uint8)[nodes] != 0
        points = nodes[marked]
        np.frombuffer(self.passed, dtype=np.float64)[points[:-1]] += change[marked][1:]
        self.stale_paths.add(node)
        return len(nodes)
