"""The disk store as an LMCache L2 adapter, loaded by LMCache's `plugin` adapter type. The only module here that
imports `lmcache`.

Select it with::

    --l2-adapter '{"type": "plugin", "module_path": "lmcache_histate.backends.disk.adapter",
        "class_name": "HiStateDiskAdapter", "config_class_name": "HiStateDiskConfig",
        "adapter_params": {"base_path": "/mnt/nvme/histate", "max_capacity_gb": 150}}'
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface, L2TaskId
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.hints import PlaceHints
from lmcache_histate.backends.disk.index import Entry, Load
from lmcache_histate.backends.disk.namespace import layout_of
from lmcache_histate.backends.disk.record import ObjectId, Place
from lmcache_histate.backends.disk.settings import HELP, StoreConfig, parse
from lmcache_histate.backends.disk.store import DiskStore
from lmcache_histate.backends.disk.tasks import Batches

logger = logging.getLogger(__name__)


class HiStateDiskConfig(L2AdapterConfigBase):
    """The adapter's settings; `from_dict` reads LMCache's `adapter_params`, `help` explains them."""

    def __init__(self, store: StoreConfig) -> None:
        self.store = store

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> HiStateDiskConfig:
        """Build the settings (see `settings.parse`).

        Raises:
            ValueError: a field is missing, unknown, or has an impossible value; the message says which, and what to
                set.
        """
        return cls(parse(d))

    @classmethod
    def help(cls) -> str:
        """What LMCache prints when the settings are wrong."""
        return HELP


class Known(NamedTuple):
    """One object on disk, as the catalogue knows it."""

    key: ObjectKey
    place: Place
    last_access: float
    """Unix seconds; never steps back, never lies in the future at start."""

    payload_bytes: int
    charge_bytes: int
    """What deleting it frees."""


@dataclass(frozen=True)
class DeleteReport:
    """What `delete_keys` did with each key."""

    deleted: list[ObjectKey]
    freed_bytes: int
    held: list[ObjectKey]
    """Locked by a lookup or being read: passed over."""

    missing: list[ObjectKey]
    failed: list[ObjectKey]
    """The file system refused; they stay accounted for."""


class HiStateDiskAdapter(L2AdapterInterface):
    """LMCache L2 adapter over a `DiskStore` (contract: `lmcache/v1/distributed/l2_adapters/base.py`).

    Args:
        config: The settings.
        l1_memory_desc: LMCache's description of its CPU arena; not needed here.

    Raises:
        FolderInUseError: another server holds the folder.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, config: HiStateDiskConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(max_capacity_bytes=config.store.capacity_bytes)
        self.hints = PlaceHints()
        self._store = DiskStore(config.store, self._removed)
        self._events = {name: create_event_notifier() for name in ("store", "lookup", "load")}
        self._storing = Batches(config.store.store_threads, "histate-disk-store")
        self._loading = Batches(config.store.load_threads, "histate-disk-load")
        self._lock = threading.Lock()
        self._next_task = 0
        self._closed = False
        self._stores_done: dict[L2TaskId, L2StoreResult] = {}
        self._lookups_done: dict[L2TaskId, Bitmap] = {}
        self._loads_done: dict[L2TaskId, Bitmap] = {}
        self._seed_accounting()

    # ---- event fds

    def get_store_event_fd(self) -> int:
        """See the base class."""
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """See the base class."""
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """See the base class."""
        return int(self._events["load"].fileno())

    # ---- storing

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """See the base class. The task fails if any key could not be stored; the other keys are stored all the same."""
        task = self._new_task()

        def done(results: list[Put], written: int) -> None:
            ok = all(r in (Put.STORED, Put.PRESENT) for r in results)
            with self._lock:
                self._stores_done[task] = L2StoreResult(ok, written if ok else 0)
            self._events["store"].notify()

        self._start_put(keys, objects, None, done)
        return task

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """See the base class."""
        with self._lock:
            done, self._stores_done = self._stores_done, {}
        return done

    def put(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], places: Sequence[Place] | None = None
    ) -> Future[list[Put]]:
        """Store objects for our own code: the completion goes to the returned future, never to LMCache's
        StoreController.

        Args:
            keys: What to store.
            objects: Their buffers; the caller keeps them (read-locked in L1) until the future is done.
            places: Their places in the prefix tree; `None` takes what `hints` knows.

        Returns:
            What became of each key. The future never raises for the disk's faults.
        """
        future: Future[list[Put]] = Future()
        self._start_put(keys, objects, places, lambda results, _: future.set_result(results))
        return future

    def _start_put(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], places: Sequence[Place] | None,
        done: Callable[[list[Put], int], None],
    ) -> None:  # fmt: skip
        if len(keys) != len(objects) or (places is not None and len(places) != len(keys)):
            raise ValueError(
                f"{len(keys)} keys, {len(objects)} objects and {len(places or keys)} places must be as many"
            )
        results = [Put.FAILED] * len(keys)
        dirty: list[set[str]] = [set() for _ in keys]

        def one(at: int) -> None:
            place = self.hints.place_of(_id(keys[at])) if places is None else places[at]
            results[at] = self._put_one(keys[at], objects[at], place, dirty[at])

        def finish() -> None:
            if not self._store.sync(set().union(*dirty)):
                results[:] = [Put.FAILED if r is Put.STORED else r for r in results]
            stored = [at for at, r in enumerate(results) if r is Put.STORED]
            if stored:
                self._tell(
                    self._notify_keys_stored,
                    [keys[at] for at in stored],
                    [self._store.charge(objects[at].get_size()) for at in stored],
                )
            done(results, sum(objects[at].get_size() for at in stored))

        self._storing.run(len(keys), one, finish)

    def _put_one(self, key: ObjectKey, obj: MemoryObj, place: Place, dirty: set[str]) -> Put:
        if self._storing.closing or not obj.is_valid():
            return Put.FAILED
        try:
            namespace = self._store.namespace(key.model_name, layout_of(obj.get_shapes(), obj.get_dtypes()))
        except OSError as e:
            self._store.health.trouble(
                "write", f"the folder of {key.model_name} cannot be made: {e}; its stores are dropped"
            )
            return Put.FAILED
        return self._store.put(namespace, _id(key), _view(obj), place, obj.is_valid, dirty)

    # ---- looking up

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """See the base class. Only memory is asked, so the answer is ready on return (on a shared folder misses also
        ask the disk).
        """
        task = self._new_task()

        found = Bitmap(len(keys))

        def one(_: int) -> None:
            nonlocal found
            found = self._lookup(keys, group_layout_descs)

        def finish() -> None:
            with self._lock:
                self._lookups_done[task] = found
            self._events["lookup"].notify()

        if self._store.config.shared:
            self._loading.run(1, one, finish)
            return task
        try:
            one(0)
        except Exception:  # LMCache's loop must see a miss, not our bug
            logger.exception("a lookup of %d keys failed; it counts as a miss", len(keys))
        finish()
        return task

    def _lookup(self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        families: dict[tuple[str, int], list[int]] = {}
        for at, key in enumerate(keys):
            families.setdefault((key.model_name, key.object_group_id), []).append(at)
        for (model, group), members in families.items():
            desc = descs.get(group)
            layout = None if desc is None else layout_of(desc.shapes, desc.dtypes)
            found = self._store.lock(self._store.candidates(model, layout), [_id(keys[at]) for at in members])
            for at, hit in zip(members, found, strict=True):
                if hit:
                    bitmap.set(at)
        return bitmap

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """See the base class."""
        with self._lock:
            return self._lookups_done.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """See the base class. Waits for loads whose request gave up: their buffers are about to be reused
        (`DiskStore.unlock`).
        """
        self._store.unlock(_id(key) for key in keys)

    # ---- loading

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """See the base class. One key's failure is that key's miss."""
        task = self._new_task()

        def done(results: list[bool]) -> None:
            bitmap = Bitmap(len(keys))
            for at, ok in enumerate(results):
                if ok:
                    bitmap.set(at)
            with self._lock:
                self._loads_done[task] = bitmap
            self._events["load"].notify()

        self._start_load(keys, objects, done)
        return task

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """See the base class."""
        with self._lock:
            return self._loads_done.pop(task_id, None)

    def fetch(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Future[list[bool]]:
        """Load objects for our own code: the completion goes to the returned future, never to LMCache's
        PrefetchController.

        Args:
            keys: What to load.
            objects: Buffers of the objects' sizes; the caller keeps them until the future is done.

        Returns:
            Whether each key was loaded; a buffer whose key was not has undefined content.
        """
        future: Future[list[bool]] = Future()
        self._start_load(keys, objects, future.set_result, own=True)
        return future

    def _start_load(
        self,
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
        done: Callable[[list[bool]], None],
        own: bool = False,
    ) -> None:
        if len(keys) != len(objects):
            raise ValueError(f"{len(keys)} keys and {len(objects)} objects must be as many")
        results = [False] * len(keys)
        loads = [self._announce(key, obj, own) for key, obj in zip(keys, objects, strict=True)]

        def one(at: int) -> None:
            load, obj = loads[at], objects[at]
            if load is None:
                return
            if self._loading.closing or not obj.is_valid():
                self._store.cancel_load(load)
            else:
                results[at] = self._store.load(load, _view(obj), obj.is_valid)

        def finish() -> None:
            loaded = [keys[at] for at, ok in enumerate(results) if ok]
            if loaded:
                self._tell(self._notify_keys_accessed, loaded)
            done(results)

        self._loading.run(len(keys), one, finish)

    def _announce(self, key: ObjectKey, obj: MemoryObj, own: bool) -> Load | None:
        try:
            layout = layout_of(obj.get_shapes(), obj.get_dtypes())
            return self._store.begin_load(self._store.candidates(key.model_name, layout), _id(key), own)
        except Exception:  # a miss for this key, whatever a buffer's metadata may be
            logger.exception("the load of %s cannot start; it counts as a miss", key)
            return None

    # ---- the catalogue, deleting, usage

    def known(self) -> Iterator[Known]:
        """Everything on disk, as of now: what the eviction core needs at start. Complete once the adapter is built."""
        for e in self._store.entries():
            yield Known(_key(e.object_id), e.place, e.last_access, e.payload_bytes, e.charge)

    def set_places(self, places: Iterable[tuple[ObjectKey, Place]]) -> int:
        """Correct the places of stored objects, in the durable catalogue.

        Returns:
            How many of them are stored here; the others are ignored.
        """
        return sum(self._store.set_place(_id(key), place) for key, place in places)

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Note an access to each key that is stored here (a hit that CPU memory served, for instance)."""
        self._store.touch(_id(key) for key in keys)

    def delete_keys(self, keys: Iterable[ObjectKey]) -> DeleteReport:
        """Delete objects now, on the calling thread. What is held is passed over, without waiting; one failure stops
        nothing.
        """
        result = self._store.delete(_id(key) for key in keys)
        gone = [_key(e.object_id) for e in result.entries]
        charges = [e.charge for e in result.entries]
        if gone:
            self._tell(self._notify_keys_deleted, gone, charges)
        return DeleteReport(
            gone,
            sum(charges),
            list(map(_key, result.held)),
            list(map(_key, result.missing)),
            list(map(_key, result.failed)),
        )

    def delete(self, keys: list[ObjectKey]) -> None:
        """See the base class; `delete_keys` also says what happened."""
        self.delete_keys(keys)

    def get_usage(self) -> AdapterUsage:
        """See the base class. Counts everything: objects, temporary files, overhead; by salt, objects only."""
        usage = self._store.usage()
        return AdapterUsage(usage.used_bytes, usage.capacity_bytes, usage.bytes_by_salt)

    @property
    def store(self) -> DiskStore:
        """The store underneath, for its `usage`, `health` and `config`."""
        return self._store

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """See the base class. Pages are ordered by namespace and file name; keys stored meanwhile may or may not
        appear.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be positive, not {page_size}")
        entries = (e for e in self._store.entries() if model_name is None or e.object_id.model == model_name)
        after = ((f"{e.namespace.name}/{e.file}", e) for e in entries)
        page = heapq.nsmallest(page_size + 1, (p for p in after if cursor is None or p[0] > cursor), key=lambda p: p[0])
        more = len(page) > page_size
        shown = page[:page_size]
        return KeyListPage(
            tuple(KeyEntry(_key(e.object_id).to_encoded_object_key(), e.payload_bytes) for _, e in shown),
            shown[-1][0] if more else None,
        )

    def register_listener(self, listener: L2AdapterListener) -> None:
        """See the base class. The listener is told at once of everything that the disk holds already."""
        super().register_listener(listener)
        entries = sorted(self._store.entries(), key=lambda e: e.last_access)
        if entries:
            listener.on_l2_keys_stored([_key(e.object_id) for e in entries], [e.charge for e in entries])

    def report_status(self) -> dict[str, Any]:
        """See the base class."""
        usage = self._store.usage()
        counters, troubles = self._store.health.report()
        return {
            "is_healthy": not self._closed and not troubles.keys() & {"write", "folder", "read"},
            "type": type(self).__name__,
            "base_path": str(self._store.config.root),
            "io": self._store.io_name,
            "shared": self._store.config.shared,
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "reserved_bytes": usage.reserved_bytes,
            "objects": usage.objects,
            "troubles": troubles,
            "counters": counters,
        }

    def close(self) -> None:
        """See the base class. Running reads and writes end first, waiting ones do not start; then no buffer is
        touched any more.
        """
        if self._closed:
            return
        self._closed = True
        self._storing.close()
        self._loading.close()
        self._store.close()
        for event in self._events.values():
            event.close()

    # ---- plumbing

    def _new_task(self) -> L2TaskId:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _tell(self, notify: Callable[..., None], *args: Any) -> None:
        try:
            notify(*args)
        except Exception:
            logger.exception("a listener of the disk tier failed")

    def _removed(self, entries: list[Entry]) -> None:
        if entries:
            self._tell(self._notify_keys_deleted, [_key(e.object_id) for e in entries], [e.charge for e in entries])

    def _seed_accounting(self) -> None:
        # The base class counts what passes through its notifications; what was on disk before must be in its sums as
        # well.
        usage = self._store.usage()
        with self._usage_lock:
            self._bytes_by_cache_salt = dict(usage.bytes_by_salt)
            self._total_bytes_used = sum(usage.bytes_by_salt.values())


def _id(key: ObjectKey) -> ObjectId:
    return ObjectId(key.model_name, key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)


def _key(object_id: ObjectId) -> ObjectKey:
    model, chunk_hash, kv_rank, group, salt = object_id
    return ObjectKey(chunk_hash=chunk_hash, model_name=model, kv_rank=kv_rank, object_group_id=group, cache_salt=salt)


def _view(obj: MemoryObj) -> memoryview:
    """An object's bytes. Through numpy, because LMCache's own view has a format that memoryview cannot slice-assign."""
    return np.frombuffer(obj.byte_array, np.uint8).data
