"""Batches of one size for LMCache's native clients (``resp``, ``valkey``, ``s3``, ...).

lmcache 0.5.6's native clients refuse a batch whose buffers differ in size ("buffer size mismatch"): of a stored batch then
nothing is kept, of a loaded one only what is as large as its first buffer. LMCache builds batches by model and rank, and a
hybrid model's KV chunks and snapshots are of unlike sizes, so without this such a tier never serves a hybrid model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Completion = tuple[int, bool, str, Any]
"""(future, whether all of it succeeded, error, one flag for each key or None), as the native clients return it."""


@dataclass
class _Split:
    """A batch that was handed on in parts."""

    parts_left: int
    flags: list[bool]
    """What became of each key; all True until a part says otherwise."""
    flagged: bool = False
    """Whether any part said so key by key."""
    succeeded: bool = True
    error: str = ""


class OneSizeBatches:
    """Stands in for a native client: splits set and get batches by size, and joins their completions.

    Futures of split batches are negative, so that they meet none of the client's own. Everything else goes to the client
    unchanged. Safe to call from several threads, as the client is.

    Args:
        client: A pybind-wrapped LMCache connector client.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._last = 0
        self._splits: dict[int, _Split] = {}
        self._parts: dict[int, tuple[int, list[int]]] = {}
        """Native future -> (future of the batch, where its keys stood there)."""
        self.connection_lost = False
        """Whether an operation failed since its connection had broken. The native clients do not connect again."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Store ``views`` under ``keys``; returns the future. O(keys)."""
        return self._submit(self._client.submit_batch_set, keys, views)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Load ``keys`` into ``views``; returns the future. O(keys)."""
        return self._submit(self._client.submit_batch_get, keys, views)

    def _submit(self, submit: Any, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        places: dict[int, list[int]] = {}
        for place, view in enumerate(views):
            places.setdefault(view.nbytes, []).append(place)
        if len(places) < 2:
            return int(submit(list(keys), list(views)))
        # Under the lock, so that no part completes before it is known whose part it is.
        with self._lock:
            self._last -= 1
            future = self._last
            self._splits[future] = _Split(len(places), [True] * len(keys))
            try:
                for chosen in places.values():
                    part = int(submit([keys[place] for place in chosen], [views[place] for place in chosen]))
                    self._parts[part] = future, chosen
            except Exception:
                # The caller learns of the failure here; what parts were accepted complete unheard.
                del self._splits[future]
                raise
        return future

    def drain_completions(self) -> list[Completion]:
        """What has completed since the last call; a split batch once all of its parts have. O(keys)."""
        done: list[Completion] = []
        completions = self._client.drain_completions()
        with self._lock:
            for part, succeeded, error, flags in completions:
                self.connection_lost |= not succeeded and error.startswith("socket")
                if part not in self._parts:
                    done.append((part, succeeded, error, flags))
                    continue
                future, places = self._parts.pop(part)
                split = self._splits.get(future)
                if split is None:
                    continue
                split.parts_left -= 1
                split.succeeded &= bool(succeeded)
                split.error = split.error or error
                split.flagged |= flags is not None
                for index, place in enumerate(places):
                    split.flags[place] = bool(flags[index]) if flags is not None else bool(succeeded)
                if not split.parts_left:
                    del self._splits[future]
                    done.append((future, split.succeeded, split.error, split.flags if split.flagged else None))
        return done


__all__ = ["OneSizeBatches"]
