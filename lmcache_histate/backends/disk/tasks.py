"""Running a batch of independent steps on a thread pool, with one call when the last is done."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

logger = logging.getLogger(__name__)


class Batches:
    """A thread pool for batches.

    Args:
        threads: How many steps run at once.
        name: Prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        # A bare queue hands a step over in a third of the time that concurrent.futures takes, which small objects notice.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    @property
    def closing(self) -> bool:
        """Whether steps should do nothing any more but say so."""
        return self._closing

    def run(self, count: int, step: Callable[[int], None], finish: Callable[[], None]) -> None:
        """Run `step` for 0 to `count` - 1, and `finish` after the last, on the thread that did it.

        A step that raises is logged and does not stop the others. After `close` everything runs on the caller's thread.
        """
        left = count
        lock = threading.Lock()

        def one(at: int) -> None:
            nonlocal left
            try:
                step(at)
            except Exception:  # a bug of ours, or a buffer with odd metadata: that key fails, the batch goes on
                logger.exception("the disk tier failed on one object; it counts as not stored or not found")
            with lock:
                left -= 1
                last = left == 0
            if last:
                try:
                    finish()
                except Exception:
                    logger.exception("the disk tier failed to report a batch")

        if count == 0:
            finish()
        with self._lock:
            if not self._closing:
                for at in range(count):
                    self._queue.put(partial(one, at))
                return
        for at in range(count):
            one(at)

    def close(self) -> None:
        """Let running steps end and waiting ones pass (they see `closing`), then return."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for _ in self._threads:
                self._queue.put(None)  # behind all that waits
        for thread in self._threads:
            thread.join()
