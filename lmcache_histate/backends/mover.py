"""Writes objects from CPU memory to the disk tier and lets CPU memory go of them once they are safe there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.error import L1Error

from lmcache_histate.backends.compat import StorageParts
from lmcache_histate.backends.disk.adapter import HiStateDiskAdapter
from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.record import Place
from lmcache_histate.backends.events import EventQueue, MoveEnded
from lmcache_histate.backends.limits import IN_FLIGHT_SHARE, PAUSE_SECONDS

logger = init_logger(__name__)

DAY_SECONDS = 86_400.0
BURST_SECONDS = 3_600.0
"""Unused write budget is saved up for this long."""


class Mover:
    """Moves objects one tier down. Used by the controller's thread alone; the disk's threads only append events.

    Args:
        parts: LMCache's storage manager and controllers.
        disk: The disk tier.
        queue: Receives ``MoveEnded``.
        bytes_per_day: What may be written a day, or None without a limit.
    """

    def __init__(
        self, parts: StorageParts, disk: HiStateDiskAdapter, queue: EventQueue, bytes_per_day: float | None = None
    ) -> None:
        self._parts = parts
        self._disk = disk
        self._queue = queue
        self._limit = parts.manager.get_l1_usage()[1] // IN_FLIGHT_SHARE
        self._in_flight: dict[ObjectKey, int] = {}
        self._paused_until = float("-inf")
        self._rate = None if bytes_per_day is None else bytes_per_day / DAY_SECONDS
        self._allowance = 0.0 if self._rate is None else self._rate * BURST_SECONDS
        self._allowed_at: float | None = None
        self.bytes_in_flight = 0
        self._in_flight_by_salt: Counter[str] = Counter()
        self.counts = dict.fromkeys(("moved_to_disk", "bytes_moved_to_disk", "failed_moves"), 0)

    def has_room(self, nbytes: int, now: float) -> bool:
        """Whether a move of ``nbytes`` may start now. One that exceeds the limit by itself goes alone. O(1)."""
        return now >= self._paused_until and (not self._in_flight or self.bytes_in_flight + nbytes <= self._limit)

    def within_budget(self, nbytes: int, now: float) -> bool:
        """Whether the day's write budget holds ``nbytes`` more. O(1)."""
        if self._rate is None:
            return True
        if self._allowed_at is not None:
            saved = self._allowance + (now - self._allowed_at) * self._rate
            self._allowance = min(saved, self._rate * BURST_SECONDS)
        self._allowed_at = now
        return nbytes <= self._allowance

    def move(self, keys: Sequence[ObjectKey], place_of: Callable[[ObjectKey], Place]) -> int:
        """Start moving objects; those that are on their way already, or gone, are passed over. O(objects).

        Args:
            keys: Objects in CPU memory.
            place_of: Where an object stands in the prefix tree, kept with it on disk.

        Returns:
            Bytes that will leave CPU memory.
        """
        fresh = [key for key in keys if key not in self._in_flight]
        reserved = self._parts.l1_manager.reserve_read(fresh)
        moving = [key for key in fresh if reserved[key][0] == L1Error.SUCCESS]
        if not moving:
            return 0
        objects: list[Any] = [reserved[key][1] for key in moving]
        sizes = [int(obj.get_size()) for obj in objects]
        try:
            future = self._disk.put(moving, objects, [place_of(key) for key in moving])
        except Exception:
            self._parts.l1_manager.finish_read(moving)
            raise
        for key, size in zip(moving, sizes, strict=True):
            self._in_flight[key] = size
            self._in_flight_by_salt[key.cache_salt] += size
        self.bytes_in_flight += sum(sizes)
        self._allowance -= sum(sizes)
        future.add_done_callback(lambda done: self._queue.put(MoveEnded(moving, done.result())))
        return sum(sizes)

    def leaving(self, salt: str) -> int:
        """Bytes of a tenant that are being moved. O(1)."""
        return self._in_flight_by_salt[salt]

    def ended(self, event: MoveEnded, now: float) -> list[ObjectKey]:
        """A move came to its end: unlock, and delete from CPU memory what the disk holds now. O(objects).

        Returns:
            What has surely left CPU memory; the events that say so come later.
        """
        self._parts.l1_manager.finish_read(list(event.keys))
        safe = []
        for key, put in zip(event.keys, event.results, strict=True):
            size = self._in_flight.pop(key, 0)
            self.bytes_in_flight -= size
            self._in_flight_by_salt[key.cache_salt] -= size
            if not self._in_flight_by_salt[key.cache_salt]:
                del self._in_flight_by_salt[key.cache_salt]
            if put in (Put.STORED, Put.PRESENT):
                safe.append(key)
                self.counts["moved_to_disk"] += 1
                self.counts["bytes_moved_to_disk"] += size if put is Put.STORED else 0
            else:
                self.counts["failed_moves"] += 1
                self._paused_until = now + PAUSE_SECONDS
        deleted, _ = self._parts.manager.delete_l1_keys(safe)
        return safe if deleted == len(safe) else []

    def __len__(self) -> int:
        return len(self._in_flight)
