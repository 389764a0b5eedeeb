"""What is cached, as one number: the KV of a block, or the snapshot at its end."""

from __future__ import annotations

from lmcache_histate.state_store.objects import Kind

KV, SNAPSHOT = int(Kind.KV), int(Kind.SNAPSHOT)


def kv_key(node: int) -> int:
    """The key of a block's KV."""
    return 2 * node


def snapshot_key(node: int) -> int:
    """The key of the snapshot at the end of a block."""
    return 2 * node + 1


def kind_of(key: int) -> int:
    """`KV` or `SNAPSHOT`."""
    return key & 1


def node_of(key: int) -> int:
    """The block that a key is about."""
    return key >> 1
