"""What only the directory in Redis does: leases, names, batches, the feed, cleaning, and what a server looks like inside."""

from __future__ import annotations

import pytest
import redis
from directory_boxes import (
    FACTS,
    KV,
    KV_SHARED,
    PREFIX,
    SHARED,
    SNAPSHOT,
    SNAPSHOT_SHARED,
    SPACE,
    catch_up,
    chain,
    chunk_hash,
    hashes_of,
    instance,
)
from redis_box import RedisServer

from lmcache_histate.state_store.directory import scripts
from lmcache_histate.state_store.directory.encoding import CHUNK, SCHEMA
from lmcache_histate.state_store.directory.protocol import (
    ChunkHeld,
    LeaseLost,
    SessionEnded,
    Statistics,
    Unreachable,
    Unusable,
)
from lmcache_histate.state_store.directory.reader import DirectoryReader
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url
from lmcache_histate.state_store.objects import Kind


def end_lease(server: RedisServer, directory: RedisDirectory) -> None:
    """What the server does by itself when a lease is not renewed."""
    with server.client() as client:
        assert client.delete(f"{PREFIX}:l:{directory._seats[SPACE].number}") == 1


def names(directory: RedisDirectory, index: int, now: float = 0.0) -> set[str]:
    return {holder.member.name for holder in directory.holders(SPACE, [chunk_hash(index)], now)[0]}


def buckets(server: RedisServer) -> dict[bytes, dict[bytes, bytes]]:
    """All records in the server, by field."""
    with server.client() as client:
        return {key: client.hgetall(key) for key in client.scan_iter(f"{PREFIX}:c:*", count=10_000)}


def test_a_path_is_one_round_trip_and_one_command(server: RedisServer) -> None:
    directory = instance(server.url, "a")
    directory.publish(SPACE, chain(1), 0.0)  # the server learns the script
    with server.client() as client:
        client.config_resetstat()
        before = directory.client.round_trips
        directory.publish(SPACE, chain(256), 0.0)
        assert directory.client.round_trips - before == 1
        statistics = client.info("commandstats")
        assert statistics["cmdstat_evalsha"]["calls"] == 1
        assert "cmdstat_eval" not in statistics


def test_instances_see_each_other(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(3), 0.0)
    b.publish(SPACE, chain(2), 0.0)
    for directory in (a, b):
        catch_up(directory, 0.0)
        located = {at.member.name: at.tokens for at in directory.locate(SPACE, hashes_of(chain(3)), 0.0)}
        assert located == {"a": 192, "b": 128}
    keeps = [
        directory.elsewhere(SPACE, chunk_hash(i), Kind.KV, 0.0).ours_to_keep for i in (0, 1) for directory in (a, b)
    ]
    assert keeps[0] != keeps[1], "exactly one keeps the last copy"
    assert keeps[2] != keeps[3]
    assert a.elsewhere(SPACE, chunk_hash(2), Kind.KV, 0.0) == (False, False, True)
    assert b.elsewhere(SPACE, chunk_hash(2), Kind.KV, 0.0).others
    reader = DirectoryReader(parse_directory_url(server.url))
    assert reader.namespaces() == {SPACE: [FACTS]}
    assert [member.name for member in reader.members(SPACE, FACTS)] == ["a", "b"]
    assert reader.locate(SPACE, FACTS, hashes_of(chain(3))) == a.locate(SPACE, hashes_of(chain(3)), 0.0)


def test_a_view_forgets_the_others_when_it_hears_nothing(server: RedisServer) -> None:
    a, b = instance(server.url, "a", lease_s=600.0), instance(server.url, "b", lease_s=600.0)
    a.publish(SPACE, chain(1), 0.0)
    catch_up(b, 0.0)
    assert names(b, 0, 599.0) == {"a"}
    assert names(b, 0, 601.0) == set()
    assert b.age(601.0) == 601.0


def test_a_dead_instance_counts_as_absent_at_once_and_is_swept(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, [*chain(50), SessionEnded(chunk_hash(49), 3200)], 0.0)
    b.publish(SPACE, chain(10), 0.0)
    catch_up(b, 0.0)
    assert names(b, 0) == {"a", "b"}
    end_lease(server, a)
    reader = DirectoryReader(parse_directory_url(server.url))
    assert [at.member.name for at in reader.locate(SPACE, FACTS, hashes_of(chain(50)))] == ["b"]
    b.poll(0.0)
    assert names(b, 0) == {"b"}
    assert names(b, 20) == set()
    assert b.session(SPACE, chunk_hash(49), 0.0) is None
    for _ in range(scripts.BUCKETS * 4 // 4096 + 2):
        b.poll(0.0)
    left = [field for bucket in buckets(server).values() for field in bucket]
    assert sorted(left) == sorted(CHUNK + chunk for chunk in hashes_of(chain(10)))
    assert b.records_known == 10, "the view forgets them too"


def test_a_restarted_instance_leaves_no_ghosts(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(5), 0.0)
    catch_up(b, 0.0)
    again = RedisDirectory(parse_directory_url(server.url), "a", lease_s=600.0)
    registration = again.register(SPACE, FACTS, 0.0)
    assert (registration.name, registration.displaced) == ("a", True)
    again.publish(SPACE, chain(2), 0.0)
    b.poll(0.0)
    assert [names(b, index) for index in range(5)] == [{"a"}, {"a"}, set(), set(), set()]


def test_the_older_of_two_with_one_name_goes_on_under_another(server: RedisServer) -> None:
    older = instance(server.url, "a")
    older.publish(SPACE, chain(3), 0.0)
    newer = instance(server.url, "a")
    newer.publish(SPACE, chain(1), 0.0)
    with pytest.raises(LeaseLost):
        older.publish(SPACE, chain(4), 0.0)
    with pytest.raises(LeaseLost):
        older.publish(SPACE, chain(4), 0.0)
    registration = older.register(SPACE, FACTS, 0.0)
    assert registration.name.startswith("a~")
    assert not registration.displaced
    older.publish(SPACE, chain(3), 0.0)
    catch_up(newer, 0.0)
    assert names(newer, 0) == {"a", registration.name}
    assert names(newer, 2) == {registration.name}
    # It keeps that name, and the newer one is left alone.
    assert older.register(SPACE, FACTS, 0.0).name == registration.name
    newer.publish(SPACE, chain(2), 0.0)
    newer.poll(0.0)


def test_an_instance_that_lost_its_lease_comes_back_under_its_name(server: RedisServer) -> None:
    a = instance(server.url, "a")
    end_lease(server, a)
    with pytest.raises(LeaseLost):
        a.poll(0.0)
    assert a.register(SPACE, FACTS, 0.0) == ("a", False)


def test_a_batch_is_applied_once_and_in_order(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(1), 0.0)
    a.publish(SPACE, chain(1, 0), 0.0)
    seat = a._seats[SPACE]
    # An answer that got lost: the first batch is sent again, late. It must not bring back what is gone.
    seat.batch = 0
    a.publish(SPACE, chain(1), 0.0)
    catch_up(b, 0.0)
    assert names(b, 0) == set()
    seat.batch = 2
    a.publish(SPACE, chain(1), 0.0)
    b.poll(0.0)
    assert names(b, 0) == {"a"}


def test_a_view_that_missed_too_much_reads_all_anew(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(8), 0.0)
    catch_up(b, 0.0)
    a.publish(SPACE, chain(4, 0), 0.0)
    for index in range(100, 700):
        a.publish(SPACE, [ChunkHeld(chunk_hash(index), KV)], 0.0)
    with server.client() as client:
        assert client.xlen(f"{PREFIX}:f") < 602
        client.xtrim(f"{PREFIX}:f", maxlen=100, approximate=False)
    b.poll(5.0)
    catch_up(b, 6.0)
    assert [names(b, index, 6.0) for index in (0, 4, 100, 699)] == [set(), {"a"}, {"a"}, {"a"}]
    assert b.records_known == 604


def test_a_server_that_lost_its_data_is_noticed_and_the_view_emptied(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(3), 0.0)
    b.publish(SPACE, chain(3), 0.0)
    catch_up(b, 0.0)
    with server.client() as client:
        client.flushall()
    with pytest.raises(LeaseLost):
        b.poll(1.0)
    assert names(b, 0, 1.0) == set()
    for directory in (a, b):
        with pytest.raises(LeaseLost):
            directory.publish(SPACE, chain(1), 1.0)
        directory.register(SPACE, FACTS, 1.0)
        directory.publish(SPACE, chain(2), 1.0)
    catch_up(b, 1.0)
    assert names(b, 1, 1.0) == {"a", "b"}
    assert b.records_known == 2


def test_everything_expires(server: RedisServer) -> None:
    a = instance(server.url, "a", lease_s=10.0)
    a.publish(SPACE, [*chain(30), SessionEnded(chunk_hash(3), 256), Statistics(1.0)], 0.0)
    a.poll(0.0)
    with server.client() as client:
        left = {key: client.pttl(key) for key in client.scan_iter(count=10_000)}
    assert len(left) > 30
    assert all(0 < ttl <= 40_000 for ttl in left.values()), left
    assert all(ttl <= 20_000 for key, ttl in left.items() if b":c:" in key)


def test_buckets_are_renewed_by_whoever_is_alive(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(200), 0.0)
    with server.client() as client:
        keys = list(client.scan_iter(f"{PREFIX}:c:*", count=10_000))
        for key in keys:
            client.pexpire(
                key, 700_000
            )  # as if the record had been written 500 s ago; a lease is 600 s, a bucket's 1200
        b.poll(0.0)
        half_a_lease_ago = int(client.hget(f"{PREFIX}:m", "started")) - 300_000
        client.hset(f"{PREFIX}:m", "started", half_a_lease_ago)
        for _ in range(scripts.BUCKETS // 4096):
            b.poll(0.0)
        assert min(client.pttl(key) for key in keys) > 1_100_000
        assert int(client.hget(f"{PREFIX}:m", "cursor")) == scripts.BUCKETS
        # The next round begins when half a lease is over, and not before.
        b.poll(0.0)
        assert int(client.hget(f"{PREFIX}:m", "cursor")) == 0


def test_what_is_on_a_shared_tier_outlives_who_wrote_it(server: RedisServer) -> None:
    a = instance(server.url, "a", SHARED)
    a.publish(SPACE, chain(4, KV | SNAPSHOT | KV_SHARED | SNAPSHOT_SHARED), 0.0)
    end_lease(server, a)
    b, c = instance(server.url, "b", SHARED), instance(server.url, "c")
    catch_up(b, 0.0)
    located = {at.member.name: at for at in b.locate(SPACE, hashes_of(chain(4)), 0.0)}
    assert set(located) == {"b", SHARED}, "b can load it, c cannot, a is gone"
    assert (located["b"].disk_tokens, located["b"].tokens) == (0, 256)
    assert b.elsewhere(SPACE, chunk_hash(0), Kind.SNAPSHOT, 0.0) == (True, False, True)
    catch_up(c, 0.0)
    assert not c.elsewhere(SPACE, chunk_hash(0), Kind.SNAPSHOT, 0.0).shared
    for _ in range(20):
        b.poll(0.0)
    assert names(b, 0) == {SHARED}
    b.publish(SPACE, [ChunkHeld(chunk_hash(0), 0, shared_removed=KV_SHARED | SNAPSHOT_SHARED)], 0.0)
    b.poll(0.0)
    assert names(b, 0) == set()
    with server.client() as client:
        ttls = [client.pttl(key) for key in client.scan_iter(f"{PREFIX}:c:*", count=10_000)]
    assert min(ttls) > 3_600_000


def test_statistics_add_up_over_the_living(server: RedisServer) -> None:
    a, b, c = (instance(server.url, name) for name in "abc")
    a.publish(SPACE, [Statistics(1.0, 2.0, (3.0, 4.0), 5.0)], 0.0)
    a.publish(SPACE, [Statistics(10.0, 2.0, (3.0, 4.0), 5.0)], 0.0)  # present values, not differences
    b.publish(SPACE, [Statistics(1.0, 1.0, (1.0,))], 0.0)
    c.poll(0.0)
    assert c.statistics(SPACE, 0.0) == Statistics(11.0, 3.0, (4.0, 4.0), 5.0)
    a.poll(0.0)
    assert a.statistics(SPACE, 0.0) == Statistics(1.0, 1.0, (1.0,))
    end_lease(server, a)
    c.poll(0.0)
    assert c.statistics(SPACE, 0.0) == Statistics(1.0, 1.0, (1.0,))


def test_withdrawing_takes_effect_at_once(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(1), 0.0)
    catch_up(b, 0.0)
    a.withdraw(0.0)
    b.poll(0.0)
    assert names(b, 0) == set()
    a.poll(0.0)  # who has no lease still may read
    assert [member.name for member in a.instances(SPACE, 0.0)] == ["b"]


def test_fleets_with_other_prefixes_share_a_server_and_see_nothing_of_each_other(server: RedisServer) -> None:
    a, b, c = instance(server.url, "a"), instance(f"{server.url}?prefix=team-b", "a"), instance(server.url, "c")
    a.publish(SPACE, chain(2), 0.0)
    b.publish(SPACE, chain(1), 0.0)
    for directory in (a, b, c):
        catch_up(directory, 0.0)
    assert (names(c, 1), names(b, 1)) == ({"a"}, set())
    assert a.name == b.name == "a", "one name in two fleets is no conflict"
    reader = DirectoryReader(parse_directory_url(f"{server.url}?prefix=team-c"))
    assert reader.namespaces() == {}
    with server.client() as client:
        assert {key.partition(b":")[0] for key in client.scan_iter(count=10_000)} == {b"histate", b"team-b"}


def test_another_schema_is_told_apart_and_named(server: RedisServer) -> None:
    other = SCHEMA + 1
    with server.client() as client:
        client.sadd("histate:schemas", other)
        client.set(f"histate:schema:{other}", 1, ex=600)
        # What instances of that version would leave: same words, other bytes.
        client.hset(f"histate:{other}:{PREFIX.rpartition(':')[2]}:c:0", CHUNK + chunk_hash(0), b"?")
    a = RedisDirectory(parse_directory_url(server.url), "a", lease_s=600.0)
    a.register(SPACE, FACTS, 0.0)
    assert a.other_schemas == (other,)
    with server.client() as client:
        client.delete(f"histate:schema:{other}")
    a.poll(200.0)
    assert a.other_schemas == (other,), "it looks once in half a lease"
    a.poll(301.0)
    assert a.other_schemas == ()


def test_foreign_records_in_our_keys_are_left_out_and_overwritten(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b")
    a.publish(SPACE, chain(2), 0.0)
    with server.client() as client:
        for key, records in buckets(server).items():
            for field in records:
                client.hset(key, field, b"\x63 from elsewhere")
    catch_up(b, 0.0)
    assert b.locate(SPACE, hashes_of(chain(2)), 0.0) != [] or b.records_malformed == 2
    late = instance(server.url, "c")
    catch_up(late, 0.0)
    assert late.records_malformed == 2
    assert late.locate(SPACE, hashes_of(chain(2)), 0.0) == []
    a.publish(SPACE, chain(2), 0.0)
    late.poll(0.0)
    assert [at.tokens for at in late.locate(SPACE, hashes_of(chain(2)), 0.0)] == [128]


def test_keys_of_another_type_make_the_server_unusable(server: RedisServer) -> None:
    with server.client() as client:
        client.set("histate:schemas", "mine")
    directory = RedisDirectory(parse_directory_url(server.url), "a", lease_s=600.0)
    with pytest.raises(Unusable, match="must belong to HiState"):
        directory.register(SPACE, FACTS, 0.0)


def test_nobody_there(server: RedisServer) -> None:
    directory = RedisDirectory(parse_directory_url("redis://127.0.0.1:1"), "a", lease_s=600.0)
    with pytest.raises(Unreachable, match=r"redis://127\.0\.0\.1:1 cannot be reached"):
        directory.register(SPACE, FACTS, 0.0)
    directory.close()
    with pytest.raises(LeaseLost):
        directory.publish(SPACE, chain(1), 0.0)


@pytest.mark.parametrize("name", ["", "n" * 201])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 bytes"):
        RedisDirectory(parse_directory_url("redis://x"), name)
    with pytest.raises(ValueError, match="too short"):
        RedisDirectory(parse_directory_url("redis://x"), "a", lease_s=0.01)


def test_the_view_is_bounded(server: RedisServer) -> None:
    a, b = instance(server.url, "a"), instance(server.url, "b", max_records=10)
    a.publish(SPACE, chain(30), 0.0)
    catch_up(b, 0.0)
    assert b.records_known == 10


def test_records_are_packed_by_the_server(server: RedisServer) -> None:
    a = instance(server.url, "a")
    for session in range(8):
        a.publish(SPACE, chain(256, KV, session), 0.0)
    with server.client() as client:
        encodings = {client.object("encoding", key) for key in client.scan_iter(f"{PREFIX}:c:*", count=10_000)}
    assert encodings <= {b"listpack", b"ziplist"}
    assert isinstance(client, redis.Redis)
