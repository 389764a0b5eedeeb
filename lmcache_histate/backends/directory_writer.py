"""The one thread that talks to the directory, so that nobody else ever waits for it.

Whoever has something to say puts it into a bounded queue and goes on; reads are answered from the directory's local view.
The thread sends what is queued in batches, renews the lease, keeps the view fresh, and registers again after any loss. That
voids all that was said, so the owner of the prefix tree is asked to say everything again (`to_be_told_again`); it does so
through the same queue, as fast as there is room.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.mp_observability.otel_init import register_gauge

from lmcache_histate.state_store.directory.protocol import (
    REMOTE_BITS,
    AccessDenied,
    Change,
    ChunkHeld,
    Directory,
    DirectoryError,
    LeaseLost,
    NamespaceFacts,
    OutOfMemory,
    Registration,
    SessionEnded,
    SessionHit,
    Unreachable,
)

logger = init_logger(__name__)

BATCH = 256
"""Changes sent in one round trip."""
QUEUE_LIMIT = 1 << 16
"""Changes that wait at most: some 20 MB."""
POLL_SECONDS = 0.25
"""The view is refreshed this often, or twenty times in a short lease."""
GATHER_SECONDS = 0.002
"""Pause after the first change, so that those that follow at once share its round trip."""
FIRST_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 5.0
CLOSE_SECONDS = 5.0


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
        directory: Local or Redis. Once this runs, others may only call its reading methods.
        name: Of this instance, as the directory was given it.
        queue_limit: Changes that wait at most.
        poll_s: Seconds between polls, at most a twentieth of the lease.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        queue_limit: int = QUEUE_LIMIT,
        poll_s: float = POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._name = name
        self._limit = queue_limit
        self._poll_s = min(poll_s, directory.lease_s / 20)
        # Also the first try after the server is back comes well within a lease.
        self._max_retry_s = min(MAX_RETRY_SECONDS, directory.lease_s / 4)
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, Change]] = deque()
        self._namespaces: dict[str, NamespaceFacts] = {}
        self._tell_again: set[str] = set()
        self._void: set[str] = set()
        self._registered: set[str] = set()
        self._in_hand: deque[_Batch] = deque()
        self._next_poll = 0.0
        self._state = DirectoryState.CONNECTING
        self._other_schemas: tuple[int, ...] = ()
        self._counts = dict.fromkeys(("published", "refused", "registrations", "failures", "names_lost"), 0)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="histate-directory", daemon=True)

    # -- called by any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send what is queued if the server answers, give up the lease, and end. Some seconds at most."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def join(self, namespace: str, facts: NamespaceFacts) -> None:
        """Take part in a namespace from now on. Repeats change nothing. O(namespaces)."""
        with self._lock:
            self._namespaces = {**self._namespaces, namespace: facts}
        self._wake.set()

    def put(self, namespace: str, change: Change) -> bool:
        """Have a change published soon, in the order of the calls. Never waits; O(1).

        Returns:
            False when the queue is full (the server does not keep up, or is away) and nothing was taken: say it later. What
            is not said later is only not known elsewhere, unless it was that something is gone.
        """
        if len(self._queue) >= self._limit:
            self._counts["refused"] += 1
            return False
        self._queue.append((namespace, change))
        if not self._wake.is_set():
            self._wake.set()
        return True

    def to_be_told_again(self) -> list[str]:
        """Namespaces of which all that was said is void, each named once: say everything that is held in them. O(1)."""
        if not self._tell_again:
            return []
        with self._lock:
            names, self._tell_again = self._tell_again, set()
        return sorted(names)

    def begin_again(self, namespace: str) -> None:
        """More has changed than will ever be said: void all that was said of a namespace, and have it told again. O(1)."""
        with self._lock:
            self._void.add(namespace)
        self._wake.set()

    @property
    def instance(self) -> str:
        """Name that this instance goes by now."""
        return self._name

    @property
    def state(self) -> DirectoryState:
        """How the directory is doing."""
        return self._state

    def status(self) -> dict[str, float]:
        """Figures for `/status` and metrics. O(namespaces + members)."""
        now = self._clock()
        age = self.directory.age(now)
        members = (len(self.directory.instances(namespace, now)) for namespace in self._namespaces)
        return {
            "directory_state": self._state.value,
            "directory_connected": int(self._state is DirectoryState.CONNECTED),
            "directory_queued": len(self._queue),
            **{f"directory_{name}": count for name, count in self._counts.items()},
            # -1 before the view first was current.
            "directory_age_seconds": age if age < float("inf") else -1.0,
            "directory_members": max(members, default=0),
            "directory_other_schemas": len(self._other_schemas),
        }

    def register_metrics(self) -> None:
        """Export `status` as gauges ``histate.directory_*``, where LMCache exports its own."""
        for name in self.status():
            register_gauge(
                "histate", f"histate.{name}", f"HiState: {name.replace('_', ' ')}.", partial(self._figure, name)
            )

    def _figure(self, name: str) -> float:
        return float(self.status()[name])

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.is_set():
            try:
                self._round()
            except LeaseLost:
                # Registered again in the next round, the first time at once.
                self._registered.clear()
                self._stop.wait(pause)
                pause = self._longer(pause)
            except DirectoryError as error:
                self._failed(error)
                pause = self._longer(pause)
                self._stop.wait(pause)
            except Exception:
                # A bug here costs what other instances know, never the server.
                self._counts["failures"] += 1
                logger.exception("HiState's directory thread failed on one round; it registers again")
                self._registered.clear()
                self._in_hand.clear()
                pause = self._longer(pause)
                self._stop.wait(pause)
            else:
                self._became(DirectoryState.CONNECTED, "")
                pause = 0.0
                self._rest()
        with contextlib.suppress(DirectoryError):
            if self._state is DirectoryState.CONNECTED:
                self._publish(len(self._queue))
        self.directory.close()

    def _longer(self, pause: float) -> float:
        """The next pause: twice as long, and not the same for all instances that wait for one server."""
        return min(self._max_retry_s, max(FIRST_RETRY_SECONDS, 2.0 * pause)) * random.uniform(0.75, 1.0)

    def _rest(self) -> None:
        """Until there is something to do."""
        if self._in_hand or self._queue:
            return
        if self._wake.wait(min(self._poll_s, max(0.0, self._next_poll - self._clock()))):
            self._stop.wait(GATHER_SECONDS)
        self._wake.clear()

    def _round(self) -> None:
        """All that is due. Raises `DirectoryError`."""
        if self._void:
            with self._lock:
                void, self._void = self._void, set()
            self._registered -= void
        for namespace, facts in self._namespaces.items():
            if namespace not in self._registered:
                self._note(self.directory.register(namespace, facts, self._clock()))
                self._registered.add(namespace)
                with self._lock:
                    self._tell_again.add(namespace)
        # Also when the clock jumped back.
        if not 0.0 < self._next_poll - self._clock() <= self._poll_s:
            self.directory.poll(self._clock())
            self._note_schemas()
            self._next_poll = self._clock() + self._poll_s
        # Not all that is queued at once: the lease must be renewed in time.
        self._publish(8 * BATCH)

    def _publish(self, limit: int) -> None:
        """Send what is in hand, and about `limit` changes from the queue. O(limit)."""
        if not self._in_hand:
            self._in_hand.extend(self._take(limit))
        while self._in_hand:
            batch = self._in_hand[0]
            # It stays in hand until it succeeded: after an unknown outcome, the very same batch must be sent again.
            self.directory.publish(batch.namespace, batch.changes, self._clock())
            self._in_hand.popleft()
            self._counts["published"] += len(batch.changes)

    def _take(self, limit: int) -> list[_Batch]:
        """Batches of queued changes; of what was said several times of one thing, only the sum."""
        merged: dict[str, dict[tuple[type, bytes], Change]] = {}
        for _ in range(min(limit, len(self._queue))):
            namespace, change = self._queue.popleft()
            if namespace in self._registered:
                merge(merged.setdefault(namespace, {}), change, self.directory.remote_is_shared)
        batches = []
        for namespace, latest in merged.items():
            # Chunks first: a session is named by one. The order is kept otherwise.
            changes = iter(sorted(latest.values(), key=lambda change: not isinstance(change, ChunkHeld)))
            while part := list(islice(changes, BATCH)):
                batches.append(_Batch(namespace, part))
        return batches

    # -- health -------------------------------------------------------------------------------------------------------

    def _note(self, registration: Registration) -> None:
        """One line for each thing that a person should know of a registration."""
        self._counts["registrations"] += 1
        if registration.displaced:
            logger.warning(
                "HiState's directory: this instance took the name %s over from one whose lease was still good. If that "
                "was itself before a restart, all is well; if not, give every instance a name of its own",
                registration.name,
            )
        if registration.name != self._name:
            self._counts["names_lost"] += 1
            logger.error(
                "HiState's directory: a newer instance claimed the name %s; this one goes on as %s. Give every instance "
                "a name of its own",
                self._name,
                registration.name,
            )
            self._name = registration.name

    def _note_schemas(self) -> None:
        others = self.directory.other_schemas
        if others == self._other_schemas:
            return
        self._other_schemas = others
        if others:
            logger.warning(
                "HiState's directory: instances of another version (schema %s) use the same server. They and this one do "
                "not see each other until all run the same version of HiState",
                ", ".join(map(str, others)),
            )
        else:
            logger.warning("HiState's directory: all instances have the same schema version now")

    def _failed(self, error: DirectoryError) -> None:
        self._counts["failures"] += 1
        if isinstance(error, Unreachable):
            self._became(DirectoryState.LOST, str(error))
            return
        # The server answers, but does not take what we say: nobody may count on what we said before. Reading goes on.
        self._registered.clear()
        self.directory.withdraw(self._clock())
        with contextlib.suppress(DirectoryError):
            self.directory.poll(self._clock())
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
            logger.warning("HiState's directory is back (it was: %s)", before.name.lower().replace("_", " "))


def merge(latest: dict[tuple[type, bytes], Change], change: Change, remote_is_shared: bool) -> None:
    """Put a change into `latest`, so that publishing its values says the same as publishing all that was put. O(1)."""
    key: tuple[type, bytes]
    if isinstance(change, ChunkHeld):
        key = ChunkHeld, change.chunk_hash
        before = latest.pop(key, None)
        if isinstance(before, ChunkHeld):
            if not change.position and before.position:
                change = change._replace(parent=before.parent, position=before.position)
            # What was said of a shared tier stays said, unless the later change says otherwise.
            stored = before.held & REMOTE_BITS & ~change.shared_removed if remote_is_shared else 0
            removed = before.shared_removed & ~change.held
            change = change._replace(held=change.held | stored, shared_removed=change.shared_removed | removed)
    elif isinstance(change, SessionEnded | SessionHit):
        key = type(change), change.end
        latest.pop(key, None)
    else:
        key = type(change), b""
    latest[key] = change


__all__ = ["DirectoryState", "DirectoryWriter", "merge"]
