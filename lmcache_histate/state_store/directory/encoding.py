"""The bytes of the directory: records of chunks and sessions, changes, members, statistics.

All integers are little-endian. A *number* (32 bits) stands for one registration of one member. The scripts in `scripts.py`
read and write the same formats; change both together, and raise `SCHEMA`.

    chunk record    u8 format, u32 position, u8 length, parent, then a holder for every number: u32 number, u8 bits
    session record  u8 format, u32 position, u32 number, u32 hit position, u32 hit number, u48 hit time, moved_to
    change          u8 type, u8 length, chunk hash, then
      1 chunk       u8 held (own bits), u8 shared added, u8 shared removed, u32 position, u8 length, parent
      2 end         u32 position, u8 length, previous
      3 hit         u32 position

Hit times are milliseconds of the server's clock; nothing else is a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_histate.state_store.directory.protocol import (
    REMOTE_BITS,
    ChunkHeld,
    Member,
    NamespaceFacts,
    SessionEnded,
    SessionHit,
    Statistics,
)

SCHEMA = 1
"""Version of keys and records together. It is part of every key: two versions never read each other's records."""
FORMAT = 1
"""First byte of every record."""
CHUNK, SESSION = b"c", b"s"
"""First byte of a record's field name; the hash follows."""

_CHUNK_HEAD = struct.Struct("<BIB")
_SESSION = struct.Struct("<BIIII6s")
_HOLDER = struct.Struct("<IB")
_HOLDERS = np.dtype([("number", "<u4"), ("held", "u1")])
_CHUNK_CHANGE = struct.Struct("<BBBIB")
_POSITION = struct.Struct("<I")
_END = struct.Struct("<IB")
_MEMBER = struct.Struct("<8sBBH")
_FACTS = struct.Struct("<IQQ")
_MAX_POSITION = (1 << 32) - 1


class Malformed(ValueError):
    """Bytes that no version of this code wrote."""


class Chunk(NamedTuple):
    """A chunk record, taken apart."""

    position: int
    parent: bytes
    holders: list[tuple[int, int]]
    """(number, bits)."""


class Session(NamedTuple):
    """A session record, taken apart."""

    position: int
    number: int
    moved_to: bytes
    hit_ms: int
    """Of the server's clock; 0 for no hit."""
    hit_position: int
    hit_number: int


# -- records -----------------------------------------------------------------------------------------------------------


def pack_chunk(position: int, parent: bytes, holders: Iterable[tuple[int, int]]) -> bytes:
    """The bytes of a chunk record."""
    head = _CHUNK_HEAD.pack(FORMAT, position, len(parent)) + parent
    return head + b"".join(_HOLDER.pack(number, held) for number, held in holders)


def holders_of(record: bytes) -> bytes:
    """The holders of a chunk record, as packed. O(1).

    Raises:
        Malformed: not a chunk record of this schema.
    """
    if len(record) < 6 or record[0] != FORMAT:
        raise Malformed(f"chunk record {record[:8].hex()}...")
    holders = record[6 + record[5] :]
    if len(holders) % 5:
        raise Malformed(f"chunk record of {len(record)} bytes")
    return holders


def unpack_chunk(record: bytes) -> Chunk:
    """A chunk record taken apart. O(holders).

    Raises:
        Malformed: not a chunk record of this schema.
    """
    holders = list(_HOLDER.iter_unpack(holders_of(record)))
    _, position, length = _CHUNK_HEAD.unpack_from(record)
    return Chunk(position, record[6 : 6 + length], holders)


def held_matrix(records: Sequence[bytes | None], columns: dict[int, int]) -> npt.NDArray[np.uint8]:
    """Bits by (member, chunk), from the records of a path. O(chunks * holders), vectorised.

    Args:
        records: chunk records, None or empty where there is none. What is malformed counts as none.
        columns: number to row of the result; other numbers are left out.
    """
    parts: list[bytes] = []
    for record in records:
        try:
            parts.append(holders_of(record) if record else b"")
        except Malformed:
            parts.append(b"")
    held = np.zeros((max(columns.values(), default=-1) + 1, len(parts)), dtype=np.uint8)
    entries = np.frombuffer(b"".join(parts), dtype=_HOLDERS)
    if not len(entries) or not columns:
        return held
    chunk = np.repeat(np.arange(len(parts)), [len(part) // 5 for part in parts])
    numbers = np.array(sorted(columns), dtype=np.uint32)
    place = np.minimum(np.searchsorted(numbers, entries["number"]), len(numbers) - 1)
    known = numbers[place] == entries["number"]
    rows = np.array([columns[int(number)] for number in numbers])[place]
    held[rows[known], chunk[known]] = entries["held"][known]
    return held


def pack_session(session: Session) -> bytes:
    """The bytes of a session record."""
    hit = session.hit_ms.to_bytes(6, "little")
    head = _SESSION.pack(FORMAT, session.position, session.number, session.hit_position, session.hit_number, hit)
    return head + session.moved_to


def unpack_session(record: bytes) -> Session:
    """A session record taken apart.

    Raises:
        Malformed: not a session record of this schema.
    """
    if len(record) < _SESSION.size or record[0] != FORMAT:
        raise Malformed(f"session record {record[:8].hex()}...")
    _, position, number, hit_position, hit_number, hit = _SESSION.unpack_from(record)
    moved_to = record[_SESSION.size :]
    return Session(position, number, moved_to, int.from_bytes(hit, "little"), hit_position, hit_number)


# -- changes -----------------------------------------------------------------------------------------------------------


def pack_change(change: ChunkHeld | SessionEnded | SessionHit, remote_is_shared: bool) -> bytes:
    """The bytes of one change.

    Args:
        change: what happened.
        remote_is_shared: the remote tier is shared, so its bits are not the instance's own.

    Raises:
        ValueError: a hash that is empty or longer than 255 bytes, or a position of more than 32 bits.
    """
    key = change.chunk_hash if isinstance(change, ChunkHeld) else change.end
    if not 0 < len(key) < 256 or not 0 <= change.position <= _MAX_POSITION:
        raise ValueError(f"chunk hash of {len(key)} bytes at position {change.position}: 1 to 255 bytes, 32 bits")
    if isinstance(change, ChunkHeld):
        added = change.held & REMOTE_BITS if remote_is_shared else 0
        body = _CHUNK_CHANGE.pack(
            change.held & ~added, added, change.shared_removed, change.position, len(change.parent)
        )
        return b"\x01" + bytes((len(key),)) + key + body + change.parent
    if isinstance(change, SessionEnded):
        return b"\x02" + bytes((len(key),)) + key + _END.pack(change.position, len(change.previous)) + change.previous
    return b"\x03" + bytes((len(key),)) + key + _POSITION.pack(change.position)


# -- members, facts, statistics ----------------------------------------------------------------------------------------


def pack_member(member: Member, token: bytes) -> bytes:
    """The bytes of a member's lease; `token` (8 bytes) names the process that holds it."""
    name, address, tier = (text.encode() for text in member)
    return _MEMBER.pack(token, FORMAT, len(name), len(address)) + name + address + tier


def unpack_member(packed: bytes) -> Member:
    """A member from its lease.

    Raises:
        Malformed: not a lease of this schema.
    """
    try:
        _, form, name, address = _MEMBER.unpack_from(packed)
        if form != FORMAT:
            raise Malformed("lease of another format")
        first, second = _MEMBER.size + name, _MEMBER.size + name + address
        return Member(packed[_MEMBER.size : first].decode(), packed[first:second].decode(), packed[second:].decode())
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed(f"lease of {len(packed)} bytes") from error


def pack_facts(namespace: str, facts: NamespaceFacts) -> bytes:
    """The bytes that describe a namespace."""
    return _FACTS.pack(facts.block_tokens, facts.kv_bytes, facts.snapshot_bytes) + namespace.encode()


def unpack_facts(packed: bytes) -> tuple[str, NamespaceFacts]:
    """Name and facts of a namespace.

    Raises:
        Malformed: not written by `pack_facts`.
    """
    try:
        facts = NamespaceFacts(*_FACTS.unpack_from(packed))
        return packed[_FACTS.size :].decode(), facts
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed(f"namespace facts of {len(packed)} bytes") from error


def pack_statistics(statistics: Statistics) -> bytes:
    """The bytes of an instance's counters: 64-bit floats."""
    plain = (
        statistics.hits,
        statistics.end_hits,
        statistics.kv_exposure,
        statistics.kv_departures,
        statistics.snapshot_exposure,
        statistics.snapshot_departures,
        *statistics.distances,
    )
    return struct.pack(f"<{len(plain)}d", *plain)


def unpack_statistics(packed: bytes) -> Statistics:
    """Counters from their bytes.

    Raises:
        Malformed: not written by `pack_statistics`.
    """
    if len(packed) < 48 or len(packed) % 8:
        raise Malformed(f"statistics of {len(packed)} bytes")
    hits, end_hits, kv, kv_gone, snapshot, snapshot_gone, *distances = struct.unpack(f"<{len(packed) // 8}d", packed)
    return Statistics(hits, end_hits, tuple(distances), kv, kv_gone, snapshot, snapshot_gone)
