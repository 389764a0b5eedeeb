"""Objects to store, and a box around a store with the few moves that tests make on it."""

from __future__ import annotations

import mmap
import random
import threading
from pathlib import Path

from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.namespace import Layout, Namespace
from lmcache_histate.backends.disk.record import NOWHERE, ObjectId, Place
from lmcache_histate.backends.disk.store import DiskStore

MIB = 1 << 20
MODEL = "org/hybrid-9b"


def aligned(size: int, seed: int | None = None) -> memoryview:
    """A page-aligned buffer, zero or filled from a seed."""
    buffer = memoryview(mmap.mmap(-1, max(1, size)))[:size]
    if seed is not None:
        buffer[:] = random.Random(seed).randbytes(size)
    return buffer


def oid(number: int, salt: str = "", model: str = MODEL, group: int = 0, rank: int = 1) -> ObjectId:
    return ObjectId(model, number.to_bytes(32, "big"), rank, group, salt)


def layout(size: int, dtype: str = "torch.bfloat16") -> Layout:
    return (((size,), dtype),)


class Box:
    """A store, and the few moves that tests make on it."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store

    def ns(self, size: int = 0, model: str = MODEL) -> Namespace:
        return self.store.namespace(model, layout(size))

    def put(self, number: int, size: int = 10_000, place: Place = NOWHERE, **which: object) -> Put:
        object_id = oid(number, **which)  # type: ignore[arg-type]
        return self.store.put(
            self.ns(model=object_id.model), object_id, aligned(size, number), place, lambda: True, None
        )

    def get(self, number: int, size: int = 10_000, model: str = MODEL, **which: object) -> bytes | None:
        """The object's bytes, `None` for a miss."""
        load = self.store.begin_load(self.store.candidates(model, layout(0)), oid(number, model=model, **which))  # type: ignore[arg-type]
        if load is None:
            return None
        buffer = aligned(size)
        return bytes(buffer) if self.store.load(load, buffer, lambda: True) else None

    def intact(self, number: int, size: int = 10_000) -> bool:
        return self.get(number, size) == bytes(aligned(size, number))

    def file(self, number: int) -> Path:
        (entry,) = [e for e in self.store.entries() if e.object_id.chunk_hash == number.to_bytes(32, "big")]
        return Path(entry.namespace.path(entry.file))


def bytes_on_disk(root: Path) -> int:
    """What `du` would say."""
    total = 0
    for path in [root, *root.rglob("*")]:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class SlowIO:
    """The real I/O, held up between the read and its return, as a slow disk would."""

    def __init__(self, real: object) -> None:
        self._real = real
        self.name = "slow"
        self.reading, self.go_on = threading.Event(), threading.Event()

    def write(self, *args: object) -> None:
        self._real.write(*args)  # type: ignore[attr-defined]

    def read(self, *args: object) -> tuple[bytes, int]:
        self.reading.set()
        assert self.go_on.wait(30)
        return self._real.read(*args)  # type: ignore[attr-defined, no-any-return]
