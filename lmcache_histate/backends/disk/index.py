"""What the store holds, in memory: one entry an object, with its locks. Pure bookkeeping; the store's own lock
protects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lmcache_histate.backends.disk.catalogue import Row
from lmcache_histate.backends.disk.namespace import Namespace
from lmcache_histate.backends.disk.record import ObjectId, Place, file_name

LOCK_LEASE_SECONDS = 600.0
"""A lock that nobody gave back for this long is void: a lost request must not keep its objects for ever."""


class Load:
    """A load that was announced: it waits, runs, or was abandoned before it ran."""

    __slots__ = ("abandoned", "entry", "own", "running")

    def __init__(self, entry: Entry, own: bool) -> None:
        self.entry = entry
        self.own = own
        """Of our own code's making: no lock of LMCache's stands behind it, so unlocking says nothing about its buffer."""
        self.running = False
        self.abandoned = False


class Entry:
    """One published object."""

    __slots__ = (
        "charge",
        "deadline",
        "file",
        "last_access",
        "loads",
        "locks",
        "namespace",
        "object_id",
        "payload_bytes",
        "place",
        "stored_at",
    )

    def __init__(
        self,
        namespace: Namespace,
        object_id: ObjectId,
        payload_bytes: int,
        charge: int,
        stored_at: float,
        last_access: float,
        place: Place,
        file: str = "",
    ) -> None:
        self.namespace = namespace
        self.object_id = object_id
        self.file = file or file_name(object_id)
        self.payload_bytes = payload_bytes
        self.charge = charge
        """Bytes that the object is accounted with."""
        self.stored_at = stored_at
        self.last_access = last_access
        """Unix seconds; never steps back."""
        self.place = place
        self.locks = 0
        self.deadline = 0.0
        """When the locks lapse, on the monotonic clock."""
        self.loads: list[Load] = []
        """Loads that are reading it or wait to."""

    def held(self, monotonic: float) -> bool:
        """Whether somebody counts on the object: deleting must pass it over."""
        return bool(self.loads) or (self.locks > 0 and monotonic < self.deadline)

    def lock(self, monotonic: float) -> None:
        """Add a lock, and a new lease for all of them. Locks whose lease had lapsed are void."""
        self.locks = self.locks + 1 if monotonic < self.deadline else 1
        self.deadline = monotonic + LOCK_LEASE_SECONDS

    def abandon(self) -> bool:
        """After a lock was given back: whether no load is left without one.

        Loads that nobody can be waiting for (no lock is left) are abandoned; those that did not start yet are gone at
        once.
        """
        theirs = [load for load in self.loads if not load.own]
        if self.locks == 0:
            for load in theirs:
                load.abandoned = True
                if not load.running:
                    self.loads.remove(load)
        return sum(not load.own for load in self.loads) <= self.locks

    def row(self) -> Row:
        """The entry as the catalogue keeps it."""
        return Row(self.object_id, self.payload_bytes, self.stored_at, self.last_access, self.place)


class Index:
    """Entries by namespace and object."""

    def __init__(self) -> None:
        self._entries: dict[Namespace, dict[ObjectId, Entry]] = {}
        self._lingering: list[Entry] = []  # removed (damaged, vanished) while other loads of theirs still ran
        self.bytes_by_salt: dict[str, int] = {}
        """Charges of the entries, by tenant; only positive ones."""

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __iter__(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from entries.values()

    def add(self, entry: Entry) -> None:
        """Take an entry in, in place of the one that was there."""
        entries = self._entries.setdefault(entry.namespace, {})
        self._account(entries.get(entry.object_id), -1)
        entries[entry.object_id] = entry
        self._account(entry, 1)

    def get(self, namespaces: Iterable[Namespace], object_id: ObjectId) -> Entry | None:
        """The object's entry in the first of these namespaces that has it."""
        for namespace in namespaces:
            entry = self._entries.get(namespace, {}).get(object_id)
            if entry is not None:
                return entry
        return None

    def remove(self, entry: Entry) -> bool:
        """Forget an entry; false if it was not, or no longer, the one that is held."""
        entries = self._entries.get(entry.namespace, {})
        if entries.get(entry.object_id) is not entry:
            return False
        del entries[entry.object_id]
        self._account(entry, -1)
        if entry.loads:
            self._lingering.append(entry)
        return True

    def end_load(self, load: Load) -> None:
        """Take a load off its entry."""
        load.entry.loads.remove(load)
        if not load.entry.loads and load.entry in self._lingering:
            self._lingering.remove(load.entry)

    def in_use(self, object_id: ObjectId) -> list[Entry]:
        """Entries of an object in all namespaces, with those that are gone but still being read."""
        self._lingering = [e for e in self._lingering if e.loads]
        return self.of(object_id) + [e for e in self._lingering if e.object_id == object_id]

    def _account(self, entry: Entry | None, sign: int) -> None:
        if entry is None:
            return
        salt = entry.object_id.salt
        total = self.bytes_by_salt.get(salt, 0) + sign * entry.charge
        if total > 0:
            self.bytes_by_salt[salt] = total
        else:
            self.bytes_by_salt.pop(salt, None)

    def of(self, object_id: ObjectId) -> list[Entry]:
        """Entries of an object in all namespaces."""
        return [e for entries in self._entries.values() if (e := entries.get(object_id)) is not None]
