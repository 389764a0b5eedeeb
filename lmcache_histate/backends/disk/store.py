"""The on-disk store: records published so that a crash leaves them whole or absent, under a hard limit of bytes.

Nothing here raises into a caller for the disk's faults: a record that cannot be written is not stored, one that cannot be read or
verified is a miss and is removed. Thread-safe; calls that touch the disk block, so callers run them on threads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from lmcache_histate.backends.disk import namespace as namespaces
from lmcache_histate.backends.disk import recovery
from lmcache_histate.backends.disk.catalogue import FILE, Catalogue, Row
from lmcache_histate.backends.disk.dirsync import DirectorySync
from lmcache_histate.backends.disk.health import Health
from lmcache_histate.backends.disk.index import Entry, Index, Load
from lmcache_histate.backends.disk.io import AbandonedError, choose_io, read_header_block
from lmcache_histate.backends.disk.ledger import Ledger, LocalLedger, SharedLedger
from lmcache_histate.backends.disk.lock import FolderInUseError, FolderLock, Scratch, sweep_scratch
from lmcache_histate.backends.disk.namespace import Layout, Namespace
from lmcache_histate.backends.disk.record import (
    NOWHERE,
    Header,
    ObjectId,
    Place,
    RecordError,
    decode_header,
    encode_header,
    file_name,
    padded,
    payload_checksum,
    record_bytes,
)

logger = logging.getLogger(__name__)

BASE_BYTES = 5 << 20
"""Set aside within the capacity for the catalogue's fixed part and its log, the lock, the ledger and the folders above the shards."""

NAMESPACE_BYTES = (1 << 20) + (16 << 10)
"""Accounted for each namespace: its 256 shard folders and the manifest."""

MIN_CAPACITY_BYTES = 16 << 20

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class StoreConfig:
    """How a store is to run."""

    root: Path
    capacity_bytes: int
    """Hard limit for everything under `root`, temporary files included."""

    min_free_bytes: int = 1 << 30
    """The file system's free space is never taken below this."""

    shared: bool = False
    """Whether other servers use the folder at the same time (each must say so)."""

    direct_io: str = "auto"
    """`auto`, `on` or `off`."""

    sync: bool = True
    """Whether a store is on stable storage when it is reported. Without it a power cut (not a crash of the server) may lose what was
    stored last; it never makes the store serve anything wrong."""

    fingerprint: str = ""
    """Anything else that objects must have in common, a model revision for instance: part of every namespace."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(
                f"the capacity of {self.root} is {self.capacity_bytes} bytes; the least that works is {MIN_CAPACITY_BYTES} (16 MiB)"
            )
        if self.min_free_bytes < 0:
            raise ValueError(f"the free-space floor of {self.root} is negative ({self.min_free_bytes} bytes)")


class Put(Enum):
    """What became of an object that was to be stored."""

    STORED = "stored"
    PRESENT = "present"
    """It was there already."""
    FULL = "full"
    """No room: capacity or free-space floor. Nothing changed."""
    FAILED = "failed"
    """The disk or the caller's buffer failed. Nothing was published."""


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


@dataclass(frozen=True)
class Usage:
    """Bytes of a store."""

    capacity_bytes: int
    used_bytes: int
    """Everything accounted for, by all servers: objects, temporary files and overhead."""

    reserved_bytes: int
    """The part of `used_bytes` that is being written."""

    free_bytes: int
    """What the file system could still give to this store above its floor."""

    objects: int
    """Objects that this server knows."""

    bytes_by_salt: Mapping[str, int]
    """The objects' bytes by tenant."""


def charge_of(size: int) -> int:
    """Bytes that a record file of `size` bytes is accounted with: itself, and room for its directory entry, extents and row."""
    return size + 1024 + padded(size // 1024, 512)


class DiskStore:
    """Open the store in a folder, recovering what it holds.

    Args:
        config: How to run.
        on_removed: Called with entries that the store removed by itself (damaged, vanished, over capacity), never under its locks.

    Raises:
        FolderInUseError: another server holds the folder.
        OSError: the folder cannot be made or written.
        ValueError: direct I/O was demanded and is not there.
    """

    def __init__(self, config: StoreConfig, on_removed: Callable[[list[Entry]], None] | None = None) -> None:
        self.config = config
        self.health = Health(logger)
        self._on_removed = on_removed or (lambda entries: None)
        self._root = config.root
        self._root.mkdir(parents=True, exist_ok=True)
        self._block = max(4096, os.statvfs(self._root).f_frsize)
        self._folder_lock = FolderLock(self._root, config.shared)
        self._lock = threading.Lock()
        self._loads_done = threading.Condition(self._lock)
        self._heal_lock = threading.Lock()
        self._busy: dict[tuple[Namespace, ObjectId], Future[Put | None]] = {}
        self._index = Index()
        self._namespaces: dict[str, Namespace] = {}
        self._numbers = itertools.count()
        self._dirsync = DirectorySync()
        try:
            self._scratch = Scratch(self._root)
            self._ledger: Ledger = (
                SharedLedger(self._root / "ledger", self._scratch.token) if config.shared else LocalLedger()
            )
            self.io = choose_io(self._scratch.folder, config.direct_io)
            self._catalogue = Catalogue(self._root, config.shared, self._all_rows)
            self._recover()
        except BaseException:
            self._folder_lock.release()
            raise

    # ---- namespaces

    def namespace(self, model: str, layout: Layout) -> Namespace:
        """The namespace of a model and layout, made if it is new.

        Raises:
            OSError: its folder cannot be made; ENOSPC also when the capacity does not hold it.
        """
        name = namespaces.namespace_name(model, layout, self.config.fingerprint)
        known = self._namespaces.get(name)
        if known is not None and known.layout is not None:
            return known
        with self._heal_lock:
            new = not (self._root / "ns" / name).is_dir()
            if new and not self._ledger.reserve(NAMESPACE_BYTES, self._budget()):
                raise OSError(errno.ENOSPC, "the capacity has no room for another model or layout", str(self._root))
            made = namespaces.create(self._root, model, layout, self.config.fingerprint)
            if new:
                self._ledger.publish(NAMESPACE_BYTES)
            if known is not None:
                known.layout, known.opaque = made.layout, made.opaque
            return self._namespaces.setdefault(name, made)

    def candidates(self, model: str, layout: Layout | None) -> tuple[Namespace, ...]:
        """Namespaces in which an object of this model and layout may be, best first; all of the model's when the layout is unknown.

        Namespaces of serialized objects always count: their layout is not the one that a lookup names. A load checks the layout again.
        """
        mine = [n for n in list(self._namespaces.values()) if n.model == model]
        if layout is None:
            return tuple(mine)
        exact = namespaces.namespace_name(model, layout, self.config.fingerprint)
        if self.config.shared and exact not in self._namespaces:
            self._discover(exact)
            mine = [n for n in list(self._namespaces.values()) if n.model == model]
        return tuple(sorted((n for n in mine if n.name == exact or n.opaque), key=lambda n: n.name != exact))

    def _discover(self, name: str) -> None:
        found = namespaces.load(self._root / "ns" / name)
        if found is not None:
            self._namespaces.setdefault(name, found)

    # ---- storing

    def put(
        self, namespace: Namespace, object_id: ObjectId, payload: memoryview, place: Place = NOWHERE,
        valid: Callable[[], bool] = lambda: True, dirty: set[Path] | None = None,
    ) -> Put:  # fmt: skip
        """Store one object.

        Args:
            payload: Its bytes, one-dimensional; must not change until this returns.
            valid: Asked before and after the payload was read: once false, the bytes are no longer the object's and nothing is published.
            dirty: Takes the folders that `sync` must be given before the object is durable. `None` synchronises at once.
        """
        key = (namespace, object_id)
        while True:
            with self._lock:
                entry = self._index.get((namespace,), object_id)
                if entry is not None:
                    return Put.PRESENT
                other = self._busy.get(key)
                if other is None:
                    mine: Future[Put | None] = Future()
                    self._busy[key] = mine
                    break
            result = other.result()
            if result is not None:  # None: it was being deleted, so look again
                return Put.PRESENT if result is Put.STORED else result
        outcome = Put.FAILED
        folders: set[Path] = set()
        try:
            outcome = self._put(namespace, object_id, payload, place, valid, folders)
        finally:
            with self._lock:
                del self._busy[key]
            mine.set_result(outcome)
        self.health.count(f"put_{outcome.value}")
        if dirty is not None:
            dirty |= folders
        elif not self.sync(folders):
            return Put.FAILED
        return outcome

    def _put(
        self, namespace: Namespace, object_id: ObjectId, payload: memoryview, place: Place, valid: Callable[[], bool], dirty: set[Path]
    ) -> Put:
        for attempt in (1, 2):
            try:
                outcome = self._write(namespace, object_id, payload, place, valid, dirty)
            except RecordError as e:
                self.health.trouble("key", f"an object cannot be stored: {e}")
                return Put.FAILED
            except OSError as e:
                if e.errno == errno.ENOENT and attempt == 1 and self._heal():
                    continue
                if e.errno in _FULL:
                    self.health.trouble("full", f"{self._root}: the file system is full ({e}); stores are dropped until it is not")
                    return Put.FULL
                self.health.trouble("write", f"{self._root}: cannot be written ({e}); stores are dropped until it can")
                return Put.FAILED
            if outcome is Put.STORED:
                self.health.well("write")
                self.health.well("full")
            return outcome
        return Put.FAILED

    def _write(
        self, namespace: Namespace, object_id: ObjectId, payload: memoryview, place: Place, valid: Callable[[], bool], dirty: set[Path]
    ) -> Put:
        charge = self.charge(len(payload))
        if not self._reserve(charge):
            return Put.FULL
        temporary = self._scratch.folder / f"{next(self._numbers):x}"
        kept = False
        try:
            if not valid():
                return Put.FAILED
            now = time.time()
            header = Header(namespace.name, object_id, len(payload), payload_checksum(payload), now, place)
            self.io.write(temporary, encode_header(header), payload, self.config.sync)
            if not valid():  # its buffer was freed meanwhile: what was written may be another object's bytes
                return Put.FAILED
            entry = Entry(namespace, object_id, len(payload), charge, now, now, place)
            kept = self._publish(temporary, entry, dirty)
            return Put.STORED if kept else Put.PRESENT
        finally:
            if not kept:
                try:
                    temporary.unlink(missing_ok=True)
                except OSError:
                    self.health.count("temporary_left")  # it keeps its reservation, so that the limit holds; a restart removes it
                else:
                    self._ledger.release(charge)

    def _publish(self, temporary: Path, entry: Entry, dirty: set[Path]) -> bool:
        """Give a finished record its name. False if another server was first, whose copy then counts."""
        path = entry.namespace.path(entry.file)
        with self._ledger.guard():
            if self.config.shared and path.exists():
                self._take_in(entry)
                return False
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)  # without parents: a namespace folder that is gone needs healing
                dirty.add(entry.namespace.folder)
                os.rename(temporary, path)
            self._ledger.publish(entry.charge)
        dirty.add(path.parent)
        self._take_in(entry)
        return True

    def _take_in(self, entry: Entry) -> None:
        with self._lock:
            self._index.add(entry)
        self._catalogue.put(entry.namespace.name, entry.file, entry.row())

    def sync(self, dirty: Iterable[Path]) -> bool:
        """Make the renames in these folders durable; false (and one log line) if that failed."""
        if not self.config.sync:
            return True
        try:
            self._dirsync.sync(dirty)
        except OSError as e:
            self.health.trouble("sync", f"{self._root}: a folder cannot be synchronised ({e}); the last stores may not survive a power cut")
            return False
        self.health.well("sync")
        return True

    def _budget(self) -> int:
        return self.config.capacity_bytes - BASE_BYTES

    def _reserve(self, charge: int) -> bool:
        if not self._ledger.reserve(charge, self._budget()):
            self.health.trouble("capacity", f"{self._root}: its capacity of {self.config.capacity_bytes} bytes is used up; stores are dropped")
            return False
        self.health.well("capacity")
        _, promised = self._ledger.totals()
        if self._free_bytes() < promised:  # all that is promised may still have to be written
            self._ledger.release(charge)
            self.health.trouble("floor", f"{self._root}: the file system is at its free-space floor; stores are dropped")
            return False
        self.health.well("floor")
        return True

    def _free_bytes(self) -> int:
        try:
            fs = os.statvfs(self._root)
        except OSError:
            return 1 << 62  # the write itself will say what is wrong
        return fs.f_bavail * fs.f_frsize - self.config.min_free_bytes

    # ---- looking up, loading

    def lock(self, candidates: Sequence[Namespace], object_ids: Sequence[ObjectId]) -> list[bool]:
        """Whether each object is there; those that are get one lock each, which keeps them from being deleted."""
        found: list[bool] = []
        now = time.monotonic()
        with self._lock:
            for object_id in object_ids:
                entry = self._index.get(candidates, object_id)
                if entry is not None:
                    entry.lock(now)
                found.append(entry is not None)
        if self.config.shared and not all(found):
            for at, object_id in enumerate(object_ids):
                if not found[at] and (entry := self._probe(candidates, object_id)) is not None:
                    with self._lock:
                        entry.lock(now)
                    found[at] = True
        return found

    def _probe(self, candidates: Sequence[Namespace], object_id: ObjectId) -> Entry | None:
        """Take in a record that another server published."""
        file = file_name(object_id)
        for namespace in candidates:
            with contextlib.suppress(OSError, RecordError):
                block, size = read_header_block(namespace.path(file))
                header = decode_header(block)
                recovery.verify_header(header, namespace.name, file, size)
                charge = charge_of(padded(size, self._block))
                entry = Entry(namespace, object_id, header.payload_bytes, charge, header.stored_at, time.time(), header.place)
                with self._lock:
                    known = self._index.get((namespace,), object_id)
                    if known is None:
                        self._index.add(entry)
                    return known or entry
        return None

    def unlock(self, object_ids: Iterable[ObjectId]) -> None:
        """Give back one lock on each object; one that holds none is left as it is.

        When fewer locks than loads are left, somebody gave up waiting for a load and will reuse its buffer: this returns only when no such
        load writes any more.
        """
        with self._lock:
            for object_id in object_ids:
                for entry in self._index.of(object_id):
                    if entry.locks > 0:
                        entry.locks -= 1
                        if entry.loads:
                            self._loads_done.wait_for(entry.abandon)
                        break

    def begin_load(self, namespaces_: Sequence[Namespace], object_id: ObjectId) -> Load | None:
        """Announce a load, so that `unlock` and `delete` know of it. `None`: not there."""
        with self._lock:
            entry = self._index.get(namespaces_, object_id)
        if entry is None and self.config.shared:
            entry = self._probe(namespaces_, object_id)
        if entry is None:
            return None
        with self._lock:
            load = Load(entry)
            entry.loads.append(load)
        return load

    def load(self, load: Load, payload: memoryview, valid: Callable[[], bool] = lambda: True) -> bool:
        """Fill `payload` with an object's bytes, verified. Call it exactly once for each `begin_load`.

        Args:
            payload: As long as the object; unless this returns true its content is undefined.
            valid: Asked before `payload` is touched; once false it is not touched again.
        """
        entry = load.entry
        with self._lock:
            if load.abandoned:
                return False
            load.running = True
        damage = None
        try:
            if entry.payload_bytes != len(payload):
                self.health.count("load_size_mismatch")
                return False
            block, checksum = self.io.read(entry.namespace.path(entry.file), payload, lambda: valid() and not load.abandoned)
            header = decode_header(block)
            recovery.verify_header(header, entry.namespace.name, entry.file, record_bytes(len(payload)))
            if header.object_id != entry.object_id or header.payload_checksum != checksum:
                raise RecordError("the payload checksum does not match")
            self.health.count("load_hit")
        except AbandonedError:
            self.health.count("load_abandoned")
            return False
        except RecordError as e:
            damage = str(e)
        except FileNotFoundError:
            damage = "the file is gone"
        except OSError as e:
            if e.errno == errno.EIO:
                damage = f"the disk cannot read it ({e})"
            else:
                self.health.trouble("read", f"{self._root}: records cannot be read ({e}); they count as misses until they can")
                return False
        finally:
            with self._lock:
                entry.loads.remove(load)
                self._loads_done.notify_all()
        if damage is not None:
            self._remove_damaged(entry, damage)
            return False
        self.health.well("read")
        self.touch(entry)
        return True

    def cancel_load(self, load: Load) -> None:
        """End a load that `begin_load` announced and that will not be run."""
        with self._lock:
            if load in load.entry.loads:
                load.entry.loads.remove(load)
                self._loads_done.notify_all()

    def touch(self, entry: Entry) -> None:
        """Note an access, now. A clock that stepped back leaves the last access where it was."""
        entry.last_access = max(entry.last_access, time.time())
        self._catalogue.put(entry.namespace.name, entry.file, entry.row())

    # ---- removing

    def delete(self, object_ids: Iterable[ObjectId]) -> Deleted:
        """Delete objects, in all namespaces. What is held is passed over; one failure stops nothing."""
        result = Deleted()
        now = time.monotonic()
        for object_id in object_ids:
            with self._lock:
                entries = self._index.of(object_id)
            if not entries:
                result.missing.append(object_id)
            for entry in entries:
                with self._lock:
                    if entry.held(now):
                        result.held.append(object_id)
                        continue
                    claim = self._claim(entry)
                if claim is None:
                    result.missing.append(object_id)
                elif self._unlink(entry, claim):
                    result.entries.append(entry)
                else:
                    result.failed.append(object_id)
        return result

    def _claim(self, entry: Entry) -> Future[Put | None] | None:
        """Take an entry out of the index, and keep its key from being written until the future is done. Under the lock."""
        key = (entry.namespace, entry.object_id)
        if key in self._busy or not self._index.remove(entry):
            return None
        claim: Future[Put | None] = Future()
        self._busy[key] = claim
        return claim

    def _unlink(self, entry: Entry, claim: Future[Put | None]) -> bool:
        gone = True
        try:
            with self._ledger.guard():
                try:
                    os.unlink(entry.namespace.path(entry.file))
                    self._ledger.free(entry.charge)
                except FileNotFoundError:
                    if not self.config.shared:  # a shared folder's other server deleted it and freed its bytes
                        self._ledger.free(entry.charge)
        except OSError as e:
            gone = False
            self.health.trouble("delete", f"{self._root}: a record cannot be deleted ({e}); it stays accounted for, others are deleted")
        with self._lock:
            del self._busy[entry.namespace, entry.object_id]
            if not gone:
                self._index.add(entry)
        claim.set_result(None)
        if gone:
            self._catalogue.drop(entry.namespace.name, entry.file)
            self.health.count("deleted")
        return gone

    def _remove_damaged(self, entry: Entry, why: str) -> None:
        self.health.count("damaged_removed")
        self.health.trouble("damage", f"{entry.namespace.path(entry.file)} is not served: {why}. It is removed and counts as a miss")
        with self._lock:
            claim = self._claim(entry)
        if claim is None:
            return
        if not self._unlink(entry, claim):
            # It cannot be deleted, and must not be served again: forget it, but keep its bytes accounted for.
            with self._lock:
                self._index.remove(entry)
        self._on_removed([entry])
        if why == "the file is gone":
            self._heal()

    # ---- opening, healing, closing

    def _recover(self) -> None:
        began = time.monotonic()
        with self._ledger.guard():
            dead, leftovers = sweep_scratch(self._root)
            found = recovery.scan(self._root, self._catalogue, time.time())
            for path, why in found.bad:
                logger.warning("%s is no good record (%s): it is deleted", path, why)
                with contextlib.suppress(OSError):
                    path.unlink()
            used = NAMESPACE_BYTES * len(namespaces.folders(self._root))
            for namespace, rows in found.rows.items():
                self._namespaces[namespace.name] = namespace
                for row in rows.values():
                    charge = self.charge(row.payload_bytes)
                    used += charge
                    self._index.add(
                        Entry(namespace, row.object_id, row.payload_bytes, charge, row.stored_at, row.last_access, row.place)
                    )
            self._ledger.set_used(used, dead)
        for namespace, file in found.from_headers:
            self._catalogue.put(namespace.name, file, found.rows[namespace][file])
        for name, file in found.vanished:
            self._catalogue.drop(name, file)
        trimmed = self._trim()
        self.health.count("recovered", len(self._index))
        logger.info(
            "%s: %d objects, %d of them read from their headers, %d leftovers and %d bad files removed, %d over capacity removed, in %.2f s"
            " (%s I/O)", self._root, len(self._index), len(found.from_headers), leftovers, len(found.bad), trimmed,
            time.monotonic() - began, self.io.name,
        )  # fmt: skip

    def _trim(self) -> int:
        """Delete the least recently used objects until the capacity holds the rest (it was lowered, or a crash undid deletions)."""
        over = sum(self._ledger.totals()) - self._budget()
        if over <= 0:
            return 0
        gone = 0
        for entry in sorted(self._index, key=lambda e: e.last_access):
            if over <= 0:
                break
            if self.delete([entry.object_id]).entries:
                over -= entry.charge
                gone += 1
        return gone

    def _heal(self) -> bool:
        """Put back folders that were deleted underneath, and forget what was in them. False if that is not possible."""
        with self._heal_lock:
            try:
                lost_root = not self._folder_lock.still_ours()
                lost = [n for n in self._namespaces.values() if not n.folder.is_dir()]
                if not lost_root and not lost and self._scratch.folder.is_dir():
                    return True  # somebody else healed it, or only one file is gone
                self._root.mkdir(parents=True, exist_ok=True)
                if lost_root:
                    self._folder_lock.acquire()
                self._scratch.create()
                for n in lost:
                    n.folder.mkdir(parents=True, exist_ok=True)
                    namespaces.write_manifest(n.folder, n.model, n.layout, self.config.fingerprint)
            except (OSError, FolderInUseError) as e:
                self.health.trouble("folder", f"{self._root} was deleted or moved and cannot be made anew ({e}); everything is a miss")
                return False
            removed = self._forget(lost)
            if not (self._root / FILE).exists():
                self._catalogue.reset()
                for row in self._all_rows():
                    self._catalogue.put(*row)
        logger.warning("%s was deleted or moved while in use: made anew, %d objects are lost", self._root, len(removed))
        self.health.well("folder")
        self._on_removed(removed)
        return True

    def _forget(self, lost: list[Namespace]) -> list[Entry]:
        with self._lock:
            removed = [e for e in self._index if e.namespace in lost and self._index.get((e.namespace,), e.object_id) is e]
            for entry in removed:
                self._index.remove(entry)
        if self.config.shared:
            with self._ledger.guard():  # other servers lost the same files: only a count is right
                self._ledger.set_used(recovery.count_bytes(self._root, self._block, charge_of, NAMESPACE_BYTES), set())
        else:
            self._ledger.free(sum(e.charge for e in removed))
        for entry in removed:
            self._catalogue.drop(entry.namespace.name, entry.file)
        return removed

    def entries(self) -> list[Entry]:
        """All entries, as they are now."""
        with self._lock:
            return list(self._index)

    def set_place(self, object_id: ObjectId, place: Place) -> bool:
        """Correct an object's place in the prefix tree, in the catalogue (its record's header stays). False: not there."""
        with self._lock:
            entries = self._index.of(object_id)
        for entry in entries:
            entry.place = place
            self._catalogue.put(entry.namespace.name, entry.file, entry.row())
        return bool(entries)

    def _all_rows(self) -> Iterator[tuple[str, str, Row]]:
        for entry in self.entries():
            yield entry.namespace.name, entry.file, entry.row()

    def usage(self) -> Usage:
        """Bytes in use, now."""
        used, promised = self._ledger.totals()
        with self._lock:
            objects, salts = len(self._index), dict(self._index.bytes_by_salt)
        free = max(0, self._free_bytes())
        return Usage(self.config.capacity_bytes, used + promised + BASE_BYTES, promised, free, objects, MappingProxyType(salts))

    def charge(self, payload_bytes: int) -> int:
        """Bytes that an object of so many bytes is accounted with."""
        return charge_of(padded(record_bytes(payload_bytes), self._block))

    def touch_all(self, object_ids: Iterable[ObjectId]) -> None:
        """Note an access, now, to each object that is there."""
        for object_id in object_ids:
            with self._lock:
                entries = self._index.of(object_id)
            for entry in entries:
                self.touch(entry)

    def flush_catalogue(self) -> bool:
        """Wait until the catalogue on disk says what the store knows; false if it could not be written in time."""
        return self._catalogue.flush()

    def close(self) -> None:
        """Write the catalogue and give the folder up. The caller's own stores and loads must have ended."""
        self._catalogue.close()
        self._scratch.remove()
        self._ledger.close()
        self._folder_lock.release()
