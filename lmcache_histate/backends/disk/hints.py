"""What those who know the prefix tree tell the disk tier about objects before they are stored.

LMCache hands an L2 adapter keys and buffers, and nothing in a key says which chunk came before or how many tokens.
Whoever sees that (a listener of `MP_TOKENS` events, the eviction core) leaves it here; a store picks it up. What
nobody said is stored as unknown.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from lmcache_histate.backends.disk.record import Kind, ObjectId, Place

MAX_CHUNKS = 1 << 18
"""Most chunks remembered; the oldest are forgotten first."""


class PlaceHints:
    """Places by chunk, and kinds by object group. Thread-safe and bounded."""

    def __init__(self, max_chunks: int = MAX_CHUNKS) -> None:
        self._max = max_chunks
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[str, bytes], tuple[bytes | None, int | None]] = OrderedDict()
        self._kinds: dict[tuple[str, int], Kind] = {}

    def note_chunk(self, model: str, chunk_hash: bytes, parent: bytes | None, position: int | None) -> None:
        """Say where a chunk stands.

        Args:
            model: `ObjectKey.model_name`.
            chunk_hash: `ObjectKey.chunk_hash`.
            parent: Hash of the chunk before it; empty bytes for the first of a prompt, `None` if unknown.
            position: Tokens from the start of the prompt to the chunk's end; `None` if unknown.
        """
        with self._lock:
            self._chunks[model, chunk_hash] = (parent, position)
            self._chunks.move_to_end((model, chunk_hash))
            while len(self._chunks) > self._max:
                self._chunks.popitem(last=False)

    def note_kind(self, model: str, group: int, kind: Kind) -> None:
        """Say what a model's object group holds (LMCache: `AttnWindowDesc.group_kinds`)."""
        with self._lock:
            self._kinds[model, group] = kind

    def place_of(self, object_id: ObjectId) -> Place:
        """All that is known about an object's place."""
        with self._lock:
            parent, position = self._chunks.get((object_id.model, object_id.chunk_hash), (None, None))
            return Place(parent, position, self._kinds.get((object_id.model, object_id.group), Kind.UNKNOWN))
