"""What the parts of a store have in common: its state, and the few steps that all of them take on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

from lmcache_histate.backends.disk.catalogue import Catalogue, Row
from lmcache_histate.backends.disk.health import Health
from lmcache_histate.backends.disk.index import Entry, Index
from lmcache_histate.backends.disk.io import RecordIO
from lmcache_histate.backends.disk.lock import Scratch
from lmcache_histate.backends.disk.namespace import Namespace, Namespaces
from lmcache_histate.backends.disk.record import ObjectId
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.space import Space


class Put(Enum):
    """What became of an object that was to be stored."""

    STORED = "stored"
    PRESENT = "present"
    """It was there already."""

    FULL = "full"
    """No room: capacity or free-space floor. Nothing changed."""

    FAILED = "failed"
    """The disk or the caller's buffer failed. Nothing was published."""


Claim = Future[Put | None]
"""Held by whoever writes or deletes an object; done with what became of it, `None` after a deletion."""


@dataclass
class Core:
    """State of one open store. `mutex` protects `index`, its entries' locks, and `busy`; it is never held during disk
    I/O.
    """

    config: StoreConfig
    health: Health
    space: Space
    names: Namespaces
    scratch: Scratch
    io: RecordIO
    on_removed: Callable[[list[Entry]], None]
    """Told of entries that the store removed by itself, never under `mutex`."""

    index: Index = field(default_factory=Index)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    busy: dict[tuple[Namespace, ObjectId], Claim] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loads_changed = threading.Condition(self.mutex)
        self.catalogue = Catalogue(self.config.root, self.config.shared, self.all_rows)

    def take_in(self, entry: Entry) -> None:
        """Know an entry from now on."""
        with self.mutex:
            self.index.add(entry)
        self.note(entry)

    def note(self, entry: Entry) -> None:
        """Have the catalogue learn what an entry says now."""
        self.catalogue.put(entry.namespace.name, entry.file, entry.row())

    def claim(self, entry: Entry) -> Claim | None:
        """Take an entry out of the index and keep its key from being written until `settle`. Call it under `mutex`.

        Returns:
            `None` if somebody else was first.
        """
        key = (entry.namespace, entry.object_id)
        if key in self.busy or not self.index.remove(entry):
            return None
        mine: Claim = Future()
        self.busy[key] = mine
        return mine

    def settle(self, namespace: Namespace, object_id: ObjectId, mine: Claim, outcome: Put | None) -> None:
        """End a claim."""
        with self.mutex:
            del self.busy[namespace, object_id]
        mine.set_result(outcome)

    def entries(self) -> list[Entry]:
        """All entries, as they are now."""
        with self.mutex:
            return list(self.index)

    def entries_of(self, object_id: ObjectId) -> list[Entry]:
        """An object's entries, in all namespaces."""
        with self.mutex:
            return self.index.of(object_id)

    def all_rows(self) -> Iterator[tuple[str, str, Row]]:
        """All that a catalogue of this store must say."""
        for entry in self.entries():
            yield entry.namespace.name, entry.file, entry.row()
