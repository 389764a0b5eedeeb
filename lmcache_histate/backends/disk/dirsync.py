"""Making renames durable: directory fsyncs, shared by everybody who waits for one at the same moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

MAX_BATCH = 512
"""Most directories that one round synchronises; what is left waits for the next round."""


class DirectorySync:
    """Group commit for directories.

    A caller that finds nobody synchronising does the round for all who wait; the others sleep until their directories
    are done. A round that starts after a caller's rename covers it, so each directory costs one fsync a round however
    many renames it saw.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Path, int] = {}  # directory -> number of the last ticket that asked for it
        self._tickets = 0
        self._errors: dict[Path, tuple[int, OSError]] = {}
        self._busy: set[Path] = set()
        self._leading = False

    def sync(self, folders: Iterable[Path]) -> None:
        """Return once every rename that the caller did in these folders before is on stable storage.

        Raises:
            OSError: one of the folders could not be synchronised.
        """
        mine = set(folders)
        if not mine:
            return
        with self._changed:
            self._tickets += 1
            ticket = self._tickets
            for folder in mine:
                self._waiting[folder] = ticket
            while any(folder in self._waiting or folder in self._busy for folder in mine):
                if self._leading:
                    self._changed.wait()
                else:
                    self._lead()
            for folder in mine:
                at, error = self._errors.get(folder, (0, None))
                if error is not None and at >= ticket:
                    raise error

    def _lead(self) -> None:
        batch = dict(list(self._waiting.items())[:MAX_BATCH])
        for folder in batch:
            del self._waiting[folder]
        self._busy = set(batch)
        self._leading = True
        self._changed.release()
        failed: dict[Path, OSError] = {}
        try:
            for folder in batch:
                try:
                    fsync_folder(folder)
                except OSError as e:
                    failed[folder] = e
        finally:
            self._changed.acquire()
            for folder, ticket in batch.items():
                if folder in failed:
                    self._errors[folder] = (ticket, failed[folder])
                else:
                    self._errors.pop(folder, None)
            self._busy = set()
            self._leading = False
            self._changed.notify_all()


def fsync_folder(folder: Path) -> None:
    """Put a directory's entries on stable storage.

    Raises:
        OSError: as the system says.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
