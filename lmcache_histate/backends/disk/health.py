"""Counting what went wrong, and saying it once."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter

REPEAT_SECONDS = 60.0
"""A trouble that comes and goes is reported at most this often."""


class Health:
    """Counters, and one log line when a kind of trouble begins and one when it ends. Thread-safe.

    Args:
        logger: Where the lines go.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._trouble: dict[str, str] = {}
        self._said: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def count(self, event: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[event] += by

    def trouble(self, kind: str, message: str) -> None:
        """Note that a kind of trouble is there; logged when it begins, not while it lasts."""
        with self._lock:
            self._counts[f"trouble_{kind}"] += 1
            now = time.monotonic()
            say = kind not in self._trouble and now - self._said.get(kind, -math.inf) >= REPEAT_SECONDS
            self._trouble[kind] = message
            if say:
                self._said[kind] = now
        if say:
            self._logger.warning("%s", message)

    def notice(self, kind: str, message: str) -> None:
        """Report one of possibly many events of a kind: the first, and then at most one in `REPEAT_SECONDS`."""
        with self._lock:
            now = time.monotonic()
            if now - self._said.get(kind, -math.inf) < REPEAT_SECONDS:
                self._unsaid[kind] += 1
                return
            self._said[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        self._logger.warning("%s%s", message, f" ({unsaid} more like it since the last line)" if unsaid else "")

    def well(self, kind: str) -> None:
        """Note that a kind of trouble is over, if it was there."""
        if kind not in self._trouble:  # a dict read is atomic; this runs on every store
            return
        with self._lock:
            was = self._trouble.pop(kind, None)
        if was is not None:
            self._logger.info("over: %s", was)

    def report(self) -> tuple[dict[str, int], dict[str, str]]:
        """The counters, and the troubles that last (kind to message)."""
        with self._lock:
            return dict(self._counts), dict(self._trouble)
