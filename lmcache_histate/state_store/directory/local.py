"""The directory of an instance that is alone: the default, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmcache_histate.state_store.directory.encoding import CHUNK, SESSION, Session, pack_chunk, pack_session
from lmcache_histate.state_store.directory.protocol import (
    UNPLACED,
    Change,
    ChunkHeld,
    Member,
    NamespaceFacts,
    Registration,
    SessionEnded,
    SessionHit,
    Statistics,
)
from lmcache_histate.state_store.directory.reading import ViewReader
from lmcache_histate.state_store.directory.view import LiveMember, NamespaceView

_SELF = 1


class LocalDirectory(ViewReader):
    """Knows what this instance said, and nobody else.

    Args:
        name: of the instance.
        address: where a router sends requests; may be empty.
        max_records: chunk records kept for each namespace.
    """

    lease_s = math.inf

    def __init__(self, name: str, address: str = "", max_records: int = 1_000_000) -> None:
        super().__init__()
        self._member = Member(name, address)
        self._max_records = max_records

    def register(self, namespace: str, facts: NamespaceFacts, now: float) -> Registration:
        """Begin, or begin again with nothing held. O(1)."""
        view = NamespaceView(facts, self._max_records)
        view.own_numbers = frozenset({_SELF})
        view.set_members({_SELF: LiveMember(self._member, math.inf)}, int(now * 1000), now)
        self._views[namespace] = view
        return Registration(self._member.name, False, ())

    def publish(self, namespace: str, changes: Sequence[Change], now: float) -> None:
        """See `Directory.publish`. O(changes)."""
        view = self._views[namespace]
        for change in changes:
            if isinstance(change, Statistics):
                continue  # the fleet without this instance is empty
            if isinstance(change, ChunkHeld):
                self._hold(view, change)
            else:
                self._session(view, change, now)

    @staticmethod
    def _hold(view: NamespaceView, change: ChunkHeld) -> None:
        if not change.held:
            view.apply([(CHUNK + change.chunk_hash, b""), (SESSION + change.chunk_hash, b"")])
            return
        known = view.chunk(change.chunk_hash)
        parent, position = change.parent, change.position
        if position == UNPLACED and known is not None:
            parent, position = known.parent, known.position
        view.apply([(CHUNK + change.chunk_hash, pack_chunk(position, parent, [(_SELF, change.held)]))])

    @staticmethod
    def _session(view: NamespaceView, change: SessionEnded | SessionHit, now: float) -> None:
        now_ms = int(now * 1000)
        if isinstance(change, SessionHit):
            known = view.session_at(change.end)
            if known is not None:
                hit = known._replace(hit_ms=now_ms, hit_position=change.position, hit_number=_SELF)
                view.apply([(SESSION + change.end, pack_session(hit))])
            return
        previous = view.session_at(change.previous)
        if previous is not None and change.previous != change.end:
            view.apply([(SESSION + change.previous, pack_session(previous._replace(moved_to=change.end)))])
        ended = view.session_at(change.end) or Session(0, _SELF, b"", 0, 0, 0)
        ended = ended._replace(position=change.position, number=_SELF, moved_to=b"")
        view.apply([(SESSION + change.end, pack_session(ended))])

    def poll(self, now: float) -> None:
        """Nobody else is there to be heard."""

    def withdraw(self, now: float) -> None:
        """Nobody counts on this instance."""

    def close(self) -> None:
        """Nothing to close."""

    def age(self, now: float) -> float:
        """Always current."""
        return 0.0
