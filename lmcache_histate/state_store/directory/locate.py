"""Longest restorable prefix per member, from who holds which chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache_histate.state_store.directory.encoding import held_matrix
from lmcache_histate.state_store.directory.protocol import (
    KV_BITS,
    SNAPSHOT_BITS,
    Location,
    Member,
    NamespaceFacts,
    tier_bits,
)
from lmcache_histate.state_store.objects import Tier

_REACH = (
    tier_bits(Tier.CPU),
    tier_bits(Tier.CPU) | tier_bits(Tier.DISK),
    tier_bits(Tier.CPU) | tier_bits(Tier.DISK) | tier_bits(Tier.REMOTE),
)
"""Bits that count for each figure of a `Location`: a figure includes all faster tiers."""


def locate(facts: NamespaceFacts, records: Sequence[bytes | None], members: dict[int, Member]) -> list[Location]:
    """How much of a path each member can restore; the most first, then the fastest, then by name.

    O(chunks * members), vectorised.

    Args:
        facts: of the namespace.
        records: chunk record of each chunk of the prompt, from its start; None where there is none.
        members: those with a good lease, by number.
    """
    if not members or not len(records):
        return []
    order = list(members.values())
    held = held_matrix(records, {number: row for row, number in enumerate(members)})
    tiers = {member.name: row for row, member in enumerate(order) if member.is_tier}
    for row, member in enumerate(order):
        if member.shared_tier in tiers and not member.is_tier:
            held[row] |= held[tiers[member.shared_tier]]
    cpu, disk, whole = (_restorable(facts, held, reach) for reach in _REACH)
    found = [
        Location(member, int(cpu[row]), int(disk[row]), int(whole[row]))
        for row, member in enumerate(order)
        if whole[row]
    ]
    return sorted(found, key=lambda at: (-at.tokens, -at.disk_tokens, -at.cpu_tokens, at.member))


def _restorable(facts: NamespaceFacts, held: npt.NDArray[np.uint8], reach: int) -> npt.NDArray[np.int64]:
    """Tokens that each member can restore with the bits in `reach` alone; shape (members,)."""
    usable = np.logical_and.accumulate(held & (KV_BITS & reach) != 0, axis=1)
    if facts.is_hybrid:
        usable &= held & (SNAPSHOT_BITS & reach) != 0
    depths = np.arange(1, held.shape[1] + 1)
    chunks: npt.NDArray[np.int64] = np.max(np.where(usable, depths, 0), axis=1)
    return chunks * facts.block_tokens
