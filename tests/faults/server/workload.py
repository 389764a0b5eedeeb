"""What agents do to a cache, at random: turns that append, rewinds into the middle of what was said, forks."""

from __future__ import annotations

import random

from storage import Storage, chunk_hashes

SESSIONS = 48
MAX_CHUNKS = 24
TURN_CHUNKS = 8
REWIND, FORK = 0.3, 0.1
"""How often a turn goes back into the middle of its session, and how often it starts a new branch there."""


class Workload:
    """Turns of many sessions against one storage manager; several may run at once, on threads of their own.

    Every object read back is compared with what its key says it must be (`storage.Storage.lookup`).

    Args:
        storage: The tiers.
        seed: Another one makes other turns in the same sessions.
    """

    def __init__(self, storage: Storage, seed: int) -> None:
        self._storage = storage
        self._random = random.Random(seed)
        self.turns = 0
        self.hits = 0
        """Turns that resumed from something."""

    def turn(self) -> None:
        """One request: look its prompt up and load what is there, then store what is new with a snapshot at its end."""
        rng = self._random
        # Some sessions are much busier than others.
        session = min(int(rng.expovariate(4.0 / SESSIONS)), SESSIONS - 1)
        name, fork = f"s{session}", None
        length = rng.randint(1, MAX_CHUNKS)
        if rng.random() < FORK:
            branch = rng.randrange(4)
            name, fork = f"{name}-{branch}", (name, 2 + 5 * branch)
        path = chunk_hashes(name, length, fork)
        if rng.random() < REWIND:
            path = path[: rng.randint(1, length)]
        hit = self._storage.lookup(path)
        self.hits += hit > 0
        for start in range(hit, len(path), TURN_CHUNKS):
            end = min(start + TURN_CHUNKS, len(path))
            self._storage.store(path, start, end, snapshots=[end - 1])
        self.turns += 1
