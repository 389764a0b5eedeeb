"""Making renames durable: fsyncs shared by everybody who waits for one at the same moment."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

MAX_BATCH = 512
"""Most paths that one round synchronises; what is left waits for the next round."""

ONE_JOURNAL = frozenset({"ext4", "xfs", "btrfs"})
"""File systems on which fsync of a file also makes the rename durable that gave it its name: the rename changes the inode
(its ctime), so fsync waits for the journal or log to hold it; and that is only written once the device has the data that
direct I/O wrote before (`ext4_rename` and `ext4_fsync_journal`, `xfs_rename` and `xfs_file_fsync`, `btrfs_log_new_name`).
POSIX promises neither."""


class GroupSync:
    """Group commit for files and directories.

    A caller that finds nobody synchronising does the round for all who wait; the others sleep until their paths are
    done. A round that starts after a caller's rename covers it, so each path costs one fsync a round however many
    renames it saw.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, int] = {}  # path -> number of the last ticket that asked for it
        self._tickets = 0
        self._errors: dict[str, tuple[int, OSError]] = {}
        self._busy: set[str] = set()
        self._leading = False

    def sync(self, paths: Iterable[str]) -> None:
        """Return once everything that the caller did to these files and directories before is on stable storage.

        What is gone by now counts as done: somebody deleted it.

        Raises:
            OSError: one of the paths could not be synchronised.
        """
        mine = set(paths)
        if not mine:
            return
        with self._changed:
            self._tickets += 1
            ticket = self._tickets
            for path in mine:
                self._waiting[path] = ticket
            while any(path in self._waiting or path in self._busy for path in mine):
                if self._leading:
                    self._changed.wait()
                else:
                    self._lead()
            for path in mine:
                at, error = self._errors.get(path, (0, None))
                if error is not None and at >= ticket:
                    raise error

    def _lead(self) -> None:
        batch = dict(list(self._waiting.items())[:MAX_BATCH])
        for path in batch:
            del self._waiting[path]
        self._busy = set(batch)
        self._leading = True
        self._changed.release()
        failed: dict[str, OSError] = {}
        try:
            for path in batch:
                try:
                    fsync_path(path)
                except FileNotFoundError:
                    continue
                except OSError as e:
                    failed[path] = e
        finally:
            self._changed.acquire()
            for path, ticket in batch.items():
                if path in failed:
                    self._errors[path] = (ticket, failed[path])
                else:
                    self._errors.pop(path, None)
            self._busy = set()
            self._leading = False
            self._changed.notify_all()


def fsync_path(path: str) -> None:
    """Put a file, or a directory's entries, on stable storage.

    Raises:
        OSError: as the system says.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_system(path: Path) -> str:
    """Type of the file system that holds an existing path, as `/proc/self/mountinfo` names it; empty if it cannot be
    told.
    """
    where, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            fields = line.split()
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])  # a blank is written \\040
            inside = where == point or where.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):  # of two mounts on one point the later one hides the other
                best, kind = point, fields[fields.index("-") + 1]
    return kind
