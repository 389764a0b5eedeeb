"""What happens in LMCache's tiers, as plain events for the one thread that owns the core.

LMCache's listeners run under its locks and on its request threads, so they only append to a queue here.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1ManagerListener, L2AdapterListener
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventCallback, EventSubscriber

from lmcache_histate.backends.disk.core import Put
from lmcache_histate.state_store.objects import Tier

MAX_LOADS = 1024
"""Loads from below whose end is waited for."""


class Change(Enum):
    """What became of some objects."""

    STORED = auto()
    REMOVED = auto()


@dataclass(frozen=True)
class ObjectsChanged:
    """Objects entered or left a tier at ``time`` (seconds, monotonic)."""

    change: Change
    tier: Tier
    keys: Sequence[ObjectKey]
    time: float


class RemoteRow(NamedTuple):
    """Keys of one object group and rank, in prompt order, and the indices of those that a remote tier holds."""

    keys: Sequence[ObjectKey]
    held: Sequence[int]


@dataclass(frozen=True)
class Looked:
    """A prompt was looked up: its chunks in order, and how far KV and snapshots reached."""

    model_name: str
    world_size: int
    cache_salt: str
    chunk_hashes: Sequence[bytes]
    kv_chunks: int
    """Leading chunks whose KV some tier holds."""
    hit_chunks: int
    """Chunks that will be restored: a snapshot stands at the end of the last one."""
    time: float
    remote: Sequence[RemoteRow] | None = None
    """What remote tiers hold of it, a row for each object group and rank; None without a remote tier."""


@dataclass(frozen=True)
class Touched:
    """LMCache touched objects: all of a request that ended, or those in CPU memory that a lookup hit."""

    keys: Sequence[ObjectKey]
    time: float


@dataclass(frozen=True)
class Chained:
    """Which chunk follows which, from a store: hashes in order, the first one's parent and its start in tokens."""

    chunk_hashes: Sequence[bytes]
    parent: bytes | None
    start: int
    time: float


@dataclass(frozen=True)
class SnapshotsReplaced:
    """Snapshots of an unfinished answer that a later one has replaced: chunk hashes in the namespace."""

    model_name: str
    world_size: int
    cache_salt: str
    chunk_hashes: Sequence[bytes]
    time: float


@dataclass(frozen=True)
class MoveEnded:
    """The disk tier is done with objects that were being moved down."""

    keys: Sequence[ObjectKey]
    results: Sequence[Put]


@dataclass(frozen=True)
class Timed:
    """The engine prefilled positions [start, end) of a prompt in ``milliseconds``."""

    start: int
    end: int
    milliseconds: float


@dataclass(frozen=True)
class Restored:
    """``nbytes`` were read back from ``tier`` in ``milliseconds``."""

    tier: Tier
    nbytes: int
    milliseconds: float


@dataclass(frozen=True)
class AllocationFailed:
    """CPU memory had no room for a store or for what was read back."""


StoreEvent = (
    ObjectsChanged | Looked | Touched | Chained | SnapshotsReplaced | MoveEnded | Timed | Restored | AllocationFailed
)


class EventQueue:
    """Many writers, one reader. Appending costs about a microsecond and never waits."""

    def __init__(self) -> None:
        self._events: deque[StoreEvent] = deque()
        self._wake = threading.Event()

    def put(self, event: StoreEvent) -> None:
        """Append an event and wake the reader."""
        self._events.append(event)
        self._wake.set()

    def wake(self) -> None:
        """Wake the reader without an event."""
        self._wake.set()

    def take(self, timeout: float) -> list[StoreEvent]:
        """Wait up to ``timeout`` seconds and return everything queued, oldest first."""
        self._wake.wait(timeout)
        self._wake.clear()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def __len__(self) -> int:
        return len(self._events)


class CpuListener(L1ManagerListener):
    """What enters and leaves CPU memory (LMCache's L1)."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None:
        """vLLM stored objects."""
        self._queue.put(ObjectsChanged(Change.STORED, Tier.CPU, tuple(keys), time.monotonic()))

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[ObjectKey]) -> None:
        """Objects were read back from a lower tier."""
        self._queue.put(ObjectsChanged(Change.STORED, Tier.CPU, tuple(keys), time.monotonic()))

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        """Objects left CPU memory, whoever removed them."""
        if keys:
            self._queue.put(ObjectsChanged(Change.REMOVED, Tier.CPU, tuple(keys), time.monotonic()))

    def on_l1_keys_reserved_read(self, keys: list[ObjectKey]) -> None:
        """Not needed: hits are seen whole, at lookup."""

    def on_l1_keys_read_finished(self, keys: list[ObjectKey]) -> None:
        """Not needed."""

    def on_l1_keys_reserved_write(self, keys: list[ObjectKey]) -> None:
        """Not needed: only finished writes count."""

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """A request ended, or hit something; says nothing of what was used: a finished request touches all its keys."""
        if keys:
            self._queue.put(Touched(keys, time.monotonic()))


class LowerTierListener(L2AdapterListener):
    """What enters and leaves one lower tier (an LMCache L2 adapter)."""

    def __init__(self, queue: EventQueue, tier: Tier) -> None:
        self._queue = queue
        self._tier = tier

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """Objects were written."""
        self._queue.put(ObjectsChanged(Change.STORED, self._tier, tuple(keys), time.monotonic()))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        """Not needed: hits are seen whole, at lookup."""

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        """Objects were removed."""
        self._queue.put(ObjectsChanged(Change.REMOVED, self._tier, tuple(keys), time.monotonic()))


class BusSubscriber(EventSubscriber):
    """Learns parents and positions of stored chunks (``MP_TOKENS``), and that a store found no room.

    LMCache's bus is bounded and drops, so both are hints: a chunk whose place was lost gets it at its next lookup, and the
    watermarks work without being told. So is how long loads from below took (``L2_LOAD_TASK_*``).

    Args:
        queue: Where events go.
        disk_index: LMCache's index of the disk adapter, or None without one; the others are remote tiers.
    """

    def __init__(self, queue: EventQueue, disk_index: int | None = None) -> None:
        self._queue = queue
        self._disk_index = disk_index
        # (adapter, task) -> when the load was submitted, and its bytes. The bus may drop the end of one.
        self._loads: OrderedDict[tuple[int, int], tuple[float, int]] = OrderedDict()

    def get_subscriptions(self) -> dict[EventType, EventCallback]:
        """Event type -> what to do."""
        return {
            EventType.MP_TOKENS: self._on_tokens,
            EventType.L1_ALLOCATION_FAILED: lambda _: self._queue.put(AllocationFailed()),
            EventType.L2_LOAD_TASK_SUBMITTED: self._on_load_submitted,
            EventType.L2_LOAD_TASK_COMPLETED: self._on_load_completed,
        }

    def _on_load_submitted(self, event: Event) -> None:
        data = event.metadata
        self._loads[data["adapter_index"], data["task_id"]] = event.timestamp, data["total_bytes"]
        if len(self._loads) > MAX_LOADS:
            self._loads.popitem(last=False)

    def _on_load_completed(self, event: Event) -> None:
        index = event.metadata["adapter_index"]
        submitted, nbytes = self._loads.pop((index, event.metadata["task_id"]), (0.0, 0))
        if nbytes:
            tier = Tier.DISK if index == self._disk_index else Tier.REMOTE
            self._queue.put(Restored(tier, nbytes, 1e3 * (event.timestamp - submitted)))

    def _on_tokens(self, event: Event) -> None:
        data = event.metadata
        self._queue.put(
            Chained(data["chunk_hashes"], data["parent_hashes"][0], data["token_offsets"][0], time.monotonic())
        )
