"""Deleting objects: on request, because they are damaged, or because the capacity does not hold them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcache_histate.backends.disk.core import Claim, Core
from lmcache_histate.backends.disk.index import Entry
from lmcache_histate.backends.disk.reading import GONE
from lmcache_histate.backends.disk.record import ObjectId


@dataclass
class Deleted:
    """What a deletion did."""

    entries: list[Entry] = field(default_factory=list)
    """Gone, and their bytes with them."""

    held: list[ObjectId] = field(default_factory=list)
    """Locked or being read: passed over."""

    missing: list[ObjectId] = field(default_factory=list)
    failed: list[ObjectId] = field(default_factory=list)
    """The file system refused; they stay accounted for."""


class Remover:
    """Takes objects out of a store.

    Args:
        core: The store.
        heal: Puts deleted folders back.
    """

    def __init__(self, core: Core, heal: Callable[[], bool]) -> None:
        self._core = core
        self._heal = heal

    def delete(self, object_ids: Iterable[ObjectId]) -> Deleted:
        """Delete objects, in all namespaces. What is held is passed over; one failure stops nothing."""
        core, result = self._core, Deleted()
        now = time.monotonic()
        for object_id in object_ids:
            entries = core.entries_of(object_id)
            if not entries:
                result.missing.append(object_id)
            for entry in entries:
                with core.mutex:
                    held = entry.held(now)
                    claim = None if held else core.claim(entry)
                if held:
                    result.held.append(object_id)
                elif claim is None:
                    result.missing.append(object_id)
                elif self._unlink(entry, claim):
                    result.entries.append(entry)
                else:
                    result.failed.append(object_id)
        return result

    def _unlink(self, entry: Entry, claim: Claim, keep: bool = True) -> bool:
        """Delete a claimed entry's file. If that fails the entry is put back, unless `keep` is false."""
        core, path = self._core, entry.namespace.path(entry.file)
        gone = True
        try:
            with core.space.guard():
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    if core.config.shared:
                        return True  # the folder's other server deleted it and freed its bytes
                core.space.free(entry.charge)
        except OSError as e:
            gone = False
            core.health.trouble("delete", f"{path} cannot be deleted ({e}); it stays accounted for, others are deleted")
        finally:
            if not gone and keep:
                with core.mutex:
                    core.index.add(entry)
            core.settle(entry.namespace, entry.object_id, claim, None)
            if gone:
                core.catalogue.drop(entry.namespace.name, entry.file)
                core.health.count("deleted")
        return gone

    def remove_damaged(self, entry: Entry, why: str) -> None:
        """Stop serving an entry and delete its file; one that cannot be deleted is forgotten, and its bytes stay
        accounted for.
        """
        core = self._core
        with core.mutex:
            claim = core.claim(entry)
        if claim is None:
            return
        vanished = why == GONE
        core.health.count("vanished" if vanished else "damaged_removed")
        if not (vanished and core.config.shared):  # on a shared folder another server may just have deleted it
            path = entry.namespace.path(entry.file)
            core.health.notice("damage", f"{path} is not served: {why}. It is removed and counts as a miss")
        self._unlink(entry, claim, keep=False)
        core.on_removed([entry])
        if vanished:
            self._heal()

    def trim(self) -> int:
        """Delete the least recently used objects until the capacity holds the rest (it was lowered, or a crash undid
        deletions).

        Returns:
            How many were deleted.
        """
        over, gone = self._core.space.over(), 0
        if over <= 0:
            return 0
        for entry in sorted(self._core.entries(), key=lambda e: e.last_access):
            if over <= 0:
                break
            if self.delete([entry.object_id]).entries:
                over -= entry.charge
                gone += 1
        return gone
