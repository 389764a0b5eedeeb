"""Which objects every node has: ranks and bytes, by kind and tier."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

# Members by value: calling an enum class costs more than what is done with its result.
KINDS, TIER_LIST = tuple(Kind), tuple(Tier)
TIERS = len(TIER_LIST)


class ObjectColumns:
    """Presence of objects, as arrays over node ids.

    The ranks of one (node, kind, tier) are equal shards, so it has one set of rank bits and one sum of bytes. Columns
    are numbered kind by kind: `kind * TIERS + tier`. All methods are O(1), but `objects` is O(ranks).
    """

    __slots__ = ("_bytes", "_ranks")

    def __init__(self) -> None:
        self._ranks = [array("I") for _ in range(len(KINDS) * TIERS)]
        self._bytes = [array("Q") for _ in range(len(KINDS) * TIERS)]

    def grow(self, nodes: int) -> None:
        """Make room for `nodes` more ids."""
        for ranks in self._ranks:
            ranks.frombytes(bytes(4 * nodes))
        for nbytes in self._bytes:
            nbytes.frombytes(bytes(8 * nodes))

    def add(self, node: int, kind: int, tier: int, bit: int, nbytes: int) -> bool:
        """Record the object of the rank with this bit; whether it was not there yet."""
        column = kind * TIERS + tier
        ranks = self._ranks[column]
        if ranks[node] & bit:
            return False
        ranks[node] |= bit
        self._bytes[column][node] += nbytes
        return True

    def take(self, node: int, kind: int, tier: int, rank: int) -> int | None:
        """Forget the object of `rank`; its bytes, or None if it was not there."""
        column = kind * TIERS + tier
        ranks = self._ranks[column]
        before = ranks[node]
        if rank < 0 or not before >> rank & 1:
            return None
        # An equal share each; the last one takes what is left of the division.
        share = self._bytes[column][node] // before.bit_count()
        ranks[node] = before & ~(1 << rank)
        self._bytes[column][node] -= share
        return share

    def ranks(self, node: int, kind: int, tier: int) -> int:
        """Rank bits in one tier."""
        return self._ranks[kind * TIERS + tier][node]

    def ranks_anywhere(self, node: int, kind: int) -> int:
        """Rank bits that lie in at least one tier."""
        ranks, base = self._ranks, kind * TIERS
        return ranks[base][node] | ranks[base + 1][node] | ranks[base + 2][node]

    def ranks_outside(self, node: int, kind: int, tier: int) -> int:
        """Rank bits that lie in at least one tier other than `tier`."""
        bits = 0
        for other in range(TIERS):
            if other != tier:
                bits |= self._ranks[kind * TIERS + other][node]
        return bits

    def nbytes(self, node: int, kind: int, tier: int) -> int:
        """Bytes of all ranks in one tier."""
        return self._bytes[kind * TIERS + tier][node]

    def held(self, kind: int, tier: int) -> npt.NDArray[np.uint32]:
        """Rank bits of all nodes in one tier, as they are now: a view, valid until the next `grow`."""
        return np.frombuffer(self._ranks[kind * TIERS + tier], dtype=np.uint32)

    def holds(self, node: int) -> bool:
        """Whether the node has any object."""
        a, b, c, d, e, f = self._ranks
        return (a[node] | b[node] | c[node] | d[node] | e[node] | f[node]) != 0

    def objects(self, node: int, chunk_hash: bytes, kind: int, tier: int) -> list[CacheObject]:
        """The objects of one kind and tier, by rank."""
        column = kind * TIERS + tier
        bits = self._ranks[column][node]
        if not bits:
            return []
        share = self._bytes[column][node] // bits.bit_count()
        what, where = KINDS[kind], TIER_LIST[tier]
        if bits == 1:
            return [CacheObject(chunk_hash, what, 0, where, share)]
        ranks = (rank for rank in range(bits.bit_length()) if bits >> rank & 1)
        return [CacheObject(chunk_hash, what, rank, where, share) for rank in ranks]
