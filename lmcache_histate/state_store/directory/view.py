"""The local view of a namespace: what the members said, as far as it is known here; and answers from such views.

One thread writes it; any thread may read, without a lock: every read is of single dictionary entries that are replaced
whole. A member counts while its lease is good by this process's own clock, so a view that hears nothing any more forgets
the others by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lmcache_histate.state_store.directory.encoding import (
    CHUNK,
    SESSION,
    Chunk,
    Malformed,
    Session,
    holders_of,
    unpack_chunk,
    unpack_session,
)
from lmcache_histate.state_store.directory.locate import locate
from lmcache_histate.state_store.directory.protocol import (
    FROM_THE_START,
    KV_BITS,
    NOWHERE_ELSE,
    SNAPSHOT_BITS,
    UNPLACED,
    ChunkRecord,
    Elsewhere,
    Holder,
    Location,
    Member,
    NamespaceFacts,
    SessionRecord,
    Statistics,
)
from lmcache_histate.state_store.objects import Kind

PRUNE_AT_ONCE = 4096
"""Records looked at in one step of pruning: a few milliseconds."""


class LiveMember(NamedTuple):
    """A member, until when (seconds, this process's clock) its lease is good, and its counters."""

    member: Member
    deadline: float
    statistics: Statistics = Statistics()


class NamespaceView:
    """What is known of a namespace.

    Memory: at most `max_records` records of about 250 bytes; beyond it the oldest news go first, which makes them absent.

    Args:
        facts: of the namespace.
        max_records: chunk records, and session records, that are kept.
    """

    def __init__(self, facts: NamespaceFacts, max_records: int) -> None:
        self.facts = facts
        self.own_numbers: frozenset[int] = frozenset()
        """Numbers of this instance: at most one, none for an observer."""
        self.own_tier = ""
        """Name of the shared tier that this instance can load from."""
        self.malformed = 0
        """Records left out since no code of this schema wrote them."""
        self._max_records = max_records
        self._chunks: dict[bytes, bytes] = {}
        self._sessions: dict[bytes, bytes] = {}
        self._members: dict[int, LiveMember] = {}
        self._server_ms = 0
        self._server_ms_at = 0.0
        self._to_prune: Iterator[bytes] | None = None
        self._news: deque[bytes] = deque(maxlen=max_records)

    def __len__(self) -> int:
        """Chunk records known."""
        return len(self._chunks)

    # -- written by one thread ------------------------------------------------------------------------------------

    def set_members(self, members: dict[int, LiveMember], server_ms: int, now: float) -> None:
        """These are the members, and this is the server's clock, as of `now`. O(members)."""
        if self._members.keys() - members.keys():
            self._to_prune = iter(list(self._chunks))
        self._members = members
        self._server_ms, self._server_ms_at = server_ms, now

    def apply(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Take in (field, record) pairs; an empty record says that it is gone. O(records)."""
        for field, record in records:
            known = self._sessions if field[:1] == SESSION else self._chunks
            if not record:
                if known.pop(field[1:], None) is not None and known is self._chunks:
                    self._news.append(field[1:])
                continue
            try:
                if known is self._sessions:
                    unpack_session(record)
                elif field[:1] != CHUNK or not holders_of(record):
                    raise Malformed("empty")
            except Malformed:
                self.malformed += 1
                continue
            known[field[1:]] = record
            if known is self._chunks:
                self._news.append(field[1:])
        for full in (self._chunks, self._sessions):
            for key in list(islice(full, max(0, len(full) - self._max_records))):
                del full[key]

    def clear(self) -> None:
        """Forget all records, before they are read anew. Members stay."""
        self._chunks, self._sessions = {}, {}
        self._to_prune = None

    def prune(self) -> None:
        """After a member went: forget what only it held, a few thousand records at a time."""
        if self._to_prune is None:
            return
        keys = list(islice(self._to_prune, PRUNE_AT_ONCE))
        if not keys:
            self._to_prune = None
            self._sessions = {
                end: record for end, record in self._sessions.items() if unpack_session(record).number in self._members
            }
        for key in keys:
            record = self._chunks.get(key)
            if record and not any(number in self._members for number, _ in unpack_chunk(record).holders):
                del self._chunks[key]

    # -- read by one other thread ---------------------------------------------------------------------------------

    def news(self, limit: int, now: float) -> list[ChunkRecord]:
        """See `Directory.news`."""
        live = self.live(now)
        found: list[ChunkRecord] = []
        while self._news and len(found) < limit:
            chunk_hash = self._news.popleft()
            chunk = self.chunk(chunk_hash)
            if chunk is None:
                found.append(ChunkRecord(chunk_hash, FROM_THE_START, UNPLACED, ()))
                continue
            holders = tuple(Holder(live[number], bits) for number, bits in chunk.holders if number in live)
            found.append(ChunkRecord(chunk_hash, chunk.parent, chunk.position, holders))
        return found

    # -- read by any thread ---------------------------------------------------------------------------------------

    def live(self, now: float) -> dict[int, Member]:
        """Members whose lease is good, by number. O(members)."""
        return {number: known.member for number, known in self._members.items() if known.deadline > now}

    def holders(self, chunk_hash: bytes, live: dict[int, Member]) -> tuple[Holder, ...]:
        """Who of `live` holds a chunk. O(holders)."""
        record = self._chunks.get(chunk_hash)
        if record is None:
            return ()
        held = unpack_chunk(record).holders
        return tuple(Holder(live[number], bits) for number, bits in held if number in live)

    def chunk(self, chunk_hash: bytes) -> Chunk | None:
        """The record of a chunk, whoever wrote it. O(holders)."""
        record = self._chunks.get(chunk_hash)
        return None if record is None else unpack_chunk(record)

    def session_at(self, end: bytes) -> Session | None:
        """The record of a session, whoever wrote it. O(1)."""
        record = self._sessions.get(end)
        return None if record is None else unpack_session(record)

    def elsewhere(self, chunk_hash: bytes, kind: Kind, now: float) -> Elsewhere:
        """See `Directory.elsewhere`."""
        record = self._chunks.get(chunk_hash)
        if record is None:
            return NOWHERE_ELSE
        wanted = KV_BITS if kind == Kind.KV else SNAPSHOT_BITS
        shared = others = False
        ours, best = 0, -1
        members = self._members
        for number, held in unpack_chunk(record).holders:
            known = members.get(number)
            if known is None or known.deadline <= now or not held & wanted:
                continue
            if known.member.is_tier:
                shared = shared or known.member.name == self.own_tier
                continue
            # The highest score keeps the copy, so that the load is spread evenly.
            score = xxh3_64_intdigest(chunk_hash, number)
            if number in self.own_numbers:
                ours = score
            else:
                others = True
                best = max(best, score)
        return Elsewhere(shared, others, ours >= best)

    def locate(self, chunk_hashes: Iterable[bytes], now: float) -> list[Location]:
        """See `Directory.locate`."""
        return locate(self.facts, list(map(self._chunks.get, chunk_hashes)), self.live(now))

    def session(self, end: bytes, now: float) -> SessionRecord | None:
        """See `Directory.session`."""
        record = self._sessions.get(end)
        if record is None:
            return None
        session, live = unpack_session(record), self.live(now)
        member = live.get(session.number)
        if member is None:
            return None
        hitter = live.get(session.hit_number)
        age = (self._server_ms - session.hit_ms) / 1000.0 + now - self._server_ms_at if hitter is not None else None
        return SessionRecord(
            end,
            session.position,
            member.name,
            session.moved_to,
            None if age is None else max(0.0, age),
            session.hit_position if hitter is not None else 0,
            hitter.name if hitter is not None else "",
        )

    def records(self, now: float) -> list[ChunkRecord]:
        """See `Directory.records`."""
        live = self.live(now)
        found: list[ChunkRecord] = []
        for chunk_hash, record in list(self._chunks.items()):
            chunk = unpack_chunk(record)
            holders = tuple(Holder(live[number], bits) for number, bits in chunk.holders if number in live)
            if holders and chunk.position != UNPLACED:
                found.append(ChunkRecord(chunk_hash, chunk.parent, chunk.position, holders))
        return sorted(found, key=lambda record: record.position)

    def statistics(self, now: float) -> Statistics:
        """See `Directory.statistics`."""
        total = Statistics()
        for number, known in self._members.items():
            if known.deadline > now and number not in self.own_numbers:
                total += known.statistics
        return total


class ViewReader:
    """The reading half of a `Directory`: answers from the views of its namespaces. One that was never registered is empty."""

    def __init__(self) -> None:
        self._views: dict[str, NamespaceView] = {}

    def instances(self, namespace: str, now: float) -> list[Member]:
        """See `Directory.instances`."""
        view = self._views.get(namespace)
        return [] if view is None else sorted(view.live(now).values(), key=lambda member: (member.is_tier, member))

    def holders(self, namespace: str, chunk_hashes: Sequence[bytes], now: float) -> list[tuple[Holder, ...]]:
        """See `Directory.holders`."""
        view = self._views.get(namespace)
        if view is None:
            return [()] * len(chunk_hashes)
        live = view.live(now)
        return [view.holders(chunk_hash, live) for chunk_hash in chunk_hashes]

    def elsewhere(self, namespace: str, chunk_hash: bytes, kind: Kind, now: float) -> Elsewhere:
        """See `Directory.elsewhere`."""
        view = self._views.get(namespace)
        return NOWHERE_ELSE if view is None else view.elsewhere(chunk_hash, kind, now)

    def locate(self, namespace: str, chunk_hashes: Sequence[bytes], now: float) -> list[Location]:
        """See `Directory.locate`."""
        view = self._views.get(namespace)
        return [] if view is None else view.locate(chunk_hashes, now)

    def session(self, namespace: str, end: bytes, now: float) -> SessionRecord | None:
        """See `Directory.session`."""
        view = self._views.get(namespace)
        return None if view is None else view.session(end, now)

    def news(self, namespace: str, limit: int, now: float) -> list[ChunkRecord]:
        """See `Directory.news`."""
        view = self._views.get(namespace)
        return [] if view is None else view.news(limit, now)

    def records(self, namespace: str, now: float) -> list[ChunkRecord]:
        """See `Directory.records`."""
        view = self._views.get(namespace)
        return [] if view is None else view.records(now)

    def statistics(self, namespace: str, now: float) -> Statistics:
        """See `Directory.statistics`."""
        view = self._views.get(namespace)
        return Statistics() if view is None else view.statistics(now)
