"""The eviction queue of one tier: always the lowest value first, without touching what a hit refreshed.

The queue stores for every unit a *floor*: a value its true one is never below. Refreshing a unit raises its true value
and costs nothing here; the unit's floor is brought up when it comes to the front and is found too low. Only a lowered
value must be reported. Floors live in one array, and the front of the queue is cut from it some thousands at a time:
numpy selects the lowest of a million in a few milliseconds, where a heap of a million tuples costs 100 bytes each and
is slow to rebuild when all values change at once.

Units belong to *groups* (namespaces), and the lowest of one group can be asked for as well: its front is cut from the
same array, and exists only for groups that were asked for since all values last changed.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

ABSENT = float("inf")
LARGEST = float(np.finfo(np.float64).max)
MIN_FRONT = 64
FRONT_SHARE = 64


class _Front:
    """The lowest entries of a queue, or of one group in it, as a heap.

    Every present entry with a floor at or below `horizon` is in `heap`; stale entries of the heap are skipped.
    """

    __slots__ = ("heap", "horizon", "share")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is known: the next question cuts the front anew."""
        self.heap: list[tuple[float, int]] = []
        self.horizon = -ABSENT
        self.share = MIN_FRONT

    def push(self, value: float, node: int) -> None:
        """An entry got the floor `value`. O(log front)."""
        if value > self.horizon:
            return
        heappush(self.heap, (value, node))
        if len(self.heap) > 4 * self.share:
            self.clear()  # too long to be a front, or mostly stale


class FloorQueue:
    """Priority queue over node ids by a floor of their value.

    Equal calls give equal answers; the order among entries of equal floor is arbitrary otherwise.

    Args:
        groups: the group of every id, kept by the caller; shape (ids,). Without it all ids are one group.
    """

    __slots__ = ("_floor", "_front", "_group_fronts", "_groups", "_present")

    def __init__(self, groups: array[int] | None = None) -> None:
        self._floor = array("d")
        self._groups = groups
        self._front = _Front()
        self._group_fronts: dict[int, _Front] = {}
        self._present = 0

    def __len__(self) -> int:
        """Units queued."""
        return self._present

    def grow(self, nodes: int) -> None:
        """Make room for `nodes` more ids."""
        self._floor.frombytes(np.full(nodes, ABSENT).tobytes())

    def floor(self, node: int) -> float:
        """The floor of `node`, infinite when it is not queued. O(1)."""
        return self._floor[node]

    def floors(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """`floor` of many nodes."""
        return np.frombuffer(self._floor, dtype=np.float64)[nodes]

    def set(self, node: int, value: float) -> None:
        """Queue `node` with a floor of `value`, replacing its former one. O(log n) amortised."""
        before = self._floor[node]
        if before == value:
            return
        self._present += (value != ABSENT) - (before != ABSENT)
        self._floor[node] = value
        if value == ABSENT:
            return
        self._front.push(value, node)
        if self._group_fronts and self._groups is not None:
            front = self._group_fronts.get(self._groups[node])
            if front is not None:
                front.push(value, node)

    def lower(self, node: int, value: float) -> None:
        """Bring the floor of `node` down to `value` if it is higher (or not queued). O(log n) amortised."""
        if value < self._floor[node]:
            self.set(node, value)

    def discard(self, node: int) -> None:
        """Take `node` out, if it is in. O(1)."""
        if self._floor[node] != ABSENT:
            self.set(node, ABSENT)

    def peek(self, group: int | None = None) -> int | None:
        """The queued node with the lowest floor, of one group if it is named; None if there is none.

        O(log n) amortised: one cut, O(ids), serves 1/64 of the queue, or of the group but at least 64 of it.
        """
        if group is None:
            front = self._front
        else:
            front = self._group_fronts.get(group) or self._group_fronts.setdefault(group, _Front())
        groups = self._groups
        while True:
            heap = front.heap
            while heap:
                value, node = heap[0]
                # An id may have been freed and now belong to another group.
                if self._floor[node] == value and (group is None or groups is None or groups[node] == group):
                    return node
                heappop(heap)
            if not self._present or front.horizon == LARGEST:
                return None
            self._cut(front, group)

    def _cut(self, front: _Front, group: int | None) -> None:
        """Take the lowest floors into the (empty) `front`."""
        floors = np.frombuffer(self._floor, dtype=np.float64)
        ids = None
        if group is not None and self._groups is not None:
            ids = np.flatnonzero(np.frombuffer(self._groups, dtype=np.uint32) == group)
            floors = floors[ids]
        present = self._present if ids is None else int(np.count_nonzero(floors != ABSENT))
        front.share = max(MIN_FRONT, present // FRONT_SHARE)
        want = front.share
        horizon = LARGEST if want >= present else float(np.partition(floors, want - 1)[want - 1])
        # However many entries share the highest floor, a cut has a bounded number of them; the next one takes more.
        nodes = np.concatenate((np.flatnonzero(floors < horizon), np.flatnonzero(floors == horizon)[:want]))
        values = floors[nodes]
        order = np.argsort(values, kind="stable")
        named = nodes if ids is None else ids[nodes]
        front.heap = list(zip(values[order].tolist(), named[order].tolist(), strict=True))
        front.horizon = horizon

    def replace_all(self, values: npt.NDArray[np.float64]) -> None:
        """New floors for all ids at once, infinite where absent; shape (ids,). O(n)."""
        self._floor = array("d")
        self._floor.frombytes(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        self._present = int(np.count_nonzero(values != ABSENT))
        self._front.clear()
        self._group_fronts.clear()
