"""The durable catalogue: each object's place in the prefix tree and its last access, in sqlite, written by one
background thread.

Nothing waits for it. It may lag behind the files by one batch and be lost altogether: the files are the truth, and
all but the last access and later corrections of a place stand in the record headers as well.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_histate.backends.disk.record import Kind, ObjectId, Place

logger = logging.getLogger(__name__)

FILE = "catalogue.sqlite"
FLUSH_ROWS = 200
"""Rows a transaction: bounds the write-ahead log (each row of a random key dirties about one page)."""

FLUSH_SECONDS = 0.5
_MAX_PENDING = 200_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    ns TEXT NOT NULL, file TEXT NOT NULL, chunk_hash BLOB NOT NULL, kv_rank INTEGER NOT NULL, grp INTEGER NOT NULL,
    salt TEXT NOT NULL, payload INTEGER NOT NULL, stored_at REAL NOT NULL, last_access REAL NOT NULL,
    kind INTEGER NOT NULL, parent BLOB, position INTEGER, PRIMARY KEY (ns, file)
) WITHOUT ROWID
"""
_VERSION = 1
_KINDS = {int(kind): kind for kind in Kind}
_UPSERT = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM objects WHERE ns = ? AND file = ?"


class Row(NamedTuple):
    """What the catalogue knows of one object."""

    object_id: ObjectId
    payload_bytes: int
    stored_at: float
    """Unix seconds."""

    last_access: float
    """Unix seconds."""

    place: Place


class Catalogue:
    """Open (or make) the catalogue of a store, and write to it in the background.

    A catalogue that cannot be read is moved aside and begun anew; one that cannot be written is done without. Both
    are logged once.

    Args:
        root: The store's folder.
        shared: Whether other processes may have the same file open; then it is never removed, only done without.
        everything: Called, on the writer's thread, for all rows when the file had to be begun anew while running.
    """

    def __init__(
        self, root: Path, shared: bool = False, everything: Callable[[], Iterable[tuple[str, str, Row]]] = tuple
    ) -> None:
        self._path = root / FILE
        self._shared = shared
        self._everything = everything
        self._pending: dict[tuple[str, str], Row | None] = {}
        self._wake = threading.Condition()
        self._flushing = False
        self._closed = False
        self._failed = False
        self._db_lock = threading.Lock()
        self._db = self._open()
        self._thread = threading.Thread(target=self._run, name="histate-disk-catalogue", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the last attempt to write succeeded."""
        return self._db is not None and not self._failed

    def _open(self) -> sqlite3.Connection | None:
        for attempt in (1, 2):
            try:
                return self._connect()
            except sqlite3.Error as e:
                # OperationalError is the environment's doing (no room, no permission, an odd file system): the file
                # itself may be good. Anything else says that it is not a catalogue any more.
                if isinstance(e, sqlite3.OperationalError) or self._shared or attempt == 2:
                    logger.warning(
                        "catalogue %s cannot be used (%s): places and last accesses are kept in memory only",
                        self._path,
                        e,
                    )
                    return None
                logger.warning("catalogue %s is damaged (%s): it is rebuilt from the record headers", self._path, e)
                remove_catalogue(self._path.parent)
        return None

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=10, check_same_thread=False, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA wal_autocheckpoint=256")
            db.execute("PRAGMA journal_size_limit=2097152")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"version {version}, this build writes version {_VERSION}")
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version={_VERSION}")
            db.execute(
                "SELECT ns, file, chunk_hash, kv_rank, grp, salt, payload, parent, position FROM objects LIMIT 1"
            ).fetchall()
        except sqlite3.Error:
            db.close()
            raise
        return db

    def rows(self, namespace: str, model: str) -> Iterator[tuple[str, Row]]:
        """File name and row of every object of a namespace. Stops early, with a log line, where the file is damaged."""
        if self._db is None:
            return
        with self._db_lock:
            try:
                for f, h, rank, grp, salt, size, stored, access, kind, parent, position in self._db.execute(
                    "SELECT file, chunk_hash, kv_rank, grp, salt, payload, stored_at, last_access, kind, parent,"
                    " position FROM objects WHERE ns = ?",
                    (namespace,),
                ):
                    place = Place(parent, position, _KINDS[kind])
                    yield f, Row(ObjectId(model, h, rank, grp, salt), size, stored, access, place)
            except (sqlite3.Error, KeyError) as e:
                logger.warning(
                    "catalogue %s is damaged (%s): what it lacks is read from the record headers", self._path, e
                )

    def put(self, namespace: str, file: str, row: Row) -> None:
        """Remember a row soon. Never blocks on the disk."""
        self._enqueue(namespace, file, row)

    def put_all(self, rows: Iterable[tuple[str, str, Row]]) -> None:
        """Remember many rows soon: as `put` for each, at a fraction of its price."""
        with self._wake:
            room = _MAX_PENDING - len(self._pending)
            self._pending.update(((namespace, file), row) for namespace, file, row in itertools.islice(rows, room))
            self._wake.notify_all()

    def drop(self, namespace: str, file: str) -> None:
        """Forget a row soon. Never blocks on the disk."""
        self._enqueue(namespace, file, None)

    def _enqueue(self, namespace: str, file: str, row: Row | None) -> None:
        with self._wake:
            if len(self._pending) >= _MAX_PENDING and (namespace, file) not in self._pending:
                # A catalogue that cannot be written for long must not eat the memory; headers still hold the place.
                return
            self._pending[namespace, file] = row
            if (
                len(self._pending) == FLUSH_ROWS
            ):  # fewer wait for the thread's next round: waking it would cost the caller
                self._wake.notify_all()

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything enqueued so far was written; false if it was not within `timeout` seconds."""
        with self._wake:
            self._wake.notify_all()
            return self._wake.wait_for(
                lambda: self._db is None or self._failed or not (self._pending or self._flushing), timeout
            )

    def _run(self) -> None:
        while True:
            with self._wake:
                if len(self._pending) < FLUSH_ROWS and not self._closed:
                    self._wake.wait(FLUSH_SECONDS)
                if self._closed and not self._pending:
                    return
                batch = dict(itertools.islice(self._pending.items(), FLUSH_ROWS))
                for key in batch:
                    del self._pending[key]
                self._flushing = True
            written = not batch or self._write(batch)
            with self._wake:
                self._flushing = False
                if not written:
                    for key, row in batch.items():
                        self._pending.setdefault(key, row)
                    if self._closed:
                        return
                self._wake.notify_all()
                if not written:
                    self._wake.wait(5.0)  # a full or read-only disk is asked again now and then, not in a loop

    def _write(self, batch: dict[tuple[str, str], Row | None]) -> bool:
        puts = [(*key, *_columns(row)) for key, row in batch.items() if row is not None]
        drops = [key for key, row in batch.items() if row is None]
        damaged = False
        with self._db_lock:
            if self._db is None:
                return True
            try:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(_UPSERT, puts)
                self._db.executemany(_DELETE, drops)
                self._db.execute("COMMIT")
            except sqlite3.Error as e:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                if not isinstance(e, sqlite3.OperationalError) and not self._shared:
                    logger.warning("catalogue %s is damaged (%s): it is begun anew", self._path, e)
                    damaged = True
                else:
                    if not self._failed:
                        logger.warning(
                            "catalogue %s cannot be written (%s): it will lag behind until it can", self._path, e
                        )
                    self._failed = True
                    return False
            else:
                self._failed = False
        if damaged:
            self.reset()
            self.put_all(self._everything())
        return True

    def reset(self) -> None:
        """Begin anew: the file was lost. What is still pending goes to the new one."""
        with self._db_lock:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._db.close()
            if not self._shared:
                remove_catalogue(self._path.parent)
            self._db = self._open()
            self._failed = False

    def close(self) -> None:
        """Write what is pending and stop."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()
        with self._db_lock:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._db.close()


def remove_catalogue(root: Path) -> None:
    """Delete a catalogue's files, whatever state they are in."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            (root / f"{FILE}{suffix}").unlink()


def _columns(row: Row) -> tuple[object, ...]:
    oid, place = row.object_id, row.place
    return (
        oid.chunk_hash, oid.kv_rank, oid.group, oid.salt, row.payload_bytes, row.stored_at, row.last_access,
        int(place.kind), place.parent, place.position,
    )  # fmt: skip
