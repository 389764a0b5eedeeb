"""Storing objects: reserve, write under a temporary name, rename, and synchronise.

Where POSIX is all that is known, a record's data is synchronised before the rename and its folder after it. With direct I/O
on a file system with one journal (`syncing.ONE_JOURNAL`) one fsync of the renamed record does both, at half the price: no
name can become durable there before the data that it stands for.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from lmcache_histate.backends.disk.core import Claim, Core, Put
from lmcache_histate.backends.disk.index import Entry
from lmcache_histate.backends.disk.io import DirectIO
from lmcache_histate.backends.disk.namespace import Namespace
from lmcache_histate.backends.disk.record import (
    NOWHERE,
    Header,
    ObjectId,
    Place,
    RecordError,
    encode_header,
    payload_checksum,
)
from lmcache_histate.backends.disk.syncing import ONE_JOURNAL, GroupSync, file_system

_FULL = (errno.ENOSPC, errno.EDQUOT)


def _always() -> bool:
    return True


class Writer:
    """Puts objects into a store.

    Args:
        core: The store.
        heal: Puts deleted folders back; false if that is not possible.
    """

    def __init__(self, core: Core, heal: Callable[[], bool]) -> None:
        self._core = core
        self._heal = heal
        self._numbers = itertools.count()
        self._group = GroupSync()
        self._one_fsync = isinstance(core.io, DirectIO) and file_system(core.config.root) in ONE_JOURNAL

    def put(
        self,
        namespace: Namespace,
        object_id: ObjectId,
        payload: memoryview,
        place: Place = NOWHERE,
        valid: Callable[[], bool] = _always,
        dirty: set[str] | None = None,
    ) -> Put:
        """Store one object. Never raises for the disk's faults.

        Args:
            payload: Its bytes, one-dimensional; must not change until this returns.
            valid: Asked before and after the payload was read: once false, the bytes are no longer the object's, and
                nothing is published.
            dirty: Takes the paths that `sync` must be given before the object is durable. `None` synchronises at once.
        """
        core, key = self._core, (namespace, object_id)
        while True:
            with core.mutex:
                if core.index.get((namespace,), object_id) is not None:
                    return Put.PRESENT
                other = core.busy.get(key)
                if other is None:
                    mine: Claim = Future()
                    core.busy[key] = mine
                    break
            result = other.result()
            if result is not None:  # None: it was being deleted, so look again
                return Put.PRESENT if result is Put.STORED else result
        outcome = Put.FAILED
        unsynced: set[str] = set()
        try:
            outcome = self._attempt(namespace, object_id, payload, place, valid, unsynced)
        finally:
            core.settle(namespace, object_id, mine, outcome)
        core.health.count(f"put_{outcome.value}")
        if outcome is Put.STORED:
            core.health.count("bytes_stored", len(payload))
        if dirty is not None:
            dirty |= unsynced
        elif not self.sync(unsynced):
            return Put.FAILED
        return outcome

    def _attempt(
        self,
        namespace: Namespace,
        object_id: ObjectId,
        payload: memoryview,
        place: Place,
        valid: Callable[[], bool],
        dirty: set[str],
    ) -> Put:
        health, root = self._core.health, self._core.config.root
        for attempt in (1, 2):
            try:
                outcome = self._write(namespace, object_id, payload, place, valid, dirty)
            except RecordError as e:
                health.trouble("key", f"{root}: an object cannot be stored: {e}")
                return Put.FAILED
            except OSError as e:
                if e.errno == errno.ENOENT and attempt == 1 and self._heal():
                    continue
                if e.errno in _FULL:
                    health.trouble("full", f"{root}: the file system is full ({e}); stores are dropped until it is not")
                    return Put.FULL
                health.trouble("write", f"{root}: cannot be written ({e}); stores are dropped until it can")
                return Put.FAILED
            if outcome is Put.STORED:
                health.well("write")
                health.well("full")
            return outcome
        return Put.FAILED

    def _write(
        self,
        namespace: Namespace,
        object_id: ObjectId,
        payload: memoryview,
        place: Place,
        valid: Callable[[], bool],
        dirty: set[str],
    ) -> Put:
        core = self._core
        charge = core.space.charge(len(payload))
        if not core.space.reserve(charge):
            return Put.FULL
        temporary = f"{core.scratch.folder}/{next(self._numbers):x}"
        published = False
        try:
            if not valid():
                return Put.FAILED
            now = time.time()
            header = Header(namespace.name, object_id, len(payload), payload_checksum(payload), now, place)
            core.io.write(temporary, encode_header(header), payload, core.config.sync and not self._one_fsync)
            if not valid():  # its buffer was freed meanwhile: what was written may be another object's bytes
                return Put.FAILED
            published = self._publish(
                temporary, Entry(namespace, object_id, len(payload), charge, now, now, place), dirty
            )
            return Put.STORED if published else Put.PRESENT
        finally:
            if not published:
                self._discard(temporary, charge)

    def _discard(self, temporary: str, charge: int) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        except OSError:
            # It keeps its reservation, so that the limit holds; the next start removes it.
            self._core.health.count("temporary_left")
        else:
            self._core.space.release(charge)

    def _publish(self, temporary: str, entry: Entry, dirty: set[str]) -> bool:
        """Give a finished record its name. False if another server was first, whose copy then counts."""
        core, path = self._core, entry.namespace.path(entry.file)
        with core.space.guard():
            if core.config.shared and os.path.exists(path):
                core.take_in(entry)
                return False
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                # Without parents: a namespace folder that is gone needs healing.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path))
                dirty.add(str(entry.namespace.folder))
                os.rename(temporary, path)
            core.space.publish(entry.charge)
            core.take_in(entry)
        dirty.add(path if self._one_fsync else os.path.dirname(path))
        return True

    def sync(self, dirty: Iterable[str]) -> bool:
        """Make what `put` published durable; false (and one log line) if that failed."""
        core = self._core
        if not core.config.sync:
            return True
        try:
            self._group.sync(dirty)
        except OSError as e:
            core.health.trouble(
                "sync", f"{core.config.root}: stores cannot be synchronised ({e}); they count as failed"
            )
            return False
        core.health.well("sync")
        return True
