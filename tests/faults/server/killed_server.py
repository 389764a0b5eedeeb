"""Everything of a server but its sockets, in a process that is killed: `killed_server.py`, one JSON line a server.

Importing LMCache takes most of a server's start, so this process imports it once and forks a child for each line that it
reads (`Order`). A child opens the folder as the next server does, compares every object in it with what it must be, says
so, and then works it hard until it is killed. On standard output: what children say, and how each ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "backends"))
sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "disk"))

import torch
from disk_boxes import aligned
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import get_arg_parser
from phases import DEMOTE, EVICT, LOAD, STORE, Phases
from storage import Storage, content, hybrid_config
from workload import Workload

from lmcache_histate.backends.disk.adapter import HiStateDiskAdapter
from lmcache_histate.backends.disk.record import ObjectId
from lmcache_histate.backends.disk.store import DiskStore
from lmcache_histate.backends.room import RoomMaker
from lmcache_histate.geometry import GIB

THREADS = 2
GIVE_UP_SECONDS = 120.0


@dataclass(frozen=True)
class Order:
    """One server to run."""

    folder: str
    cpu_bytes: int
    disk_bytes: int
    seed: int
    phases: str
    """File of the `Phases`."""

    journal: str
    """File that outlives the server: what it reported as stored on disk, and what it then set out to delete."""

    expected: str
    """File with the names of the objects that must be there, one a line."""

    settings: dict[str, Any]
    """The `histate:` section."""


class Journal:
    """Says in a file what the disk tier promised. Lines are `+name` and `-name`."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._deleting: dict[str, int] = {}
        self.deleted: set[str] = set()

    def stored(self, store: DiskStore, object_ids: list[ObjectId]) -> None:
        """Stores were reported. One that is being deleted again by now is promised no more."""
        with self._lock:
            for object_id in object_ids:
                name = name_of(object_id)
                if name not in self._deleting and store._core.entries_of(object_id):
                    os.write(self._fd, f"+{name}\n".encode())

    def deleting(self, object_ids: list[ObjectId], change: int) -> None:
        """A deletion begins (1) or has ended (-1)."""
        with self._lock:
            for name in map(name_of, object_ids):
                self._deleting[name] = self._deleting.get(name, 0) + change
                if change > 0:
                    self.deleted.add(name)
                    os.write(self._fd, f"-{name}\n".encode())
                elif not self._deleting[name]:
                    del self._deleting[name]


def name_of(object_id: ObjectId) -> str:
    """An object in one word."""
    return f"{object_id.chunk_hash.hex()}.{object_id.kv_rank:x}.{object_id.group}"


def watch(phases: Phases, journal: Journal) -> None:
    """Have the real parts tell what they do; nothing that they do is changed."""
    start_put, start_load = HiStateDiskAdapter._start_put, HiStateDiskAdapter._start_load
    notify, delete, delete_victim = HiStateDiskAdapter._notify_keys_stored, DiskStore.delete, RoomMaker._delete_victim

    def put(self: Any, keys: Any, objects: Any, places: Any, done: Any) -> None:
        phase = STORE if places is None else DEMOTE  # only what moves down says where it belongs

        def ended(*results: Any) -> None:
            done(*results)
            phases.add(phase, -1)

        phases.add(phase, 1)
        start_put(self, keys, objects, places, ended)

    def load(self: Any, keys: Any, objects: Any, done: Any, own: bool = False) -> None:
        def ended(results: Any) -> None:
            done(results)
            phases.add(LOAD, -1)

        phases.add(LOAD, 1)
        start_load(self, keys, objects, ended, own)

    def victim(self: Any, *arguments: Any, **more: Any) -> int:
        with phases.during(EVICT):
            return delete_victim(self, *arguments, **more)

    def delete_noted(self: Any, object_ids: Any) -> Any:
        object_ids = list(object_ids)
        journal.deleting(object_ids, 1)
        try:
            return delete(self, object_ids)
        finally:
            journal.deleting(object_ids, -1)

    def notify_noted(self: Any, keys: list[ObjectKey], sizes: Any) -> None:
        journal.stored(self.store, [identity(key) for key in keys])
        notify(self, keys, sizes)

    HiStateDiskAdapter._start_put, HiStateDiskAdapter._start_load = put, load
    HiStateDiskAdapter._notify_keys_stored, DiskStore.delete = notify_noted, delete_noted
    RoomMaker._delete_victim = victim


def identity(key: ObjectKey) -> ObjectId:
    """An object key in the store's words."""
    return ObjectId(key.model_name, key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)


def check(storage: Storage, journal: Journal, expected: set[str]) -> int:
    """Compare everything on disk with what it must be; returns how many objects there are.

    Raises:
        AssertionError: A wrong byte, a promised object that is gone, or damage.
    """
    (adapter,) = [adapter for _, adapter in storage.manager.l2_adapters()]
    store, checked, there = adapter.store, 0, set()
    counters = store.health.report()[0]
    assert counters.get("bad_files_removed", 0) == 0, "a published record was not whole"
    assert counters.get("trimmed", 0) == 0, "more bytes than the capacity"
    for known in list(adapter.known()):
        object_id = identity(known.key)
        there.add(name_of(object_id))
        load = store.begin_load(store.candidates(known.key.model_name, None), object_id, own=True)
        if load is None:  # evicted since
            continue
        buffer = aligned(known.payload_bytes)
        if store.load(load, buffer, lambda: True):
            want = content(known.key, known.payload_bytes)
            assert torch.equal(torch.frombuffer(buffer, dtype=torch.uint8), want), f"other bytes: {known.key}"
            checked += 1
    lost = expected - there - journal.deleted
    assert not lost, f"{len(lost)} of {len(expected)} objects that were reported as stored are gone: {sorted(lost)[:3]}"
    return checked


def serve(order: Order) -> None:
    """One server's life."""
    phases, journal = Phases(Path(order.phases)), Journal(order.journal)
    watch(phases, journal)
    config = hybrid_config(Path(order.folder), order.cpu_bytes / GIB, order.disk_bytes / GIB, **order.settings)
    storage = Storage(config)
    expected = set(Path(order.expected).read_text().split())
    say(checked=check(storage, journal, expected), expected=len(expected))
    give_up = time.monotonic() + GIVE_UP_SECONDS

    def work(thread: int) -> None:
        try:
            workload = Workload(storage, order.seed * THREADS + thread)
            while time.monotonic() < give_up:
                workload.turn()
        except BaseException:
            say(error=traceback.format_exc())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(error="nobody killed this server")


def say(**words: Any) -> None:
    """One line for the test."""
    os.write(1, json.dumps(words).encode() + b"\n")


def main() -> None:
    """Fork a server for each line of standard input, one at a time."""
    get_arg_parser()  # imports every adapter of LMCache
    say(ready=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            try:
                serve(order)
            except BaseException:
                say(error=traceback.format_exc())
            finally:
                os._exit(1)
        say(pid=pid)
        _, status = os.waitpid(pid, 0)
        say(ended=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
