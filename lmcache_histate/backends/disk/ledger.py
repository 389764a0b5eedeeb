"""Accounting against a hard capacity: bytes are reserved before they are written and given back when they are gone.

`LocalLedger` counts for one process, `SharedLedger` for all servers that share a folder. Both answer at once, in
memory or under one `flock`; neither ever touches sqlite.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol


class Ledger(Protocol):
    """Bytes in use and bytes promised. Their sum never exceeds the capacity once `set_used` came in below it."""

    def guard(self) -> AbstractContextManager[None]:
        """Hold still every other process's publishing and deleting, so that files and numbers change together.
        Reentrant.
        """
        ...

    def reserve(self, size: int, capacity: int) -> bool:
        """Promise `size` bytes if they fit in `capacity`, else change nothing."""
        ...

    def release(self, size: int) -> None:
        """Take a promise back: nothing was published for it."""
        ...

    def publish(self, size: int) -> None:
        """Turn a promise into use."""
        ...

    def free(self, size: int) -> None:
        """Bytes in use are gone."""
        ...

    def set_used(self, size: int, dead: set[int]) -> None:
        """Replace the bytes in use by a fresh count, and forget what dead processes (by scratch token) had promised."""
        ...

    def totals(self) -> tuple[int, int]:
        """Bytes in use, and bytes promised by all processes."""
        ...

    def close(self) -> None:
        """Drop the process's promises and resources."""
        ...


class LocalLedger:
    """A ledger for a folder that one process holds alone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._used = 0
        self._promised = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """See `Ledger.guard`; with one process there is nobody to hold still."""
        yield

    def reserve(self, size: int, capacity: int) -> bool:
        """See `Ledger.reserve`."""
        with self._lock:
            if self._used + self._promised + size > capacity:
                return False
            self._promised += size
            return True

    def release(self, size: int) -> None:
        """See `Ledger.release`."""
        with self._lock:
            self._promised -= size

    def publish(self, size: int) -> None:
        """See `Ledger.publish`."""
        with self._lock:
            self._promised -= size
            self._used += size

    def free(self, size: int) -> None:
        """See `Ledger.free`."""
        with self._lock:
            self._used -= size

    def set_used(self, size: int, dead: set[int]) -> None:
        """See `Ledger.set_used`."""
        with self._lock:
            self._used = size

    def totals(self) -> tuple[int, int]:
        """See `Ledger.totals`."""
        with self._lock:
            return self._used, self._promised

    def close(self) -> None:
        """See `Ledger.close`."""


_HEAD = struct.Struct("<8sq")  # magic, bytes in use by all
_SLOT = struct.Struct("<qq")  # scratch token of a process (0: free), bytes it promised
_MAGIC = b"HSLEDG\x00\x01"
_SLOTS = 250
_SIZE = 4096


class SharedLedger:
    """A ledger in a small file that several servers map and change under its `flock`.

    A process that dies leaves its promises behind; the next process to start finds them by the scratch token and
    drops them.

    Args:
        path: The ledger's file, made if absent.
        token: This process's scratch token.

    Raises:
        OSError: the file cannot be opened or mapped.
        RuntimeError: `_SLOTS` servers already use the folder.
    """

    def __init__(self, path: Path, token: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, _SIZE)
        self._map = mmap.mmap(self._fd, _SIZE)
        self._lock = threading.RLock()
        self._depth = 0
        self._token = token
        with self.guard():
            if _HEAD.unpack_from(self._map)[0] != _MAGIC:
                self._map[:] = bytes(_SIZE)
                _HEAD.pack_into(self._map, 0, _MAGIC, 0)
            self._at = self._claim()

    def _claim(self) -> int:
        for at in self._slots():
            if _SLOT.unpack_from(self._map, at)[0] == 0:
                _SLOT.pack_into(self._map, at, self._token, 0)
                return at
        raise RuntimeError(f"{_SLOTS} servers already share this folder; give some of them another one")

    @staticmethod
    def _slots() -> range:
        return range(_HEAD.size, _HEAD.size + _SLOTS * _SLOT.size, _SLOT.size)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """See `Ledger.guard`."""
        with self._lock:
            if self._depth == 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _add(self, used: int, promised: int) -> None:
        _HEAD.pack_into(self._map, 0, _MAGIC, max(0, _HEAD.unpack_from(self._map)[1] + used))
        _SLOT.pack_into(self._map, self._at, self._token, max(0, _SLOT.unpack_from(self._map, self._at)[1] + promised))

    def reserve(self, size: int, capacity: int) -> bool:
        """See `Ledger.reserve`."""
        with self.guard():
            if sum(self.totals()) + size > capacity:
                return False
            self._add(0, size)
            return True

    def release(self, size: int) -> None:
        """See `Ledger.release`."""
        with self.guard():
            self._add(0, -size)

    def publish(self, size: int) -> None:
        """See `Ledger.publish`."""
        with self.guard():
            self._add(size, -size)

    def free(self, size: int) -> None:
        """See `Ledger.free`."""
        with self.guard():
            self._add(-size, 0)

    def set_used(self, size: int, dead: set[int]) -> None:
        """See `Ledger.set_used`."""
        with self.guard():
            _HEAD.pack_into(self._map, 0, _MAGIC, size)
            for at in self._slots():
                if _SLOT.unpack_from(self._map, at)[0] in dead:
                    _SLOT.pack_into(self._map, at, 0, 0)

    def totals(self) -> tuple[int, int]:
        """See `Ledger.totals`."""
        with self.guard():
            return _HEAD.unpack_from(self._map)[1], sum(_SLOT.unpack_from(self._map, at)[1] for at in self._slots())

    def close(self) -> None:
        """See `Ledger.close`."""
        with self.guard():
            _SLOT.pack_into(self._map, self._at, 0, 0)
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)
