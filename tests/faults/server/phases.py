"""What a server is doing right now, told through a shared page that outlives it: a kill finds there what it hit."""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STORE, DEMOTE, EVICT, LOAD = "store", "demote", "evict", "load"
NAMES = (STORE, DEMOTE, EVICT, LOAD)
_COUNT = struct.Struct("<i")


class Phases:
    """How many of each are under way. Written by one process, read by another.

    Args:
        path: A file that both processes map; made if absent.
    """

    def __init__(self, path: Path) -> None:
        size = _COUNT.size * len(NAMES)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._lock = threading.Lock()

    def add(self, name: str, change: int) -> None:
        """One more, or one less, is under way."""
        at = NAMES.index(name) * _COUNT.size
        with self._lock:
            _COUNT.pack_into(self._map, at, _COUNT.unpack_from(self._map, at)[0] + change)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """One is under way inside the block."""
        self.add(name, 1)
        try:
            yield
        finally:
            self.add(name, -1)

    def active(self) -> set[str]:
        """Those of which at least one is under way."""
        return {name for at, name in enumerate(NAMES) if _COUNT.unpack_from(self._map, at * _COUNT.size)[0] > 0}
