"""tau that tunes itself: shadows of the same cache, at several tau, on a sample of the sessions.

Which tau is best depends on the workload and on the capacity: on agent traces tau = 600 s recomputes 5% less than
plain LRU where a cache holds the working set, and a third more where it holds a few sessions (docs/model.md). So the
same policy runs on a sample of the sessions with its capacity scaled down by the same factor, once for each candidate,
plain LRU (tau 0) among them. The candidate that recomputes least becomes the live one. Sampling whole sessions by hash
keeps what matters about a session together (spatially hashed sampling, cf. SHARDS, Waldspurger et al., FAST '15).

Cost: a sampled turn costs each shadow as much as it costs the real policy (a look-up, the new chunks, their evictions).
No request pays for it: turns wait, and are replayed one candidate at a time whenever the caller has time for `step`.
Sampling gets sparser, by halves and for good, when a shadow holds more than `max_chunks` chunks (some 500 bytes each) or
there are more than `MAX_TURNS_PER_SECOND`. A change of the live value re-prices the real cache, O(n), at most once in
`CHECK_TURNS` sampled turns; since n is about `max_chunks / rate`, that is bounded by a constant for each real turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.state_store.objects import Tier

CLASSES = 256
"""Sampling classes of paths: the values of a lineage byte."""
MEMORY_TURNS = 512
"""Sampled turns after which an old one weighs 1/e."""
CHECK_TURNS = 32
"""Sampled turns between two looks at the candidates."""
MARGIN = 0.01
"""A candidate must recompute this much less (relative) than the live value: each change re-prices the whole cache."""
ERRORS = 2.0
"""How many standard errors of the sample it must be, so that one lucky session does not decide."""
MAX_TURNS_PER_SECOND = 4.0
"""Sampled turns a second, over the memory, that may be replayed on all shadows."""
MAX_WAITING = 64
"""Turns that may wait to be replayed. What comes while so many wait is left out of the sample, for all candidates alike."""
LRU = 0
"""Index of plain LRU among the candidates, which are sorted."""


class Turn(NamedTuple):
    """One request, as the shadows are shown it."""

    lineage: int
    """Sampling class of its path, 0 to 255."""
    namespace: str
    """Where the path belongs."""
    hashes: Sequence[bytes]
    """The whole path."""
    tokens: int
    """Its length."""
    now: float
    """Seconds."""


class Shadow(Protocol):
    """One small cache that runs a candidate."""

    @property
    def chunks(self) -> int:
        """Chunks that it holds."""

    def add_namespace(self, name: str, geometry: CacheGeometry) -> None:
        """Register a namespace."""

    def turn(
        self, namespace: str, hashes: Sequence[bytes], tokens: int, capacities: Mapping[Tier, float], now: float
    ) -> float:
        """Serve one turn that ends at `tokens`, keep every tier within its bytes; return the work it recomputed."""


class TauTuner:
    """Feeds the shadows and says which tau should be live.

    A candidate's estimate is what it recomputed over the recent sampled turns. The live value stays until another
    candidate recomputed less, by `MARGIN` and by `ERRORS` sampling errors, and becomes plain LRU once it no longer
    recomputes less than that. While every session is sampled there is no sampling error, so the live value is what was
    best lately.

    The sampling error of a difference is that of its sum over whole sessions, since the turns of one session are alike.

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
        self.classes = CLASSES
        """A path is sampled when its lineage byte is below this; the sampling rate is `classes / CLASSES`."""
        self._shadows = [shadow(tau) for tau in self.taus]
        self._max_chunks = max_chunks
        # Decayed work of each candidate on each class's turns.
        self._work = np.zeros((CLASSES, len(self.taus)))
        self._waiting: deque[Turn] = deque()
        self._replayed: list[float] = []
        """Work of the first waiting turn on the candidates that it was replayed on."""
        self._turns = 0
        self._counted_from: float | None = None

    @property
    def rate(self) -> float:
        """Share of the sessions that is sampled."""
        return self.classes / CLASSES

    @property
    def work(self) -> dict[float, float]:
        """Recomputed work of every candidate, in token equivalents, over the recent sampled turns."""
        return dict(zip(self.taus, self._work.sum(axis=0).tolist(), strict=True))

    def add_namespace(self, name: str, geometry: CacheGeometry) -> None:
        """Register a namespace with every shadow."""
        for shadow in self._shadows:
            shadow.add_namespace(name, geometry)

    @property
    def waiting(self) -> int:
        """Turns that were not replayed on every candidate yet."""
        return len(self._waiting)

    def offer(self, turn: Turn) -> None:
        """A request came. It is replayed later if it is in the sample. O(1)."""
        if turn.lineage < self.classes and len(self._waiting) < MAX_WAITING:
            self._waiting.append(turn)

    def step(self, capacities: Mapping[Tier, float]) -> float | None:
        """Replay the turn that waits longest on the next candidate. O(path + objects evicted).

        Args:
            capacities: bytes of the real cache's tiers.

        Returns:
            The tau that should be live from now on if that changed, else None.

        Raises:
            IndexError: nothing waits.
        """
        turn = self._waiting[0]
        if turn.lineage >= self.classes:
            self._waiting.popleft()
            return None
        scaled = {tier: nbytes * self.rate for tier, nbytes in capacities.items()}
        shadow = self._shadows[len(self._replayed)]
        self._replayed.append(shadow.turn(turn.namespace, turn.hashes, turn.tokens, scaled, turn.now))
        if len(self._replayed) < len(self._shadows):
            return None
        self._waiting.popleft()
        self._work *= 1.0 - 1.0 / MEMORY_TURNS
        self._work[turn.lineage] += self._replayed
        self._replayed = []
        self._turns += 1
        if self.classes > 1 and (self._too_often(turn.now) or max(s.chunks for s in self._shadows) > self._max_chunks):
            # Half of the sessions and half of the capacity: those no longer sampled are not hit and go by themselves.
            self.classes //= 2
        return self._choose() if self._turns % CHECK_TURNS == 0 else None

    def _too_often(self, now: float) -> bool:
        """Whether the memory was filled faster than the shadows may be fed; looked at once for each filling."""
        if self._counted_from is None:
            self._counted_from = now
        if self._turns % MEMORY_TURNS:
            return False
        seconds, self._counted_from = now - self._counted_from, now
        return seconds * MAX_TURNS_PER_SECOND < MEMORY_TURNS

    def _choose(self) -> float | None:
        work = self._work.sum(axis=0)
        live = self.taus.index(self.live)
        best = int(np.argmin(work))
        gain = work[live] - work[best]
        if gain > max(MARGIN * work[live], ERRORS * self._sampling_error(live, best)):
            chosen = best
        elif work[live] > work[LRU]:
            chosen = LRU
        else:
            return None
        self.live = self.taus[chosen]
        return self.live

    def _sampling_error(self, one: int, other: int) -> float:
        """One standard error of the difference in work between two candidates, from having seen a sample only.

        Sampling classes stand for sessions; the share of them that was not seen is what is uncertain.
        """
        differences = self._work[:, one] - self._work[:, other]
        return math.sqrt((1.0 - self.rate) * float(differences @ differences))
