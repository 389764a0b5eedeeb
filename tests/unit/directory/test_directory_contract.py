"""What both implementations do alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from directory_boxes import (
    FACTS,
    KV,
    KV_SHARED,
    SHARED,
    SNAPSHOT,
    SNAPSHOT_SHARED,
    SPACE,
    chain,
    chunk_hash,
    hashes_of,
    instance,
)
from redis_box import RedisServer

from lmcache_histate.state_store.directory.local import LocalDirectory
from lmcache_histate.state_store.directory.protocol import (
    ChunkHeld,
    Directory,
    NamespaceFacts,
    SessionEnded,
    SessionHit,
    Statistics,
)
from lmcache_histate.state_store.objects import Kind

Make = Callable[[str], Directory]


@pytest.fixture(params=["local", "redis"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a registered directory that uses the given shared tier."""
    made: list[Directory] = []

    def build(shared_tier: str = "") -> Directory:
        directory: Directory
        if request.param == "local":
            directory = LocalDirectory("a", "http://a", shared_tier)
            directory.register(SPACE, FACTS, 0.0)
        else:
            server: RedisServer = request.getfixturevalue("server")
            directory = instance(server.url, "a", shared_tier)
        made.append(directory)
        return directory

    yield build
    for directory in made:
        directory.close()


def test_what_was_said_is_found_again(make: Make) -> None:
    directory = make("")
    path = chain(5, KV)
    path[2] = path[2]._replace(held=KV | SNAPSHOT)
    directory.publish(SPACE, path, 1.0)
    directory.poll(1.0)
    (location,) = directory.locate(SPACE, hashes_of(path), 1.0)
    assert (location.member.name, location.member.address) == ("a", "http://a")
    assert (location.cpu_tokens, location.disk_tokens, location.tokens) == (0, 192, 192)
    assert [record.chunk_hash for record in directory.records(SPACE, 1.0)] == hashes_of(path)
    assert [(record.parent, record.position) for record in directory.records(SPACE, 1.0)] == [
        (change.parent, change.position) for change in path
    ]
    assert [len(holders) for holders in directory.holders(SPACE, [chunk_hash(0), chunk_hash(9)], 1.0)] == [1, 0]
    assert directory.age(1.5) == pytest.approx(0.5 if directory.lease_s < 1e9 else 0.0)


def test_a_later_word_replaces_an_earlier_one_and_keeps_the_place(make: Make) -> None:
    directory = make("")
    directory.publish(SPACE, [ChunkHeld(chunk_hash(0), KV)], 0.0)
    directory.publish(SPACE, [ChunkHeld(chunk_hash(0), KV, b"", 64)], 0.0)
    directory.publish(SPACE, [ChunkHeld(chunk_hash(0), SNAPSHOT)], 0.0)
    directory.poll(0.0)
    (record,) = directory.records(SPACE, 0.0)
    assert (record.position, record.holders[0].held) == (64, SNAPSHOT)
    directory.publish(SPACE, [ChunkHeld(chunk_hash(0), 0)], 0.0)
    directory.poll(0.0)
    assert directory.records(SPACE, 0.0) == []
    assert directory.locate(SPACE, [chunk_hash(0)], 0.0) == []


def test_a_shared_tier_is_nobodys_own(make: Make) -> None:
    directory = make(SHARED)
    path = chain(3, KV | KV_SHARED | SNAPSHOT_SHARED)
    directory.publish(SPACE, path, 0.0)
    directory.publish(SPACE, chain(2, 0), 0.0)  # none in tiers of its own; nothing said of the shared tier
    directory.poll(0.0)
    located = {location.member.name: location.tokens for location in directory.locate(SPACE, hashes_of(path), 0.0)}
    assert located == {"a": 192, SHARED: 192}
    elsewhere = directory.elsewhere(SPACE, chunk_hash(0), Kind.SNAPSHOT, 0.0)
    assert elsewhere.shared
    assert not elsewhere.others
    directory.publish(SPACE, [ChunkHeld(chunk_hash(0), 0, shared_removed=SNAPSHOT_SHARED)], 0.0)
    directory.poll(0.0)
    assert not directory.elsewhere(SPACE, chunk_hash(0), Kind.SNAPSHOT, 0.0).shared
    assert directory.elsewhere(SPACE, chunk_hash(0), Kind.KV, 0.0).shared


def test_without_a_shared_tier_the_remote_one_is_the_instances_own(make: Make) -> None:
    directory = make("")
    directory.publish(SPACE, chain(1, KV_SHARED | SNAPSHOT_SHARED), 0.0)
    directory.poll(0.0)
    (location,) = directory.locate(SPACE, [chunk_hash(0)], 0.0)
    assert (location.member.name, location.disk_tokens, location.tokens) == ("a", 0, 64)
    directory.publish(SPACE, chain(1, 0), 0.0)
    directory.poll(0.0)
    assert directory.locate(SPACE, [chunk_hash(0)], 0.0) == []


def test_sessions(make: Make) -> None:
    directory = make("")
    path = chain(4)
    directory.publish(SPACE, [*path, SessionEnded(chunk_hash(1), 130), SessionHit(chunk_hash(1), 100)], 1.0)
    directory.publish(SPACE, [SessionEnded(chunk_hash(3), 260, chunk_hash(1)), SessionHit(chunk_hash(2), 9)], 1.0)
    directory.poll(1.0)
    first = directory.session(SPACE, chunk_hash(1), 3.0)
    assert first is not None
    assert (first.position, first.instance, first.moved_to) == (130, "a", chunk_hash(3))
    assert first.hit_age_s == pytest.approx(2.0, abs=1.0)
    assert (first.hit_position, first.hit_instance) == (100, "a")
    second = directory.session(SPACE, chunk_hash(3), 3.0)
    assert second is not None
    assert (second.position, second.moved_to, second.hit_age_s) == (260, b"", None)
    assert directory.session(SPACE, chunk_hash(2), 3.0) is None, "a hit alone makes no session"
    directory.publish(SPACE, chain(4, 0), 2.0)
    directory.poll(2.0)
    assert directory.session(SPACE, chunk_hash(3), 3.0) is None, "a session goes with the chunk that names it"


def test_registering_again_voids_all(make: Make) -> None:
    directory = make("")
    directory.publish(SPACE, [*chain(3), SessionEnded(chunk_hash(2), 192)], 0.0)
    directory.poll(0.0)
    directory.register(SPACE, FACTS, 1.0)
    directory.poll(1.0)
    assert directory.locate(SPACE, hashes_of(chain(3)), 1.0) == []
    assert directory.records(SPACE, 1.0) == []
    assert directory.session(SPACE, chunk_hash(2), 1.0) is None


def test_other_facts_are_another_namespace(make: Make) -> None:
    directory = make("")
    directory.publish(SPACE, chain(1), 0.0)
    directory.register(SPACE, NamespaceFacts(64, 1000, 5001), 0.0)
    directory.poll(0.0)
    assert directory.records(SPACE, 0.0) == []


def test_an_attention_only_model_needs_no_snapshot(make: Make) -> None:
    directory = make("")
    directory.register("attention", NamespaceFacts(16, 1000, 0), 0.0)
    directory.publish("attention", chain(3, KV), 0.0)
    directory.poll(0.0)
    assert [location.cpu_tokens for location in directory.locate("attention", hashes_of(chain(3)), 0.0)] == [48]


def test_an_unknown_namespace_is_empty(make: Make) -> None:
    directory = make("")
    assert directory.locate("other", [chunk_hash(0)], 0.0) == []
    assert directory.holders("other", [chunk_hash(0)], 0.0) == [()]
    assert directory.session("other", chunk_hash(0), 0.0) is None
    assert directory.instances("other", 0.0) == []
    assert directory.statistics("other", 0.0) == Statistics()
    assert directory.elsewhere("other", chunk_hash(0), Kind.KV, 0.0).ours_to_keep
