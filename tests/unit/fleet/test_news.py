"""News of a directory: what changed since the reader asked last, as it is by then."""

from __future__ import annotations

from lmcache_histate.state_store.directory.local import LocalDirectory
from lmcache_histate.state_store.directory.protocol import ChunkHeld, NamespaceFacts, SessionEnded, held_bit
from lmcache_histate.state_store.objects import Kind, Tier

KV = held_bit(Kind.KV, Tier.CPU)


def test_each_change_is_news_once_and_shows_the_last_state() -> None:
    directory = LocalDirectory("a", max_records=3)
    assert directory.news("m", 10, 0.0) == []
    directory.register("m", NamespaceFacts(64, 10, 5), 0.0)
    directory.publish("m", [ChunkHeld(b"1", KV, b"", 64), ChunkHeld(b"2", KV, b"1", 128), SessionEnded(b"2", 130)], 0.0)
    (first,) = directory.news("m", 1, 0.0)
    assert (first.chunk_hash, first.parent, first.position, first.holders[0].held) == (b"1", b"", 64, KV)
    directory.publish("m", [ChunkHeld(b"2", 0)], 1.0)
    gone = directory.news("m", 10, 1.0)
    assert [(record.chunk_hash, record.holders) for record in gone] == [(b"2", ()), (b"2", ())]
    assert directory.news("m", 10, 1.0) == []
    directory.publish("m", [ChunkHeld(b"3", 0)], 1.0)
    assert directory.news("m", 10, 1.0) == [], "what was not known and is gone is no news"
    directory.publish("m", [ChunkHeld(str(number).encode(), KV) for number in range(10)], 2.0)
    assert [record.chunk_hash for record in directory.news("m", 100, 2.0)] == [b"7", b"8", b"9"]
