"""tau that tunes itself: shadows of the same cache, at several tau, on a sample of the sessions.

Which tau is best depends on the workload and on the capacity: on one set of agent traces 60 s lost to plain LRU where 600 s
won. So the same policy runs on a sample of the sessions with its capacity scaled down by the same factor, once for each
candidate, plain LRU (tau 0) among them. The candidate that recomputes least becomes the live one. Sampling whole sessions by
hash keeps what matters about a session together (spatially hashed sampling, cf. SHARDS, Waldspurger et al., FAST '15).

Cost: a sampled turn costs each shadow as much as it costs the real policy (a look-up, the new chunks, their evictions);
a shadow holds at most `max_chunks` chunks (some 500 bytes each), since sampling gets sparser when it is full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from lmcache_histate.geometry import CacheGeometry

MEMORY_TURNS = 1024.0
CHECK_TURNS = 32
MARGIN = 0.01
"""A candidate must recompute this much less (relative) than the live value before it takes over."""


class Shadow(Protocol):
    """One small cache that runs a candidate."""

    @property
    def chunks(self) -> int:
        """Chunks that it holds."""

    def add_namespace(self, name: str, geometry: CacheGeometry) -> None:
        """Register a namespace."""

    def turn(self, namespace: str, hashes: Sequence[bytes], tokens: int, capacity: float, now: float) -> float:
        """Serve one turn that ends at `tokens` and keep within `capacity` bytes; return the work recomputed."""


class TauTuner:
    """Feeds the shadows and says which tau should be live.

    The estimate of each candidate is its recomputed work over the last thousand sampled turns. The live value changes
    when another is better by `MARGIN` and by one standard error of the paired difference: what differs less than that is
    noise of the sample, and each change re-prices the whole cache.

    Args:
        taus: candidates, in seconds.
        live: the value to start with.
        shadow: makes a shadow for a candidate.
        max_chunks: chunks a shadow may hold.
    """

    def __init__(
        self, taus: Sequence[float], live: float, shadow: Callable[[float], Shadow], max_chunks: int = 16_384
    ) -> None:
        self.taus = tuple(sorted({*taus, 0.0, live}))
        self.live = live
        self.classes = 256
        """A path is sampled when its lineage byte is below this; the sampling rate is `classes / 256`."""
        self._shadows = [shadow(tau) for tau in self.taus]
        self._max_chunks = max_chunks
        size = len(self.taus)
        # Decayed sums over sampled turns: work of each candidate, and for each pair the squared difference.
        self._work = [0.0] * size
        self._spread = [[0.0] * size for _ in range(size)]
        self._turns = 0

    @property
    def rate(self) -> float:
        """Share of the sessions that is sampled."""
        return self.classes / 256.0

    @property
    def work(self) -> dict[float, float]:
        """Recomputed work of every candidate, in token equivalents, over the recent sampled turns."""
        return dict(zip(self.taus, self._work, strict=True))

    def add_namespace(self, name: str, geometry: CacheGeometry) -> None:
        """Register a namespace with every shadow."""
        for shadow in self._shadows:
            shadow.add_namespace(name, geometry)

    def turn(
        self, lineage: int, namespace: str, hashes: Sequence[bytes], tokens: int, capacity: float, now: float
    ) -> float | None:
        """A turn ended; returns the tau that should be live from now on if that changed, else None.

        Args:
            lineage: sampling class of the path, 0 to 255.
            hashes: the whole path of the turn.
            tokens: its length.
            capacity: bytes of the real cache.
            now: seconds.
        """
        if lineage >= self.classes:
            return None
        scaled = capacity * self.rate
        work = [shadow.turn(namespace, hashes, tokens, scaled, now) for shadow in self._shadows]
        keep = 1.0 - 1.0 / MEMORY_TURNS
        for i, mine in enumerate(work):
            self._work[i] = self._work[i] * keep + mine
            row = self._spread[i]
            for j, other in enumerate(work):
                row[j] = row[j] * keep + (mine - other) ** 2
        self._turns += 1
        if self.classes > 1 and max(shadow.chunks for shadow in self._shadows) > self._max_chunks:
            # Half of the sessions and half of the capacity: those no longer sampled are not hit and go by themselves.
            self.classes //= 2
        return self._choose() if self._turns % CHECK_TURNS == 0 else None

    def _choose(self) -> float | None:
        live = self.taus.index(self.live)
        best = min(range(len(self.taus)), key=lambda i: (self._work[i], i != live))
        gain = self._work[live] - self._work[best]
        if gain <= MARGIN * self._work[live] or gain <= math.sqrt(self._spread[live][best]):
            return None
        self.live = self.taus[best]
        return self.live
