"""What the run is judged by: what could have been reused, why it was not, and what was evicted too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_histate.replay.results import EvictionCount
from lmcache_histate.replay.simulator.objects import SNAPSHOT, kind_of, kv_key, snapshot_key

Nodes = npt.NDArray[np.int32]


class Causes(NamedTuple):
    """What one request could reuse and why it did not, in blocks. The last three add up to `reusable - hit`."""

    reusable: int
    kv_gone: int
    snapshot_gone: int
    never_saved: int


class Ledger:
    """Counts over a run. Every cache reports what it computed, saved and let go of.

    Args:
        nodes: Blocks of the trace.
        holds: Whether any tier holds the object with this key now.
    """

    def __init__(self, nodes: int, holds: Callable[[int], bool]) -> None:
        self._holds = holds
        self._computed = np.zeros(nodes, dtype=np.uint8)
        self._saved = np.zeros(nodes, dtype=np.uint8)
        self._gone: dict[int, tuple[str, int]] = {}
        self._objects: dict[tuple[str, int], int] = {}
        self._nbytes: dict[tuple[str, int], float] = {}
        self._missed: dict[tuple[str, int], int] = {}

    def computed(self, nodes: Nodes) -> None:
        """The KV of these blocks was computed."""
        self._computed[nodes] = 1
        if self._gone:
            for node in nodes.tolist():
                self._gone.pop(kv_key(node), None)

    def saved(self, node: int) -> None:
        """A snapshot at the end of this block was saved."""
        self._saved[node] = 1
        self._gone.pop(snapshot_key(node), None)

    def left(self, tier: str, key: int, nbytes: float) -> None:
        """A tier let go of an object; it counts as evicted if no other tier holds it. Call it once it is out of the tier."""
        if self._holds(key):
            return
        slot = tier, kind_of(key)
        self._objects[slot] = self._objects.get(slot, 0) + 1
        self._nbytes[slot] = self._nbytes.get(slot, 0.0) + nbytes
        self._gone[key] = slot

    def looked_up(self, path: Nodes, kv: int, hit: int) -> Causes:
        """A request found `kv` blocks of KV and resumes after `hit` blocks of `path`. O(path), vectorised.

        Args:
            path: The blocks that it could resume behind.
            kv: Leading blocks whose KV some tier holds, at least `hit`.
            hit: Blocks that are not computed again.
        """
        seen = self._computed[path]
        reusable = len(path) if seen.all() else int(np.argmin(seen))
        reusable = max(reusable, hit)
        held = min(max(kv, hit), reusable)
        saved = np.flatnonzero(self._saved[path[hit:held]])
        nearest = hit + int(saved[-1]) + 1 if len(saved) else hit
        if nearest > hit:
            self._miss(snapshot_key(int(path[nearest - 1])))
        for node in path[held:reusable].tolist():
            self._miss(kv_key(node))
        return Causes(reusable, reusable - held, nearest - hit, held - nearest)

    def _miss(self, key: int) -> None:
        slot = self._gone.pop(key, None)
        if slot is not None:
            self._missed[slot] = self._missed.get(slot, 0) + 1

    def evictions(self) -> list[EvictionCount]:
        """The counts, by tier and kind."""
        return [
            EvictionCount(
                tier,
                "snapshot" if kind == SNAPSHOT else "kv",
                count,
                self._nbytes[tier, kind],
                self._missed.get((tier, kind), 0),
            )
            for (tier, kind), count in sorted(self._objects.items())
        ]
