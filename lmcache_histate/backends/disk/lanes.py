"""Doing the pieces of one transfer on several threads, so that checking one piece overlaps reading the next."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

HELPERS = 2
"""Threads that may join the calling one. Measured: 1 + 2 lanes of 2 MiB pieces read at the device's speed, checksum and
all."""


class Lanes:
    """Helper threads that all transfers share. A transfer takes those that are idle and never waits for one to become so."""

    def __init__(self, helpers: int = HELPERS) -> None:
        self._pool = ThreadPoolExecutor(max(1, helpers), "histate-disk-lane")
        self._idle = threading.BoundedSemaphore(max(1, helpers))

    def each(self, count: int, step: Callable[[int], None]) -> None:
        """Run `step` for 0 to `count` - 1, in any order, on this thread and idle helpers.

        Returns only when no step runs any more.

        Raises:
            Exception: what a step raised first; steps that had not begun by then are left out.
        """
        numbers = itertools.count()  # its next() is atomic
        errors: list[BaseException] = []

        def lane() -> None:
            try:
                while not errors and (at := next(numbers)) < count:
                    step(at)
            except BaseException as e:
                errors.append(e)

        def helper() -> None:
            try:
                lane()
            finally:
                self._idle.release()

        joined = []
        for _ in range(min(HELPERS, count - 1)):
            if not self._idle.acquire(blocking=False):
                break
            joined.append(self._pool.submit(helper))
        lane()
        for future in joined:
            future.result()
        if errors:
            raise errors[0]
