"""The words of the store: kinds of object, tiers, one stored object, and how long things stay."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What an object holds."""

    KV = 0
    """Attention KV of one chunk."""
    SNAPSHOT = 1
    """Recurrent state at the end of one chunk."""


class Tier(IntEnum):
    """Where an object lies, fastest first."""

    CPU = 0
    DISK = 1
    REMOTE = 2
    """Any store behind the disk: holds copies, is not evicted from here."""


class CacheObject(NamedTuple):
    """One stored object: the piece of one chunk that one rank wrote to one tier.

    Attributes:
        chunk_hash: rolling hash of the prefix that ends with this chunk.
        kind: KV or snapshot.
        rank: tensor-parallel rank, 0-based.
        tier: where the bytes are.
        nbytes: size in that tier. Ignored when the object is removed.
    """

    chunk_hash: bytes
    kind: Kind
    rank: int
    tier: Tier
    nbytes: int = 0
