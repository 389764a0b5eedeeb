"""The record format: how one object looks on disk. Pure: bytes in, bytes out.

A record is one header block of `HEADER_BYTES` followed by the payload, padded with zeros to a multiple of `BLOCK`.
The payload thus starts on a block boundary and direct I/O can move it straight between the disk and a caller's
aligned buffer.

Header block (little endian)::

    magic 8s | version u16 | kind u8 | flags u8 | header checksum u64 | payload bytes u64 | payload checksum u64
    | stored at f64 | position i64 | kv rank i64 | group u32 | five u16 lengths | namespace | model | chunk hash |
    salt | parent

The header checksum is xxh3_64 over the whole block with its own field zeroed. The payload checksum is xxh3_64 over
the 8-byte xxh3_64 digests of the payload's `SEGMENT`-sized pieces, so that pieces can be verified in any order and on
several threads.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

BLOCK = 4096
"""Alignment of every address, length and offset used with direct I/O, in bytes."""

HEADER_BYTES = BLOCK
"""Bytes before the payload."""

SEGMENT = 2 << 20
"""Bytes of payload under one segment digest."""

MAGIC = b"HISTATE\x01"
VERSION = 1
SUFFIX = ".hsr"
"""Name ending of a published record."""

_FIXED = struct.Struct("<8sHBBQQQdqqI5H")
_CHECKSUM_AT = struct.calcsize("<8sHBB")
_DIGEST = struct.Struct("<Q")
_NAME = struct.Struct("<3IqI")


class RecordError(ValueError):
    """A record that must not be served; the message says what is wrong with it."""


class Kind(IntEnum):
    """What an object holds, as far as whoever stored it knew."""

    UNKNOWN = 0
    KV = 1
    SNAPSHOT = 2
    AUX = 3


class ObjectId(NamedTuple):
    """LMCache's `ObjectKey` (`lmcache/v1/distributed/api.py`) as a plain tuple: same fields, same meaning."""

    model: str
    chunk_hash: bytes
    kv_rank: int
    group: int
    salt: str


class Place(NamedTuple):
    """Where an object stands in the prefix tree. `None` and `Kind.UNKNOWN` mean that nobody said."""

    parent: bytes | None = None
    """Chunk hash of the chunk before this one; empty bytes for the first chunk of a prompt."""

    position: int | None = None
    """Tokens from the start of the prompt to the end of this chunk."""

    kind: Kind = Kind.UNKNOWN


NOWHERE = Place()
"""The place of an object about which nothing is known."""


@dataclass(frozen=True, slots=True)
class Header:
    """Everything a record says about itself."""

    namespace: str
    """Name of the namespace folder that the record belongs to."""

    object_id: ObjectId
    payload_bytes: int
    payload_checksum: int
    stored_at: float
    """Unix seconds."""

    place: Place = NOWHERE


def padded(size: int, block: int = BLOCK) -> int:
    """`size` bytes rounded up to whole blocks."""
    return -(-size // block) * block


def record_bytes(payload_bytes: int) -> int:
    """Length in bytes of the file that holds a payload of this many bytes."""
    return HEADER_BYTES + padded(payload_bytes)


def file_name(object_id: ObjectId) -> str:
    """Name of the record's file: a 128-bit blake2b of the whole key, so that salts and models need no escaping.

    The key itself stands in the header and is compared on every read, hence even a collision could only cost a miss.
    """
    model, salt = object_id.model.encode(), object_id.salt.encode()
    numbers = _NAME.pack(len(model), len(object_id.chunk_hash), len(salt), object_id.kv_rank, object_id.group)
    key = b"".join((numbers, model, object_id.chunk_hash, salt))
    return hashlib.blake2b(key, digest_size=16).hexdigest() + SUFFIX


def segment_digest(segment: memoryview | bytes) -> int:
    """Digest of one piece of payload (xxh3_64, releases the GIL)."""
    return xxhash.xxh3_64_intdigest(segment)


def combine(digests: Sequence[int]) -> int:
    """Payload checksum from its segments' digests, in order."""
    return xxhash.xxh3_64_intdigest(b"".join(map(_DIGEST.pack, digests)))


def payload_checksum(payload: memoryview) -> int:
    """Checksum of a whole payload (a one-dimensional view of bytes)."""
    return combine([segment_digest(payload[at : at + SEGMENT]) for at in range(0, len(payload), SEGMENT)])


def encode_header(header: Header) -> bytes:
    """The header block, `HEADER_BYTES` long.

    Raises:
        RecordError: names or hashes do not fit (a model name of kilobytes), or a value is out of range.
    """
    oid, place = header.object_id, header.place
    parent = place.parent
    strings = (header.namespace.encode(), oid.model.encode(), oid.chunk_hash, oid.salt.encode(), parent or b"")
    flags = (parent is not None) | (place.position is not None) << 1
    try:
        fixed = _FIXED.pack(
            MAGIC, VERSION, place.kind, flags, 0, header.payload_bytes, header.payload_checksum, header.stored_at,
            place.position or 0, oid.kv_rank, oid.group, *map(len, strings),
        )  # fmt: skip
    except struct.error as e:
        raise RecordError(f"the key or place of {oid} does not fit a record header: {e}") from e
    block = bytearray(fixed + b"".join(strings))
    if len(block) > HEADER_BYTES:
        raise RecordError(f"the key of {oid} takes {len(block)} bytes; a record header holds {HEADER_BYTES}")
    block.extend(bytes(HEADER_BYTES - len(block)))
    _DIGEST.pack_into(block, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(bytes(block)))
    return bytes(block)


def decode_header(block: bytes | memoryview) -> Header:
    """Parse and verify a header block.

    Raises:
        RecordError: not a record, another version, cut short, or the checksum disagrees.
    """
    if len(block) < HEADER_BYTES:
        raise RecordError(f"the file ends inside the header ({len(block)} of {HEADER_BYTES} bytes)")
    data = bytes(block[:HEADER_BYTES])
    fields = _FIXED.unpack_from(data)
    magic, version, kind, flags, checksum, payload, payload_sum, stored_at, position, kv_rank, group = fields[:11]
    if magic != MAGIC:
        raise RecordError("the file does not start like a record")
    if version != VERSION:
        raise RecordError(f"record version {version}, this build reads version {VERSION}")
    if (
        xxhash.xxh3_64_intdigest(data[:_CHECKSUM_AT] + bytes(_DIGEST.size) + data[_CHECKSUM_AT + _DIGEST.size :])
        != checksum
    ):
        raise RecordError("the header checksum does not match")
    lengths = fields[11:]
    if _FIXED.size + sum(lengths) > HEADER_BYTES or not math.isfinite(stored_at):
        raise RecordError("the header holds impossible values")
    parts: list[bytes] = []
    at = _FIXED.size
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    try:
        return Header(
            namespace=parts[0].decode(),
            object_id=ObjectId(parts[1].decode(), parts[2], kv_rank, group, parts[3].decode()),
            payload_bytes=payload,
            payload_checksum=payload_sum,
            stored_at=stored_at,
            place=Place(parts[4] if flags & 1 else None, position if flags & 2 else None, Kind(kind)),
        )
    except ValueError as e:
        raise RecordError(f"the header holds impossible values: {e}") from e
