"""Bytes: what the capacity and the file system still allow, reserved before anything is written."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from lmcache_histate.backends.disk.health import Health
from lmcache_histate.backends.disk.ledger import Ledger
from lmcache_histate.backends.disk.record import padded, record_bytes
from lmcache_histate.backends.disk.settings import StoreConfig

BASE_BYTES = 5 << 20
"""Set aside within the capacity for the catalogue's fixed part and its log, the lock, the ledger and the upper
folders.
"""

NAMESPACE_BYTES = (1 << 20) + (16 << 10)
"""Accounted for each namespace: its 256 shard folders and the manifest."""


def charge_of(file_bytes: int) -> int:
    """Bytes that a file of so many bytes is accounted with: itself, and room for its directory entry, extents and
    row.
    """
    return file_bytes + 1024 + padded(file_bytes // 1024, 512)


class Space:
    """A store's bytes. Thread-safe.

    Args:
        config: The limits.
        ledger: Who counts.
        health: Who is told when room runs out.
    """

    def __init__(self, config: StoreConfig, ledger: Ledger, health: Health) -> None:
        self._config = config
        self._ledger = ledger
        self._health = health
        self.block = max(4096, os.statvfs(config.root).f_frsize)
        """Allocation unit of the file system in bytes."""

    def charge(self, payload_bytes: int) -> int:
        """Bytes that an object of so many bytes is accounted with."""
        return charge_of(padded(record_bytes(payload_bytes), self.block))

    def reserve(self, charge: int) -> bool:
        """Promise bytes, unless they exceed the capacity or the free-space floor; then say so (once) and change
        nothing.
        """
        root = self._config.root
        if not self._ledger.reserve(charge, self._config.capacity_bytes - BASE_BYTES):
            self._health.trouble(
                "capacity",
                f"{root}: the capacity of {self._config.capacity_bytes} bytes is used up; stores are dropped",
            )
            return False
        self._health.well("capacity")
        if self.free_bytes() < self._ledger.totals()[1]:  # all that is promised may still have to be written
            self._ledger.release(charge)
            self._health.trouble("floor", f"{root}: the file system is at its free-space floor; stores are dropped")
            return False
        self._health.well("floor")
        return True

    def release(self, charge: int) -> None:
        """Take a promise back: nothing was published for it."""
        self._ledger.release(charge)

    def publish(self, charge: int) -> None:
        """Turn a promise into use."""
        self._ledger.publish(charge)

    def free(self, charge: int) -> None:
        """Bytes in use are gone."""
        self._ledger.free(charge)

    def recount(self, used: int, dead: set[int]) -> None:
        """Replace the bytes in use by a fresh count (see `Ledger.set_used`)."""
        self._ledger.set_used(used, dead)

    def guard(self) -> AbstractContextManager[None]:
        """Hold still other servers' publishing and deleting (see `Ledger.guard`)."""
        return self._ledger.guard()

    def totals(self) -> tuple[int, int]:
        """Bytes in use with the overhead, and bytes promised."""
        used, promised = self._ledger.totals()
        return used + BASE_BYTES, promised

    def over(self) -> int:
        """Bytes above the capacity; positive only after it was lowered."""
        return sum(self.totals()) - self._config.capacity_bytes

    def free_bytes(self) -> int:
        """Bytes that the file system has above the floor."""
        try:
            fs = os.statvfs(self._config.root)
        except OSError:
            return 1 << 62  # the write itself will say what is wrong
        return fs.f_bavail * fs.f_frsize - self._config.min_free_bytes

    def replace(self, ledger: Ledger) -> None:
        """Count with another ledger from now on: the file of a shared one was lost."""
        self._ledger.close()
        self._ledger = ledger

    def close(self) -> None:
        """Drop this process's promises."""
        self._ledger.close()
