"""The one thread that talks to the directory, so that nobody else ever waits for it.

Whoever knows of a change puts it into a bounded queue and goes on; reads are answered from the directory's local view. The
thread sends what is queued in batches, renews the lease, keeps the view fresh, and after any loss says everything anew: it
registers again, which voids all that was said, and asks the owner of the prefix tree for what is held, a page at a time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.mp_observability.otel_init import register_gauge

from lmcache_histate.state_store.directory.protocol import (
    AccessDenied,
    Change,
    ChunkHeld,
    Directory,
    DirectoryError,
    LeaseLost,
    NamespaceFacts,
    OutOfMemory,
    SessionEnded,
    SessionHit,
    Unreachable,
)

logger = init_logger(__name__)

BATCH = 256
"""Changes sent in one round trip."""
QUEUE_LIMIT = 1 << 17
"""Changes that wait at most; then the oldest go, and everything is said anew."""
POLL_SECONDS = 0.25
"""The view is refreshed this often, or twenty times in a short lease."""
FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0
CLOSE_SECONDS = 5.0

Source = Callable[[str, int], tuple[Sequence[ChunkHeld], int | None]]
"""What this instance holds in a namespace, from a cursor on (0: from the start): a page of at most some hundred chunks, and
the next cursor, or None after the last page. Called on the writer's thread. A change that happens after a page was made must
be put into the queue after it was made: read the page and put changes under the same lock."""


class DirectoryState(Enum):
    """How the directory is doing; the value is what metrics show."""

    CONNECTING = 0
    CONNECTED = 1
    LOST = 2
    ACCESS_DENIED = 3
    OUT_OF_MEMORY = 4
    UNUSABLE = 5


class _Batch(NamedTuple):
    namespace: str
    changes: list[Change]


class DirectoryWriter:
    """Queue, thread and health of one directory.

    Args:
        directory: Local or Redis. Only its reading methods may be called by others once this runs.
        source: What this instance holds, to say it anew.
        queue_limit: Changes that wait at most.
        poll_s: Seconds between polls, at most a twentieth of the lease.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        directory: Directory,
        source: Source,
        queue_limit: int = QUEUE_LIMIT,
        poll_s: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._source = source
        self._limit = queue_limit
        self._poll_s = min(poll_s, directory.lease_s / 20)
        self._max_retry_s = min(MAX_RETRY_SECONDS, directory.lease_s / 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, Sequence[Change]]] = deque()
        self._queued = 0
        self._overflowed = False
        self._namespaces: dict[str, NamespaceFacts] = {}
        self._registered: set[str] = set()
        self._pages: deque[tuple[str, int]] = deque()
        self._in_hand: deque[_Batch] = deque()
        self._next_poll = 0.0
        self._state = DirectoryState.CONNECTING
        self._name = ""
        self._other_schemas: tuple[int, ...] = ()
        self._counts = dict.fromkeys(("published", "dropped", "resyncs", "failures", "names_lost"), 0)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="histate-directory", daemon=True)

    # Called by any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send what is queued if the server answers, give up the lease, and end. At most some seconds."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    def add_namespace(self, namespace: str, facts: NamespaceFacts) -> None:
        """Take part in a namespace from now on; what is held in it already is read from the source. O(1)."""
        with self._lock:
            if self._namespaces.get(namespace) == facts:
                return
            self._namespaces = {**self._namespaces, namespace: facts}
        self._wake.set()

    def put(self, namespace: str, changes: Sequence[Change]) -> None:
        """Have changes published soon. Never waits; O(1), or O(changes dropped) when the queue is full.

        Args:
            namespace: One that was added.
            changes: In order; not changed by the caller afterwards.
        """
        if not changes:
            return
        with self._lock:
            self._queue.append((namespace, changes))
            self._queued += len(changes)
            while self._queued > self._limit:
                _, oldest = self._queue.popleft()
                self._queued -= len(oldest)
                self._counts["dropped"] += len(oldest)
                self._overflowed = True
        self._wake.set()

    def status(self) -> dict[str, float]:
        """Figures for `/status` and metrics. O(namespaces)."""
        age = self.directory.age(self._clock())
        return {
            "directory_state": self._state.value,
            "directory_connected": int(self._state is DirectoryState.CONNECTED),
            "directory_queued": self._queued,
            **{f"directory_{name}": count for name, count in self._counts.items()},
            "directory_age_seconds": age if age < float("inf") else -1.0,
            "directory_members": max((self._members(name) for name in self._namespaces), default=0),
            "directory_other_schemas": len(self._other_schemas),
        }

    def _members(self, namespace: str) -> int:
        return len(self.directory.instances(namespace, self._clock()))

    @property
    def state(self) -> DirectoryState:
        """How the directory is doing."""
        return self._state

    def register_metrics(self) -> None:
        """Export `status` as gauges named ``histate.directory_*`` where LMCache exports its own."""
        for name in self.status():
            register_gauge(
                "histate",
                f"histate.{name}",
                f"HiState: {name.replace('_', ' ')}.",
                lambda name=name: float(self.status()[name]),
            )

    # The thread

    def _run(self) -> None:
        retry_s = 0.0
        while not self._stop.is_set():
            try:
                self._round()
                self._became(DirectoryState.CONNECTED, "")
                retry_s = 0.0
                # What is queued within the next moments goes into the same batch.
                wait = 0.0 if self._in_hand or self._pages else max(0.0, self._next_poll - self._clock())
                self._wake.wait(wait)
                self._wake.clear()
            except LeaseLost:
                # Registered again, and everything said anew, in the next round; the first time without a pause.
                self._start_over()
                self._stop.wait(retry_s * random.uniform(0.5, 1.0))
                retry_s = self._longer(retry_s)
            except DirectoryError as error:
                self._failed(error)
                retry_s = self._longer(retry_s)
                # Not all instances at once, when the server is back.
                self._stop.wait(retry_s * random.uniform(0.5, 1.0))
            except Exception:
                # A bug here costs cross-instance knowledge, never the server.
                self._counts["failures"] += 1
                logger.exception("HiState's directory thread failed on one round; it starts over")
                self._start_over()
                retry_s = self._longer(retry_s)
                self._stop.wait(retry_s)
        self._finish()

    def _longer(self, retry_s: float) -> float:
        return min(self._max_retry_s, max(FIRST_RETRY_SECONDS, 2 * retry_s))

    def _finish(self) -> None:
        try:
            if self._state is DirectoryState.CONNECTED:
                self._take_queued()
                while self._in_hand:
                    self._publish_one()
        except DirectoryError:
            pass
        self.directory.close()

    def _round(self) -> None:
        """One step of everything that is due. Raises `DirectoryError`."""
        with self._lock:
            overflowed, self._overflowed = self._overflowed, False
        if overflowed:
            logger.warning(
                "HiState's directory queue was full: %d changes were dropped so far; everything is published anew",
                self._counts["dropped"],
            )
            self._start_over()
        for namespace, facts in self._namespaces.items():
            if namespace not in self._registered:
                self._register(namespace, facts)
        if self._clock() >= self._next_poll:
            self.directory.poll(self._clock())
            self._next_poll = self._clock() + self._poll_s
        if self._pages and not self._in_hand:
            self._take_page()
        self._take_queued()
        # Not all that is in hand at once: the lease must be renewed in time.
        for _ in range(min(8, len(self._in_hand))):
            self._publish_one()

    def _register(self, namespace: str, facts: NamespaceFacts) -> None:
        registration = self.directory.register(namespace, facts, self._clock())
        self._registered.add(namespace)
        self._pages = deque(page for page in self._pages if page[0] != namespace)
        self._pages.append((namespace, 0))
        self._counts["resyncs"] += 1
        if registration.displaced:
            logger.warning(
                "HiState's directory: this instance took the name %s from one whose lease was still good. If that was "
                "itself before a restart, all is well; else give each instance a name of its own (histate.instance)",
                registration.name,
            )
        if self._name and registration.name != self._name:
            self._counts["names_lost"] += 1
            logger.error(
                "HiState's directory: another instance claimed the name %s; this one goes on as %s. Give each instance a "
                "name of its own (histate.instance)",
                self._name,
                registration.name,
            )
        self._name = registration.name
        if registration.other_schemas != self._other_schemas:
            self._other_schemas = registration.other_schemas
            if self._other_schemas:
                logger.warning(
                    "HiState's directory: instances with schema version %s use the same server. They and this one do not "
                    "see each other until all run the same version of HiState",
                    ", ".join(map(str, self._other_schemas)),
                )

    def _take_page(self) -> None:
        namespace, cursor = self._pages.popleft()
        chunks, following = self._source(namespace, cursor)
        if following is not None:
            self._pages.appendleft((namespace, following))
        self._in_hand.extend(_Batch(namespace, list(chunks[at : at + BATCH])) for at in range(0, len(chunks), BATCH))

    def _take_queued(self) -> None:
        """Move what is queued into batches; of several states of one thing only the last is kept. O(changes)."""
        if self._in_hand:
            return  # in order: what is in hand is older
        latest: dict[str, dict[tuple[type, bytes], Change]] = {}
        taken = 0
        with self._lock:
            while self._queue and taken < 8 * BATCH:
                namespace, changes = self._queue.popleft()
                self._queued -= len(changes)
                taken += len(changes)
                merged = latest.setdefault(namespace, {})
                for change in changes:
                    merge(merged, change)
        for namespace, merged in latest.items():
            if namespace in self._registered:
                # Chunks first: a session's end names a chunk.
                changes = sorted(merged.values(), key=lambda change: not isinstance(change, ChunkHeld))
                self._in_hand.extend(
                    _Batch(namespace, changes[at : at + BATCH]) for at in range(0, len(changes), BATCH)
                )

    def _publish_one(self) -> None:
        batch = self._in_hand[0]
        # It stays in hand until it succeeded: after an unknown outcome the very same batch is sent again.
        self.directory.publish(batch.namespace, batch.changes, self._clock())
        self._in_hand.popleft()
        self._counts["published"] += len(batch.changes)

    def _start_over(self) -> None:
        """Nothing that was said counts any more; what is in hand comes again with the pages."""
        self._registered.clear()
        self._pages.clear()
        self._in_hand.clear()

    def _failed(self, error: DirectoryError) -> None:
        self._counts["failures"] += 1
        if isinstance(error, Unreachable):
            self._became(DirectoryState.LOST, str(error))
            return
        # The server answers but does not take what we say: nobody must count on what was said before.
        self.directory.withdraw(self._clock())
        self._start_over()
        if isinstance(error, OutOfMemory):
            self._became(DirectoryState.OUT_OF_MEMORY, str(error))
        elif isinstance(error, AccessDenied):
            self._became(DirectoryState.ACCESS_DENIED, str(error))
        else:
            self._became(DirectoryState.UNUSABLE, str(error))

    def _became(self, state: DirectoryState, why: str) -> None:
        """One line in the log for each change of state."""
        if state is self._state:
            return
        before, self._state = self._state, state
        if state is not DirectoryState.CONNECTED:
            logger.warning(
                "HiState's directory: %s. Requests go on; what other instances hold is not known until it is back", why
            )
        elif before is DirectoryState.CONNECTING:
            logger.info("HiState's directory is connected")
        else:
            logger.warning("HiState's directory is back (it was %s)", before.name.lower().replace("_", " "))


def merge(latest: dict[tuple[type, bytes], Change], change: Change) -> None:
    """Put a change into `latest`, so that publishing its values says the same as publishing all that was put. O(1)."""
    key: tuple[type, bytes]
    if isinstance(change, ChunkHeld):
        key = ChunkHeld, change.chunk_hash
        before = latest.pop(key, None)
        if isinstance(before, ChunkHeld):
            if not change.position and before.position:
                change = change._replace(parent=before.parent, position=before.position)
            # What was removed from a shared tier stays said, unless it was stored there again.
            change = change._replace(shared_removed=(before.shared_removed & ~change.held) | change.shared_removed)
    elif isinstance(change, SessionEnded | SessionHit):
        key = type(change), change.end
        latest.pop(key, None)
    else:
        key = type(change), b""
    latest[key] = change


__all__ = ["DirectoryState", "DirectoryWriter", "Source", "merge"]
