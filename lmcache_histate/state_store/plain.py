"""A tree as plain data and back, for the durable catalogue and for the directory.

The data is columns of numbers and byte strings (any of JSON with base64, msgpack, sqlite can hold it). Chunks come parents
first, so that `parents[i] < i`; -1 is the root, -2 a chunk whose place is not known.
"""

from __future__ import annotations

from typing import TypedDict

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import NO_NODE, Namespace, PrefixTree

ROOT, DETACHED = -1, -2


class PlainNamespace(TypedDict):
    """One namespace as columns; all lists but `objects` have one entry per chunk."""

    name: str
    block_tokens: int
    kv_bytes_per_token: float
    snapshot_bytes: float
    ranks: int
    hashes: list[bytes]
    parents: list[int]
    accessed: list[float]
    objects: list[tuple[int, int, int, int, int]]
    """(chunk, kind, rank, tier, bytes) of every object."""


def dump_namespace(tree: PrefixTree, space: Namespace) -> PlainNamespace:
    """All chunks of one namespace that hold something or lead to something. O(chunks + objects)."""
    number: dict[int, int] = {space.root: ROOT}
    order: list[int] = []
    parents: list[int] = []
    # Depth first, older siblings first: chains stay together, and loading makes siblings in the order they had.
    todo = [node for node in space.nodes.values() if tree.parent[node] == NO_NODE][::-1]
    todo.extend(tree.children(space.root))
    while todo:
        node = todo.pop()
        number[node] = len(order)
        order.append(node)
        above = tree.parent[node]
        parents.append(DETACHED if above == NO_NODE else number[above])
        todo.extend(tree.children(node))
    geometry = space.geometry
    return PlainNamespace(
        name=space.name,
        block_tokens=geometry.block_tokens,
        kv_bytes_per_token=geometry.kv_bytes_per_token,
        snapshot_bytes=geometry.snapshot_bytes,
        ranks=geometry.ranks,
        hashes=[tree.hashes[node] for node in order],
        parents=parents,
        accessed=[tree.last_access[node] for node in order],
        objects=[
            (index, int(kind), obj.rank, int(tier), obj.nbytes)
            for index, node in enumerate(order)
            for kind in Kind
            for tier in Tier
            for obj in tree.objects(node, kind, tier)
        ],
    )


def load_namespace(tree: PrefixTree, data: PlainNamespace, now: float) -> Namespace:
    """Add to `tree` what `dump_namespace` gave. Last accesses are those of the data.

    O(chunks + objects), amortised.

    Raises:
        ValueError: the namespace is registered with another geometry, or the data contradict themselves.
    """
    geometry = CacheGeometry(data["block_tokens"], data["kv_bytes_per_token"], data["snapshot_bytes"], data["ranks"])
    space = tree.add_namespace(data["name"], geometry)
    hashes, parents = data["hashes"], data["parents"]
    if any(parent >= index or parent < DETACHED for index, parent in enumerate(parents)):
        raise ValueError("a chunk comes before its parent")
    # Chains are the rule: put them in as pieces of path.
    start = 0
    while start < len(hashes):
        end = start + 1
        while end < len(hashes) and parents[end] == end - 1:
            end += 1
        above = parents[start]
        if above == DETACHED:
            tree.extend(space, hashes[start + 1 : end], now, after=hashes[start])
        else:
            tree.extend(space, hashes[start:end], now, after=None if above == ROOT else hashes[above])
        start = end
    tree.store(
        space,
        (
            CacheObject(hashes[chunk], Kind(kind), rank, Tier(tier), nbytes)
            for chunk, kind, rank, tier, nbytes in data["objects"]
        ),
        now,
    )
    for chunk_hash, last in zip(hashes, data["accessed"], strict=True):
        tree.last_access[space.nodes[chunk_hash]] = last
    return space
