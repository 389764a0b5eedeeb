"""What can happen to the server, the network and the instances. In each: nobody waits, nothing wrong is said, it heals.

Every test measures how long it takes until all is right again, from the end of the fault (or from its begin, where the
fault is an instance that dies), and `table.py` puts that into docs/directory.md.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from directory_boxes import KV, SPACE
from fault_boxes import Lines, Link, Record
from fleet_box import LEASE, Instance, Process, Watch, until
from redis_box import RedisServer

from lmcache_histate.backends.directory_writer import DirectoryState

pytestmark = pytest.mark.slow

OURS, THEIRS = range(300), range(1000, 1050)
LONGEST_PUT_US = 250_000.0
"""Far less than any wait for a server, far more than a busy machine takes for a call that waits for nothing."""


class Pair:
    """Two instances in this process: a holds `OURS`, b holds `THEIRS`, both know of both."""

    def __init__(
        self, server: RedisServer, offsets: tuple[float, float] = (0.0, 0.0), queue_limit: int = 1 << 16
    ) -> None:
        self.a = Instance(server.url, "a", offsets[0], queue_limit)
        self.b = Instance(server.url, "b", offsets[1], queue_limit)
        self.a.hold(OURS)
        self.b.hold(THEIRS)
        until(self.right, "both instances knew of both")
        self.before_us = self.a.p99_put_us()
        (self.data_before,) = self.data()

    def right(self) -> bool:
        return self.b.sees_all("a", OURS) and self.a.sees_all("b", THEIRS)

    def data(self) -> set[bytes]:
        """Random names of the data that the two views were read from."""
        return {one.directory._seats[SPACE].incarnation for one in (self.a, self.b)}

    def right_again(self) -> bool:
        """Right by the server's new data, and not merely since the loss of the old was not noticed yet."""
        return self.data_before not in (data := self.data()) and len(data) == 1 and self.right()

    def blind(self) -> bool:
        return self.b.sees_none("a", OURS) and self.a.sees_none("b", THEIRS)

    def in_state(self, state: DirectoryState) -> bool:
        return self.a.writer.state is state and self.b.writer.state is state

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def pair(server: RedisServer) -> Iterator[Pair]:
    made = Pair(server)
    yield made
    made.close()


def heals(pair: Pair, record: Record, fault: str, happens: str, right: Callable[[], bool] | None = None) -> None:
    """Called when the fault is over: measures, and checks that no call waited."""
    seconds = until(right or pair.right, "healing")
    during_us = pair.a.p99_put_us()
    assert during_us < LONGEST_PUT_US
    record(fault=fault, happens=happens, seconds=seconds, lease=LEASE, before_us=pair.before_us, during_us=during_us)


def test_server_killed_and_back_empty_after_a_lease(
    server: RedisServer, pair: Pair, lines: Lines, record: Record
) -> None:
    server.kill()
    until(lambda: pair.in_state(DirectoryState.LOST))
    until(pair.blind, "forgetting the others")
    pair.a.hold(range(200, 300), 0)
    pair.a.hold(range(300, 400))
    server.start()
    heals(
        pair,
        record,
        "server killed for longer than a lease, comes back empty",
        "each instance forgets the others when their leases end; then it registers again and says all that it holds",
        lambda: pair.b.sees_all("a", [*range(200), *range(300, 400)]) and pair.a.sees_all("b", THEIRS),
    )
    assert pair.b.sees_none("a", range(200, 300)), "what went meanwhile is not said again"
    assert len(lines.with_words("cannot be reached", "does not answer")) in {2, 3, 4}
    assert lines.with_words("is back")
    assert pair.a.writer.status()["directory_registrations"] >= 2


def test_server_restarted_empty(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    server.kill()
    server.start()
    heals(
        pair,
        record,
        "server restarted at once, empty",
        "the data's random name is another one: views are emptied, all register again and say all that they hold",
        pair.right_again,
    )
    until(lambda: pair.in_state(DirectoryState.CONNECTED))


def test_server_flushed(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    with server.client() as client:
        client.flushall()
    heals(pair, record, "FLUSHALL", "as a restart, without a disconnection", pair.right_again)


def test_a_full_queue_during_an_outage_loses_nothing(server: RedisServer, record: Record) -> None:
    pair = Pair(server, queue_limit=64)
    try:
        server.kill()
        until(lambda: pair.in_state(DirectoryState.LOST))
        pair.a.hold(OURS, KV)
        until(lambda: pair.a.writer.status()["directory_refused"] > 0, "the queue filling up")
        server.start()
        heals(
            pair,
            record,
            "server away and the queue full",
            "the queue refuses (counted); the owner keeps what it could not say, and says it later",
            lambda: pair.b.sees_held("a", OURS, KV) and pair.a.sees_all("b", THEIRS),
        )
    finally:
        pair.close()


def test_server_paused_for_two_leases(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    server.pause()
    until(lambda: pair.in_state(DirectoryState.LOST))
    until(pair.blind, "forgetting the others")
    pair.a.hold(range(100), 0)
    time.sleep(LEASE)
    server.resume()
    heals(
        pair,
        record,
        "server stopped (SIGSTOP) for more than two leases",
        "calls time out; leases end by each instance's own clock. What reached the server before it stopped and is carried "
        "out late is refused: its number or its batch is over",
        lambda: pair.b.sees_all("a", range(100, 300)) and pair.a.sees_all("b", THEIRS),
    )
    until(lambda: pair.b.sees_none("a", range(100)))
    watch = Watch(pair.b, "a", range(100))
    time.sleep(1.0)
    watch.close()
    assert watch.last_seen == float("-inf"), "nothing of before the stop comes back"
    assert lines.with_words("does not answer", "cannot be reached")


def test_server_out_of_memory(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1")
        pair.a.hold(OURS, 0)
        pair.b.hold(THEIRS, KV)
        until(lambda: pair.in_state(DirectoryState.OUT_OF_MEMORY))
        until(pair.blind, "giving up the leases")
        pair.a.hold(OURS)
        time.sleep(LEASE)
        client.config_set("maxmemory", "0")
    heals(
        pair,
        record,
        "server out of memory (noeviction)",
        "an instance that cannot say what changed gives up its lease, so that nobody counts on what it said before; reading "
        "goes on",
    )
    assert lines.with_words("out of memory")
    until(lambda: bool(lines.with_words("is back")))


def test_wrong_password(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    with server.client() as client:
        client.config_set("requirepass", "secret")
        for entry in client.client_list():
            if entry["name"] == "histate-directory":
                client.client_kill_filter(_id=entry["id"], skipme=True)
        until(lambda: pair.in_state(DirectoryState.ACCESS_DENIED))
        until(pair.blind, "the leases ending")
    with server.client(password="secret") as client:
        client.config_set("requirepass", "")
    heals(pair, record, "wrong password", "as a server that is away; the log says that the password is refused")
    assert lines.with_words("refuses the user or password")


def test_another_schema(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    with server.client() as client:
        client.sadd("histate:schemas", 9)
        client.set("histate:schema:9", 1, px=int(LEASE * 1000))
    until(lambda: bool(lines.with_words("schema 9")))
    until(pair.right, "instances of one version seeing each other")
    heals(
        pair,
        record,
        "instances with another schema version in the same server",
        "each version has keys of its own and sees only its own; the log names the other version while it is there",
        lambda: bool(lines.with_words("all instances have the same schema")),
    )


def test_foreign_data_in_our_keys(server: RedisServer, pair: Pair, lines: Lines, record: Record) -> None:
    with server.client() as client:
        client.delete("histate:schemas")
        client.set("histate:schemas", "something else")
        until(lambda: pair.in_state(DirectoryState.UNUSABLE))
        until(pair.blind, "giving up the leases")
        client.delete("histate:schemas")
    heals(
        pair,
        record,
        "keys of another program under our prefix",
        "the directory is not used until they are gone; the log says which keys must be ours",
    )
    assert lines.with_words("must belong to HiState")


def test_partition(server: RedisServer, link: Link, lines: Lines, record: Record) -> None:
    """One instance cannot reach the server, the other one can."""
    near, far = Instance(server.url, "near"), Process(link.url, "far", link.prefix)
    try:
        near.hold(OURS)
        far.ask("hold", 1000, 1050)
        until(lambda: near.sees_all("far", THEIRS))
        until(lambda: all("near" in names for names in far.ask("sees", 0, 300)))
        before_us = far.ask("p99")
        link.cut()
        until(lambda: near.sees_none("far", THEIRS), "the server ending the lease")
        until(lambda: not any(far.ask("sees", 0, 300)), "the far side forgetting")
        assert near.writer.state is DirectoryState.CONNECTED
        assert far.ask("state") == "LOST"
        near.hold(range(100), 0)
        during_us = far.ask("p99")
        link.mend()
        seconds = until(
            lambda: near.sees_all("far", THEIRS) and all("near" in names for names in far.ask("sees", 100, 300)),
            "healing",
        )
        assert not any(far.ask("sees", 0, 100))
        assert during_us < LONGEST_PUT_US
        record(
            fault=f"partition between an instance and the server ({link.kind})",
            happens="both sides forget each other when the lease ends; afterwards it registers again",
            seconds=seconds,
            lease=LEASE,
            before_us=before_us,
            during_us=during_us,
        )
    finally:
        far.kill()
        near.close()


@pytest.mark.parametrize("offsets", [(600.0, -600.0), (-100_000.0, 100_000.0)])
def test_clock_skew(server: RedisServer, lines: Lines, record: Record, offsets: tuple[float, float]) -> None:
    pair = Pair(server, offsets)
    try:
        time.sleep(1.5 * LEASE)
        until(pair.right, "seeing each other in spite of the skew")
        pair.a.offset += 300.0  # a jump, as after a suspension
        heals(
            pair,
            record,
            "clocks minutes apart, and one that jumps by five minutes",
            "clocks are never compared: only the server's counts, and time differences; after a jump the view is empty until "
            "the next poll",
        )
        pair.a.offset -= 700.0
        until(lambda: 0.0 <= pair.a.directory.age(pair.a.clock()) < 60.0, "polling again after a jump back")
        until(pair.right)
    finally:
        pair.close()


def test_instance_killed(server: RedisServer, lines: Lines, record: Record) -> None:
    near, other = Instance(server.url, "near"), Process(server.url, "other")
    try:
        other.ask("hold", 0, 300)
        until(lambda: near.sees_all("other", OURS))
        before_us = near.p99_put_us()
        watch = Watch(near, "other", OURS)
        other.kill()
        killed = time.monotonic()
        seconds = until(lambda: near.sees_none("other", OURS), "forgetting the dead")
        time.sleep(LEASE)
        watch.close()
        assert watch.last_seen <= killed + LEASE, "a dead instance's chunks counted after its lease"
        with server.client() as client:
            swept = until(
                lambda: not any(client.hlen(key) for key in client.scan_iter("*:c:*", count=10_000)), "sweeping"
            )
        record(
            fault="instance killed (SIGKILL)",
            happens=f"it counts until its lease ends; its records were swept {swept + LEASE:.1f} s after that at the latest",
            seconds=seconds,
            lease=LEASE,
            before_us=before_us,
            during_us=near.p99_put_us(),
        )
    finally:
        other.kill()
        near.close()


def test_instance_killed_and_back_under_the_same_name(server: RedisServer, lines: Lines, record: Record) -> None:
    near, first = Instance(server.url, "near"), Process(server.url, "other")
    second: Process | None = None
    try:
        first.ask("hold", 0, 300)
        until(lambda: near.sees_all("other", OURS))
        before_us = near.p99_put_us()
        first.kill()
        start = time.monotonic()
        second = Process(server.url, "other")
        started = time.monotonic() - start
        second.ask("hold", 1000, 1050)
        until(lambda: near.sees_all("other", THEIRS), "seeing the new one")
        seconds = time.monotonic() - start - started
        watch = Watch(near, "other", OURS)
        time.sleep(2 * LEASE)
        watch.close()
        assert watch.last_seen == float("-inf"), "ghosts of the one before"
        assert second.ask("name") == "other"
        record(
            fault="instance killed and started again under its name",
            happens="what the dead one said is void the moment the new one registers",
            seconds=seconds,
            lease=LEASE,
            before_us=before_us,
            during_us=near.p99_put_us(),
        )
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
        near.close()


def test_instance_paused_for_two_leases(server: RedisServer, lines: Lines, record: Record) -> None:
    near, other = Instance(server.url, "near"), Process(server.url, "other")
    try:
        other.ask("hold", 0, 300)
        until(lambda: near.sees_all("other", OURS))
        before_us = near.p99_put_us()
        os.kill(other.process.pid, signal.SIGSTOP)
        until(lambda: near.sees_none("other", OURS), "the lease ending")
        time.sleep(LEASE)
        os.kill(other.process.pid, signal.SIGCONT)
        seconds = until(lambda: near.sees_all("other", OURS), "healing")
        record(
            fault="instance stopped (SIGSTOP) for two leases",
            happens="it counts as gone; when it goes on, it is told so, registers again and says all that it holds",
            seconds=seconds,
            lease=LEASE,
            before_us=before_us,
            during_us=near.p99_put_us(),
        )
    finally:
        other.kill()
        near.close()


def test_two_claim_one_name(server: RedisServer, lines: Lines, record: Record) -> None:
    near, older = Instance(server.url, "near"), Instance(server.url, "twin")
    newer: Instance | None = None
    try:
        older.hold(OURS)
        until(lambda: near.sees_all("twin", OURS))
        before_us = older.p99_put_us()
        newer = Instance(server.url, "twin")
        newer.hold(THEIRS)
        seconds = until(
            lambda: (
                near.sees_all("twin", THEIRS)
                and older.writer.instance != "twin"
                and near.sees_all(older.writer.instance, OURS)
            ),
            "both being known",
        )
        assert older.writer.instance.startswith("twin~")
        assert near.sees_none("twin", OURS)
        time.sleep(LEASE)
        assert newer.writer.instance == "twin", "the newer one keeps the name"
        assert near.sees_all("twin", THEIRS)
        assert len(lines.with_words("claimed the name twin")) == 1
        assert older.writer.status()["directory_names_lost"] == 1
        record(
            fault="two instances claim one name",
            happens="the newer one has it; the older one is told, says so in the log and goes on as `name~xxxxxx`",
            seconds=seconds,
            lease=LEASE,
            before_us=before_us,
            during_us=older.p99_put_us(),
        )
    finally:
        for one in (newer, older, near):
            if one is not None:
                one.close()
