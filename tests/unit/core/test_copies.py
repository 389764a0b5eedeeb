"""What a tier lacks so that a prefix can be resumed from it alone, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.state_store.copies import copies_needed
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier
from lmcache_histate.state_store.tree import PrefixTree

CHUNKS, RANKS = 4, 2
PATH = [bytes([chunk]) for chunk in range(CHUNKS)]
FAMILIES = [*((chunk, Kind.KV) for chunk in range(CHUNKS)), (1, Kind.SNAPSHOT), (3, Kind.SNAPSHOT)]
OBJECTS = [(chunk, kind, rank, tier) for chunk, kind in FAMILIES for rank in range(RANKS) for tier in Tier]


def place(objects: set[tuple[int, Kind, int, Tier]], snapshot_bytes: float) -> PrefixTree:
    tree = PrefixTree()
    space = tree.add_namespace("m", CacheGeometry(64, 10.0, snapshot_bytes, RANKS))
    tree.extend(space, PATH, 1.0)
    tree.store(space, (CacheObject(PATH[chunk], kind, rank, tier, 9) for chunk, kind, rank, tier in objects), 1.0)
    return tree


@given(st.sets(st.sampled_from(OBJECTS)), st.sampled_from([1, 3]))
def test_it_is_what_the_target_lacks_if_the_source_has_all_of_it(objects, end):
    tree = place(objects, 5.0)
    wanted = {(chunk, Kind.KV, rank) for chunk in range(end + 1) for rank in range(RANKS)}
    wanted |= {(end, Kind.SNAPSHOT, rank) for rank in range(RANKS)}
    lacking = {entry for entry in wanted if (*entry, Tier.REMOTE) not in objects}
    possible = all((*entry, Tier.CPU) in objects for entry in lacking)
    found = copies_needed(tree, tree.namespaces[0].nodes[PATH[end]], Tier.CPU, Tier.REMOTE)
    if not possible:
        assert found is None
        return
    assert found is not None
    assert {(PATH.index(entry.chunk_hash), entry.kind, entry.rank) for entry in found} == lacking
    assert all(entry.tier is Tier.CPU for entry in found)
    # A copy that breaks off is a shorter prefix, never a snapshot without its KV.
    order = [(entry.kind, PATH.index(entry.chunk_hash)) for entry in found]
    assert order == sorted(order)


def test_an_attention_only_model_needs_no_snapshot():
    tree = place({(chunk, Kind.KV, rank, Tier.CPU) for chunk in range(3) for rank in range(RANKS)}, 0.0)
    nodes = tree.namespaces[0].nodes
    found = copies_needed(tree, nodes[PATH[2]], Tier.CPU, Tier.REMOTE)
    assert found is not None
    assert [entry.chunk_hash for entry in found] == [PATH[0], PATH[0], PATH[1], PATH[1], PATH[2], PATH[2]]
    assert copies_needed(tree, nodes[PATH[3]], Tier.CPU, Tier.REMOTE) is None


def test_what_nothing_can_be_resumed_from_is_not_copied():
    tree = place({(chunk, Kind.KV, rank, Tier.CPU) for chunk in range(CHUNKS) for rank in range(RANKS)}, 5.0)
    assert copies_needed(tree, tree.namespaces[0].nodes[PATH[2]], Tier.CPU, Tier.REMOTE) is None
