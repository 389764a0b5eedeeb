"""The eviction queue of one tier: always the lowest value first, without touching what a hit refreshed.

The queue stores for every unit a *floor*: a value its true one is never below. Refreshing a unit raises its true value
and costs nothing here; the unit's floor is brought up when it comes to the front and is found too low. Only a lowered
value must be reported. Floors live in one array, and the front of the queue is cut from it some thousands at a time:
numpy selects the lowest of a million in a few milliseconds, where a heap of a million tuples costs 100 bytes each and
is slow to rebuild when all values change at once.
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


class FloorQueue:
    """Priority queue over node ids by a floor of their value.

    Equal calls give equal answers; the order among entries of equal floor is arbitrary otherwise.
    """

    __slots__ = ("_floor", "_front", "_horizon", "_present")

    def __init__(self) -> None:
        self._floor = array("d")
        # Every present entry with a floor at or below the horizon is in the heap; stale heap entries are skipped.
        self._front: list[tuple[float, int]] = []
        self._horizon = -ABSENT
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
        if value <= self._horizon and value != ABSENT:
            heappush(self._front, (value, node))
            if len(self._front) > 4 * self._share():
                # Too long to be a front (or mostly stale): cut it again when it is needed.
                self._front = []
                self._horizon = -ABSENT

    def lower(self, node: int, value: float) -> None:
        """Bring the floor of `node` down to `value` if it is higher (or not queued). O(log n) amortised."""
        if value < self._floor[node]:
            self.set(node, value)

    def discard(self, node: int) -> None:
        """Take `node` out, if it is in. O(1)."""
        if self._floor[node] != ABSENT:
            self.set(node, ABSENT)

    def peek(self) -> int | None:
        """The queued node with the lowest floor. O(log n) amortised: one cut serves 1/64 of the queue."""
        while True:
            front = self._front
            while front:
                value, node = front[0]
                if self._floor[node] == value:
                    return node
                heappop(front)
            if not self._present:
                return None
            self._cut()

    def _share(self) -> int:
        return max(MIN_FRONT, self._present // FRONT_SHARE)

    def _cut(self) -> None:
        """Take the lowest floors into the (empty) front."""
        floors = np.frombuffer(self._floor, dtype=np.float64)
        want = self._share()
        horizon = LARGEST if want >= self._present else float(np.partition(floors, want - 1)[want - 1])
        # However many entries share the highest floor, a cut has a bounded number of them; the next one takes more.
        nodes = np.concatenate((np.flatnonzero(floors < horizon), np.flatnonzero(floors == horizon)[:want]))
        values = floors[nodes]
        order = np.argsort(values, kind="stable")
        self._front = list(zip(values[order].tolist(), nodes[order].tolist(), strict=True))
        self._horizon = horizon

    def replace_all(self, values: npt.NDArray[np.float64]) -> None:
        """New floors for all ids at once, infinite where absent; shape (ids,). O(n)."""
        self._floor = array("d")
        self._floor.frombytes(np.ascontiguousarray(values, dtype=np.float64).tobytes())
        self._present = int(np.count_nonzero(values != ABSENT))
        self._front = []
        self._horizon = -ABSENT
