"""Looking objects up, locking them, and loading them verified into a caller's buffer."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Sequence

from lmcache_histate.backends.disk.core import Core
from lmcache_histate.backends.disk.index import Entry, Load
from lmcache_histate.backends.disk.io import AbandonedError, read_header_block
from lmcache_histate.backends.disk.namespace import Namespace
from lmcache_histate.backends.disk.record import ObjectId, RecordError, decode_header, file_name
from lmcache_histate.backends.disk.recovery import verify_header

GONE = "the file is gone"


def _always() -> bool:
    return True


class Reader:
    """Finds and loads objects of a store.

    Args:
        core: The store.
        remove_damaged: Told of an entry that must not be served again, and why.
    """

    def __init__(self, core: Core, remove_damaged: Callable[[Entry, str], None]) -> None:
        self._core = core
        self._remove_damaged = remove_damaged

    def lock(self, candidates: Sequence[Namespace], object_ids: Sequence[ObjectId]) -> list[bool]:
        """Whether each object is there; those that are get one lock each, which keeps them from being deleted.

        Only memory is asked. On a shared folder the disk is asked for what memory does not know.
        """
        core = self._core
        found: list[bool] = []
        now = time.monotonic()
        with core.mutex:
            for object_id in object_ids:
                entry = core.index.get(candidates, object_id)
                if entry is not None:
                    entry.lock(now)
                found.append(entry is not None)
        if core.config.shared and not all(found):
            for at, object_id in enumerate(object_ids):
                if not found[at] and (entry := self._probe(candidates, object_id)) is not None:
                    with core.mutex:
                        entry.lock(now)
                    found[at] = True
        return found

    def _probe(self, candidates: Sequence[Namespace], object_id: ObjectId) -> Entry | None:
        """Take in a record that another server published."""
        core, file = self._core, file_name(object_id)
        for namespace in candidates:
            with contextlib.suppress(OSError, RecordError):
                path = namespace.path(file)
                block, size = read_header_block(path)
                header = decode_header(block)
                verify_header(header, namespace.name, file, size)
                charge = core.space.charge(header.payload_bytes)
                stored = header.stored_at
                entry = Entry(namespace, object_id, header.payload_bytes, charge, stored, time.time(), header.place)
                with core.mutex:
                    known = core.index.get((namespace,), object_id)
                    if known is None:
                        core.index.add(entry)
                    return known or entry
        return None

    def unlock(self, object_ids: Iterable[ObjectId]) -> None:
        """Give back one lock on each object; one that holds none is left as it is.

        When fewer locks than loads are left, somebody gave up waiting for a load and will reuse its buffer: this
        returns only when no such load writes any more.
        """
        core = self._core
        with core.mutex:
            for object_id in object_ids:
                for entry in core.index.in_use(object_id):
                    if entry.locks > 0:
                        entry.locks -= 1
                        if entry.loads:
                            core.loads_changed.wait_for(entry.abandon)
                        break

    def begin_load(self, candidates: Sequence[Namespace], object_id: ObjectId, own: bool = False) -> Load | None:
        """Announce a load, so that `unlock` and deletions know of it.

        Args:
            own: Whether the load has nothing to do with locks that others take and give back.

        Returns:
            `None` if the object is not there.
        """
        core = self._core
        for probe in (False, True) if core.config.shared else (False,):
            if probe:
                self._probe(candidates, object_id)
            with core.mutex:
                entry = core.index.get(candidates, object_id)
                if entry is not None:
                    load = Load(entry, own)
                    entry.loads.append(load)
                    return load
        return None

    def cancel_load(self, load: Load) -> None:
        """End a load that was announced and will not be run."""
        core = self._core
        with core.mutex:
            if load in load.entry.loads:
                core.index.end_load(load)
                core.loads_changed.notify_all()

    def load(self, load: Load, payload: memoryview, valid: Callable[[], bool] = _always) -> bool:
        """Fill `payload` with an object's bytes, verified. Call it exactly once for each `begin_load`.

        Args:
            payload: As long as the object; unless this returns true its content is undefined.
            valid: Asked before `payload` is touched; once false it is not touched again.
        """
        core, entry = self._core, load.entry
        with core.mutex:
            if load.abandoned:
                return False
            load.running = True
        damage = ""
        try:
            if entry.payload_bytes != len(payload):
                core.health.count("load_size_mismatch")
                return False
            self._read(entry, payload, lambda: valid() and not load.abandoned)
        except AbandonedError:
            core.health.count("load_abandoned")
            return False
        except RecordError as e:
            damage = str(e)
        except FileNotFoundError:
            damage = GONE
        except OSError as e:
            if e.errno != errno.EIO:
                root = core.config.root
                core.health.trouble(
                    "read", f"{root}: records cannot be read ({e}); they count as misses until they can"
                )
                return False
            damage = f"the disk cannot read it ({e})"
        finally:
            with core.mutex:
                core.index.end_load(load)
                core.loads_changed.notify_all()
        if damage:
            self._remove_damaged(entry, damage)
            return False
        core.health.count("load_hit")
        core.health.count("bytes_loaded", len(payload))
        core.health.well("read")
        self.touch(entry)
        return True

    def _read(self, entry: Entry, payload: memoryview, wanted: Callable[[], bool]) -> None:
        block, checksum = self._core.io.read(entry.namespace.path(entry.file), payload, wanted)
        header = decode_header(block)
        if (header.namespace, header.object_id, header.payload_bytes) != (
            entry.namespace.name, entry.object_id, len(payload)
        ):  # fmt: skip
            raise RecordError("the record holds another object")
        if header.payload_checksum != checksum:
            raise RecordError("the payload checksum does not match")

    def touch(self, entry: Entry) -> None:
        """Note an access, now. A clock that stepped back leaves the last access where it was."""
        entry.last_access = max(entry.last_access, time.time())
        self._core.note(entry)
