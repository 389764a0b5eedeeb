"""The directory of an instance that is alone: the default, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lmcache_histate.state_store.directory.encoding import CHUNK, SESSION, Session, pack_chunk, pack_session
from lmcache_histate.state_store.directory.protocol import (
    REMOTE_BITS,
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
from lmcache_histate.state_store.directory.view import LiveMember, NamespaceView, ViewReader

_SELF, _TIER = 1, 2
"""Numbers of this instance and of its shared tier."""


class LocalDirectory(ViewReader):
    """Knows what this instance said, and nobody else.

    Args:
        name: of the instance.
        address: where a router sends requests; may be empty.
        shared_tier: name of the shared tier that this instance uses (`shared_tier_name`); empty for none.
        max_records: chunk records kept for each namespace.
    """

    lease_s = math.inf
    other_schemas: tuple[int, ...] = ()

    def __init__(self, name: str, address: str = "", shared_tier: str = "", max_records: int = 1_000_000) -> None:
        super().__init__()
        self.remote_is_shared = bool(shared_tier)
        self._members = {_SELF: LiveMember(Member(name, address, shared_tier), math.inf)}
        if shared_tier:
            self._members[_TIER] = LiveMember(Member(shared_tier, "", shared_tier), math.inf)
        self._max_records = max_records

    def register(self, namespace: str, facts: NamespaceFacts, now: float) -> Registration:
        """Begin, or begin again with nothing held. O(1)."""
        view = NamespaceView(facts, self._max_records)
        view.own_numbers = frozenset({_SELF})
        view.own_tier = self._members[_SELF].member.shared_tier
        view.set_members(self._members, int(now * 1000), now)
        self._views[namespace] = view
        return Registration(self._members[_SELF].member.name, False)

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

    def _hold(self, view: NamespaceView, change: ChunkHeld) -> None:
        known = view.chunk(change.chunk_hash)
        parent, position = change.parent, change.position
        if position == UNPLACED and known is not None:
            parent, position = known.parent, known.position
        own, shared = change.held, 0
        if self.remote_is_shared:
            own &= ~REMOTE_BITS
            before = next((bits for number, bits in known.holders if number == _TIER), 0) if known else 0
            shared = (before | change.held & REMOTE_BITS) & ~change.shared_removed
        holders = [(number, bits) for number, bits in ((_SELF, own), (_TIER, shared)) if bits]
        if holders:
            view.apply([(CHUNK + change.chunk_hash, pack_chunk(position, parent, holders))])
        else:
            view.apply([(CHUNK + change.chunk_hash, b""), (SESSION + change.chunk_hash, b"")])

    @staticmethod
    def _session(view: NamespaceView, change: SessionEnded | SessionHit, now: float) -> None:
        now_ms = int(now * 1000)
        if isinstance(change, SessionHit):
            known = view.session_at(change.end)
            if known is not None:
                hit = known._replace(hit_ms=now_ms, hit_position=change.position, hit_number=_SELF)
                view.apply([(SESSION + change.end, pack_session(hit))])
            return
        unknown = Session(UNPLACED, _SELF, b"", 0, 0, 0)
        if change.previous not in (b"", change.end):
            previous = view.session_at(change.previous) or unknown
            view.apply([(SESSION + change.previous, pack_session(previous._replace(moved_to=change.end)))])
        ended = view.session_at(change.end) or unknown
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
