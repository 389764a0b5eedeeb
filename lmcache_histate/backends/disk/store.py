"""The on-disk store: records published so that a crash leaves them whole or absent, under a hard limit of bytes.

Nothing here raises into a caller for the disk's faults: a record that cannot be written is not stored, one that
cannot be read or verified is a miss and is removed. Thread-safe; calls that touch the disk block, so callers run them
on threads.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lmcache_histate.backends.disk import namespace as namespaces
from lmcache_histate.backends.disk import recovery
from lmcache_histate.backends.disk.catalogue import FILE
from lmcache_histate.backends.disk.core import Core, Put
from lmcache_histate.backends.disk.health import Health
from lmcache_histate.backends.disk.index import Entry, Load
from lmcache_histate.backends.disk.io import choose_io
from lmcache_histate.backends.disk.ledger import Ledger, LocalLedger, SharedLedger
from lmcache_histate.backends.disk.lock import FolderInUseError, FolderLock, Scratch, sweep_scratch
from lmcache_histate.backends.disk.namespace import Layout, Namespace, Namespaces
from lmcache_histate.backends.disk.reading import Reader
from lmcache_histate.backends.disk.record import ObjectId, Place
from lmcache_histate.backends.disk.removing import Deleted, Remover
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.space import NAMESPACE_BYTES, Space, charge_of
from lmcache_histate.backends.disk.writing import Writer

logger = logging.getLogger(__name__)


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


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's cycle collector off while a large index is built: walking it again and again took most of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class DiskStore:
    """Open the store in a folder, recovering what it holds.

    Args:
        config: How to run.
        on_removed: Called with entries that the store removed by itself (damaged, vanished), never under its locks.

    Raises:
        FolderInUseError: another server holds the folder.
        OSError: the folder cannot be made or written.
        ValueError: direct I/O was demanded and is not there.
    """

    def __init__(self, config: StoreConfig, on_removed: Callable[[list[Entry]], None] | None = None) -> None:
        self.config = config
        self.health = Health(logger)
        config.root.mkdir(parents=True, exist_ok=True)
        self._folder_lock = FolderLock(config.root, config.shared)
        self._heal_lock = threading.Lock()
        self._closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder_lock.release)
            scratch = Scratch(config.root)
            undo.callback(scratch.remove)
            self._core = Core(
                config,
                self.health,
                Space(config, self._new_ledger(scratch), self.health),
                Namespaces(config.root, config.fingerprint, config.shared),
                scratch,
                choose_io(scratch.folder, config.direct_io),
                on_removed or (lambda entries: None),
            )
            self._writer = Writer(self._core, self._heal)
            self._remover = Remover(self._core, self._heal)
            self._reader = Reader(self._core, self._remover.remove_damaged)
            self._recover()
            undo.pop_all()

    def _new_ledger(self, scratch: Scratch) -> Ledger:
        return SharedLedger(self.config.root / "ledger", scratch.token) if self.config.shared else LocalLedger()

    @property
    def io_name(self) -> str:
        """`direct` or `plain`."""
        return self._core.io.name

    # ---- objects

    def namespace(self, model: str, layout: Layout) -> Namespace:
        """The namespace of a model and layout, made if it is new.

        Raises:
            OSError: its folder cannot be made; ENOSPC also when the capacity does not hold it.
        """
        core = self._core
        known = core.names.get(model, layout)
        if known is not None:
            return known
        with core.space.guard():  # two servers that make it at once must not both account for it
            return core.names.get_or_make(model, layout, self._reserve_namespace)

    def _reserve_namespace(self) -> None:
        if not self._core.space.reserve(NAMESPACE_BYTES):
            raise OSError(errno.ENOSPC, "there is no room for another model or layout", str(self.config.root))
        self._core.space.publish(NAMESPACE_BYTES)

    def candidates(self, model: str, layout: Layout | None) -> tuple[Namespace, ...]:
        """Namespaces in which an object may be (see `Namespaces.candidates`)."""
        return self._core.names.candidates(model, layout)

    def put(
        self,
        namespace: Namespace,
        object_id: ObjectId,
        payload: memoryview,
        place: Place,
        valid: Callable[[], bool],
        dirty: set[str] | None,
    ) -> Put:
        """Store one object (see `Writer.put`)."""
        return self._writer.put(namespace, object_id, payload, place, valid, dirty)

    def sync(self, dirty: Iterable[str]) -> bool:
        """Make what was put durable (see `Writer.sync`)."""
        return self._writer.sync(dirty)

    def lock(self, candidates: Sequence[Namespace], object_ids: Sequence[ObjectId]) -> list[bool]:
        """Look up and lock (see `Reader.lock`)."""
        return self._reader.lock(candidates, object_ids)

    def unlock(self, object_ids: Iterable[ObjectId]) -> None:
        """Give back one lock on each object (see `Reader.unlock`)."""
        self._reader.unlock(object_ids)

    def begin_load(self, candidates: Sequence[Namespace], object_id: ObjectId, own: bool = False) -> Load | None:
        """Announce a load (see `Reader.begin_load`)."""
        return self._reader.begin_load(candidates, object_id, own)

    def load(self, load: Load, payload: memoryview, valid: Callable[[], bool]) -> bool:
        """Run an announced load (see `Reader.load`)."""
        return self._reader.load(load, payload, valid)

    def cancel_load(self, load: Load) -> None:
        """End an announced load without running it."""
        self._reader.cancel_load(load)

    def delete(self, object_ids: Iterable[ObjectId]) -> Deleted:
        """Delete objects (see `Remover.delete`)."""
        return self._remover.delete(object_ids)

    def touch(self, object_ids: Iterable[ObjectId]) -> None:
        """Note an access, now, to each object that is there."""
        for object_id in object_ids:
            for entry in self._core.entries_of(object_id):
                self._reader.touch(entry)

    def set_place(self, object_id: ObjectId, place: Place) -> bool:
        """Correct an object's place in the prefix tree, in the catalogue (its record's header stays). False: not
        there.
        """
        entries = self._core.entries_of(object_id)
        for entry in entries:
            entry.place = place
            self._core.note(entry)
        return bool(entries)

    def entries(self) -> list[Entry]:
        """All entries, as they are now."""
        return self._core.entries()

    def charge(self, payload_bytes: int) -> int:
        """Bytes that an object of so many bytes is accounted with."""
        return self._core.space.charge(payload_bytes)

    def usage(self) -> Usage:
        """Bytes in use, now."""
        core = self._core
        used, promised = core.space.totals()
        with core.mutex:
            objects, salts = len(core.index), dict(core.index.bytes_by_salt)
        free = max(0, core.space.free_bytes())
        return Usage(self.config.capacity_bytes, used + promised, promised, free, objects, MappingProxyType(salts))

    def flush_catalogue(self) -> bool:
        """Wait until the catalogue on disk says what the store knows; false if it could not be written in time."""
        return self._core.catalogue.flush()

    # ---- opening, healing, closing

    def _recover(self) -> None:
        core, root = self._core, self.config.root
        began = time.monotonic()
        with core.space.guard(), _no_collections():
            dead, leftovers = sweep_scratch(root)
            found = recovery.scan(root, core.catalogue, time.time())
            for path, why in found.bad:
                core.health.notice("damage", f"{path} is not a good record: {why}. It is deleted")
                with contextlib.suppress(OSError):
                    path.unlink()
            used = NAMESPACE_BYTES * len(namespaces.folders(root))
            for namespace, rows in found.rows.items():
                core.names.add(namespace)
                for file, row in rows.items():
                    charge = core.space.charge(row.payload_bytes)
                    used += charge
                    core.index.add(Entry(namespace, row.object_id, row.payload_bytes, charge, *row[2:], file))
            core.space.recount(used, dead)
        core.catalogue.put_all((space.name, file, found.rows[space][file]) for space, file in found.from_headers)
        for name, file in found.vanished:
            core.catalogue.drop(name, file)
        counts = {
            "recovered": len(core.index),
            "recovered_from_headers": len(found.from_headers),
            "leftovers_removed": leftovers,
            "bad_files_removed": len(found.bad),
            "trimmed": self._remover.trim(),
        }
        for event, count in counts.items():
            core.health.count(event, count)
        level = logging.WARNING if found.bad or counts["trimmed"] else logging.INFO
        summary = ", ".join(f"{count} {event.replace('_', ' ')}" for event, count in counts.items())
        logger.log(level, "%s: %s, in %.2f s (%s I/O)", root, summary, time.monotonic() - began, core.io.name)

    def _heal(self) -> bool:
        """Put back folders that were deleted underneath, and forget what was in them. False if that is not possible."""
        core, root = self._core, self.config.root
        with self._heal_lock:
            try:
                lost_root = not self._folder_lock.still_ours()
                lost = [n for n in core.names if not n.folder.is_dir()]
                if not lost_root and not lost and (core.scratch.folder / "owner").exists():
                    return True  # somebody else healed it, or only one file is gone
                root.mkdir(parents=True, exist_ok=True)
                if lost_root:
                    self._folder_lock.acquire()
                core.scratch.create()
                if self.config.shared and not (root / "ledger").exists():
                    core.space.replace(self._new_ledger(core.scratch))
                core.names.put_back(lost)
            except (OSError, FolderInUseError) as e:
                core.health.trouble(
                    "folder", f"{root} was deleted or moved and cannot be made anew ({e}); all is a miss"
                )
                return False
            removed = self._forget(lost)
            if not (root / FILE).exists():
                core.catalogue.reset()
                core.catalogue.put_all(core.all_rows())
        core.health.well("folder")
        core.health.notice(
            "deleted_underneath", f"{root} was deleted in use: made anew, {len(removed)} objects are lost"
        )
        core.on_removed(removed)
        return True

    def _forget(self, lost: list[Namespace]) -> list[Entry]:
        core = self._core
        with core.mutex:
            removed = [e for e in core.index if e.namespace in lost]
            for entry in removed:
                core.index.remove(entry)
        if self.config.shared:
            with core.space.guard():  # other servers lost the same files: only a fresh count is right
                count = recovery.count_bytes(self.config.root, core.space.block, charge_of, NAMESPACE_BYTES)
                core.space.recount(count, set())
        else:
            core.space.free(sum(e.charge for e in removed))
        for entry in removed:
            core.catalogue.drop(entry.namespace.name, entry.file)
        return removed

    def close(self) -> None:
        """Write the catalogue and give the folder up. The caller's own stores and loads must have ended."""
        if self._closed:
            return
        self._closed = True
        self._core.catalogue.close()
        self._core.scratch.remove()
        self._core.space.close()
        self._folder_lock.release()
