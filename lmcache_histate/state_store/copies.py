"""What a tier lacks so that a prefix can be resumed from it alone."""

from __future__ import annotations

from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE, PrefixTree


def copies_needed(tree: PrefixTree, node: int, source: Tier, target: Tier) -> list[CacheObject] | None:
    """The objects to copy so that a request can resume at `node` from `target` alone. O(path).

    Whole families of ranks, in an order in which every part is of use: KV from the start of the prompt, the snapshot last.

    Args:
        tree: what exists.
        node: where to resume.
        source: the tier to copy from.
        target: the tier to copy to.

    Returns:
        Objects in `source`, none if `target` has all of it; None if it cannot be had: nothing can be resumed at `node`,
        or something is in neither tier.
    """
    if not tree.restorable.marked[node]:
        return None
    needed: list[CacheObject] = []
    above = node
    path = []
    while tree.parent[above] != NO_NODE:
        path.append(above)
        above = tree.parent[above]
    families = [(chunk, Kind.KV) for chunk in reversed(path)]
    if tree.namespaces[tree.space[node]].geometry.snapshot_bytes:
        families.append((node, Kind.SNAPSHOT))
    for chunk, kind in families:
        ranks = tree.ranks_lacking(chunk, kind, target)
        if not ranks:
            continue
        held = [entry for entry in tree.objects(chunk, kind, source) if entry.rank in ranks]
        if len(held) < len(ranks):
            return None
        needed += held
    return needed
