"""Keeps a recurrent state's block from being overwritten while the server still copies it.

vLLM frees the block of a state two scheduler steps after the step that wrote it (``MambaManager.remove_skipped_blocks``),
while LMCache copies it after that step without holding it. A slow copy would then store another request's bytes under
this request's key. Attention blocks need no fence: they live until the request ends, and LMCache delays that free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class StoreFuture(Protocol):
    """The part of LMCache's ``MessagingFuture`` used here."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block up to ``timeout`` seconds; True once the server is done with the blocks."""


class StoreFence:
    """Makes forward pass k+2 wait for the snapshot stores submitted after pass k (which are done long before).

    Args:
        is_healthy: Whether the server still answers; an unhealthy one is not waited for.
        poll_seconds: How often health is looked at while waiting.
    """

    def __init__(self, is_healthy: Callable[[], bool], poll_seconds: float = 0.05) -> None:
        self._is_healthy = is_healthy
        self._poll_seconds = poll_seconds
        self._submitted: list[StoreFuture] = []
        self._previous: list[StoreFuture] = []
        self.abandoned = 0
        """Stores given up because the server stopped answering."""

    def submitted(self, futures: Iterable[StoreFuture]) -> None:
        """Note the snapshot stores submitted at the end of the current forward pass."""
        self._submitted.extend(futures)

    def before_forward(self) -> None:
        """Wait for stores submitted after the pass before the last one. O(stores of one step)."""
        for future in self._previous:
            while not self._settled(future):
                if not self._is_healthy():
                    self.abandoned += 1
                    break
        self._previous, self._submitted = self._submitted, []

    def _settled(self, future: StoreFuture) -> bool:
        try:
            return future.wait(self._poll_seconds)
        except Exception:  # the store failed on the server, which therefore no longer reads the blocks
            return True
