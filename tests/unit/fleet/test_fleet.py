"""Several instances around one real Redis: what each tells, and what its core makes of what the others say.

The writer's thread is left out: what is put is published at once, so that every step is seen when it was made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from lmcache_histate.backends import fleet
from lmcache_histate.backends.fleet import Fleet
from lmcache_histate.backends.layout import ModelLayout, Namespace
from lmcache_histate.backends.remote_copies import RemoteCopies
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.directory.encoding import unpack_member
from lmcache_histate.state_store.directory.protocol import Change, LeaseLost, NamespaceFacts
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

CHUNK = 64
KV_BYTES, STATE_BYTES = 1000, 4000
LEASE = 60.0
SECONDS = 60.0
SHARED = "shared:file:///mnt/share"
SPACE = Namespace("model", 1, "")
PATH = [f"chunk-{number}".encode() for number in range(6)]
PLACES = (2, 5)
"""Chunks with a snapshot at their end."""


class DirectWriter:
    """Does at once what `DirectoryWriter` does on its thread."""

    def __init__(self, directory: RedisDirectory, name: str) -> None:
        self.directory, self.instance = directory, name
        self.facts: dict[str, NamespaceFacts] = {}
        self.again: list[str] = []
        self.full = False

    def join(self, namespace: str, facts: NamespaceFacts) -> None:
        self.facts[namespace] = facts
        self.directory.register(namespace, facts, time.monotonic())

    def put(self, namespace: str, change: Change) -> bool:
        if self.full:
            return False
        self.directory.publish(namespace, [change], time.monotonic())
        return True

    def begin_again(self, namespace: str) -> None:
        self.directory.register(namespace, self.facts[namespace], time.monotonic())
        self.again.append(namespace)

    def to_be_told_again(self) -> list[str]:
        names, self.again = self.again, []
        return names

    def poll(self) -> None:
        try:
            self.directory.poll(time.monotonic())
        except LeaseLost:
            for name, facts in self.facts.items():
                self.directory.register(name, facts, time.monotonic())
                self.again.append(name)
            self.directory.poll(time.monotonic())


class Instance:
    """One server's core and its part in the fleet."""

    def __init__(self, port: int, name: str, world_size: int = 1, shared: str = SHARED, lease: float = LEASE) -> None:
        self.space = SPACE._replace(world_size=world_size)
        self.layout = ModelLayout((Kind.KV, Kind.SNAPSHOT), (KV_BYTES, STATE_BYTES), world_size)
        self.policy = CachePolicy(PolicySettings(tau=1000.0))
        self.policy.add_namespace(self.space.name, self.layout.geometry(CHUNK))
        self.directory = RedisDirectory(
            parse_directory_url(f"redis://127.0.0.1:{port}"), name, shared_tier=shared, lease_s=LEASE
        )
        self.writer = DirectWriter(self.directory, name)
        self.restored: list[bytes] = []
        self.fleet = Fleet(
            self.policy,
            RemoteCopies(self.policy),
            self.writer,  # type: ignore[arg-type]
            shared,
            lambda _, chunk, now: self.restored.append(chunk),
        )
        self.fleet.joined(self.space, self.layout, CHUNK)

    def objects(self, path: list[bytes], tier: Tier, kinds: tuple[Kind, ...] = tuple(Kind)) -> list[CacheObject]:
        sizes = {Kind.KV: KV_BYTES, Kind.SNAPSHOT: STATE_BYTES}
        return [
            CacheObject(chunk, kind, rank, tier, sizes[kind])
            for chunk in path
            for kind in kinds
            for rank in range(self.layout.ranks)
            if kind == Kind.KV or (chunk in PATH and PATH.index(chunk) in PLACES)
        ]

    def store(self, tier: Tier, path: list[bytes] = PATH) -> None:
        now = time.monotonic()
        self.policy.lookup(self.space.name, path, now)
        self.policy.stored(self.space.name, self.objects(path, tier), now)
        (self.fleet.came_to_shared_tier if tier is Tier.REMOTE else self.fleet.changed)(self.space, path)

    def remove(self, tier: Tier, path: list[bytes] = PATH) -> None:
        self.policy.removed(self.space.name, self.objects(path, tier), time.monotonic())
        self.fleet.changed(self.space, path)

    def lookup_finds_nothing_shared(self, path: list[bytes] = PATH) -> None:
        """What a lookup does that finds that the shared tier lost everything."""
        now = time.monotonic()
        self.policy.removed(self.space.name, self.objects(path, Tier.REMOTE), now)
        self.fleet.looked(self.space, path, True, now)

    def end_turn(self, path: list[bytes]) -> None:
        self.fleet.turn_ended(self.space, path[::-1], time.monotonic() - 10.0)

    def round(self) -> None:
        self.writer.poll()
        while self.fleet.round(time.monotonic()):
            pass

    def _is_shared(self, chunk: bytes) -> bool:
        node = self.policy.space(self.space.name).nodes.get(chunk)
        return node is not None and self.policy.tree.complete_in(node, Kind.KV, Tier.REMOTE)

    def known_shared(self) -> list[bytes]:
        return [chunk for chunk in [*PATH, b"next-0", b"next-1"] if self._is_shared(chunk)]

    def price(self, end: bytes = PATH[-1]) -> float:
        """Value of the last unit of a path in CPU memory."""
        self.policy.order.settle()
        return self.policy.order.value(self.policy.space(self.space.name).nodes[end], Tier.CPU)

    def tokens(self) -> dict[str, int]:
        """What each member can restore of the path, in chunks, as this instance sees it."""
        found = self.directory.locate(self.space.name, PATH, time.monotonic())
        return {location.member.name: location.tokens // CHUNK for location in found}


def all_rounds(*instances: Instance, times: int = 3) -> None:
    for _ in range(times):
        for instance in instances:
            instance.round()


def end_lease(port: int, name: str) -> None:
    """What the server does when an instance has not been heard of for a lease: its key expires."""
    server = redis.Redis(port=port)
    leases = [key for key in server.scan_iter("*:l:*") if unpack_member(server.get(key)).name == name]
    assert len(leases) == 1
    server.delete(*leases)


@pytest.fixture
def make(redis_port: int) -> Iterator[object]:
    with ExitStack() as stack:

        def started(name: str, **choices: object) -> Instance:
            instance = Instance(redis_port, name, **choices)  # type: ignore[arg-type]
            stack.callback(instance.directory.close)
            return instance

        yield started


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_on_the_shared_tier_is_known_at_the_start_and_makes_ours_cheaper(make, world_size: int) -> None:
    writer, keeps = make("a", world_size=world_size), make("b", world_size=world_size)
    keeps.store(Tier.CPU)
    all_rounds(writer, keeps)
    alone = keeps.price()
    writer.store(Tier.CPU)
    writer.store(Tier.REMOTE)
    all_rounds(writer, keeps)
    assert keeps.known_shared() == PATH
    assert keeps.price() < alone, "it can be fetched again"
    starts = make("c", world_size=world_size)
    all_rounds(starts, times=1)
    assert starts.known_shared() == PATH
    assert starts.policy.lookup(starts.space.name, PATH, 1.0) == (6 * CHUNK, 6 * CHUNK)
    assert starts.tokens() == {"a": 6, "b": 6, "c": 6, SHARED: 6}
    assert starts.policy.tree.tier_bytes[Tier.CPU] == 0


def test_what_another_instance_holds_in_tiers_of_its_own_never_counts_as_present(make, redis_port: int) -> None:
    other, mine = make("a"), make("b")
    other.store(Tier.CPU)
    other.store(Tier.DISK)
    all_rounds(other, mine)
    assert mine.tokens() == {"a": 6}
    assert len(mine.policy.tree) == 0
    mine.store(Tier.CPU, PATH[:3])
    before = mine.price(PATH[2])
    # Killed: it says nothing more, and its lease ends. Nobody counts on it, and nothing of ours has changed.
    end_lease(redis_port, "a")
    all_rounds(mine)
    assert mine.tokens() == {"b": 3}
    assert mine.price(PATH[2]) == before
    assert len(mine.policy.tree) == 3


def test_what_leaves_is_told(make) -> None:
    one, other = make("a"), make("b")
    one.store(Tier.CPU)
    all_rounds(one, other)
    one.remove(Tier.CPU, PATH[3:])
    all_rounds(one, other)
    assert other.tokens() == {"a": 3}
    one.remove(Tier.CPU)
    all_rounds(one, other)
    assert other.tokens() == {}


def test_a_place_that_becomes_known_later_is_told_then(make) -> None:
    one, other = make("a"), make("b")
    one.policy.stored(one.space.name, one.objects(PATH, Tier.REMOTE), 1.0)
    one.fleet.came_to_shared_tier(one.space, PATH)
    all_rounds(one, other)
    # Known to be there, but not where: nothing can be restored from it as far as the core knows.
    assert other.policy.lookup(other.space.name, PATH[:1], 1.0).kv_tokens == CHUNK
    now = time.monotonic()
    one.policy.lookup(one.space.name, PATH, now)
    one.fleet.looked(one.space, PATH, False, now)
    all_rounds(one, other)
    assert [record.position for record in other.directory.records(other.space.name, now)] == [
        CHUNK * (number + 1) for number in range(6)
    ]
    tree, nodes = other.policy.tree, other.policy.space(other.space.name).nodes
    assert tree.is_whole(nodes[PATH[0]])


def test_a_session_that_goes_on_elsewhere_is_worth_less_here_until_it_comes_back(make) -> None:
    first, then = make("a"), make("b")
    first.store(Tier.CPU)
    first.end_turn(PATH)
    all_rounds(first, then)
    before = first.price()
    longer = [*PATH, b"next-0", b"next-1"]
    then.policy.lookup(then.space.name, longer, 1.0)
    kv = [CacheObject(chunk, Kind.KV, 0, Tier.CPU, KV_BYTES) for chunk in longer]
    then.policy.stored(then.space.name, [*kv, CacheObject(longer[-1], Kind.SNAPSHOT, 0, Tier.CPU, STATE_BYTES)], 1.0)
    then.end_turn(longer)
    deadline = time.monotonic() + SECONDS
    while not first.fleet.counts["sessions_moved_away"]:  # it asks once a second
        assert time.monotonic() < deadline
        all_rounds(then, first)
        time.sleep(0.1)
    session = first.directory.session(first.space.name, PATH[-1], time.monotonic())
    assert session is not None
    assert (session.instance, session.moved_to) == ("b", longer[-1])
    assert first.fleet.counts["sessions_moved_away"] == 1
    assert first.price() < before
    assert then.fleet.counts["sessions_moved_away"] == 0
    first.policy.hit(first.space.name, PATH, 6 * CHUNK, 6 * CHUNK, 2.0)
    assert first.price() > before


def test_a_session_has_moved_also_where_its_new_end_is_known_from_the_shared_tier(make) -> None:
    first, then, starts = make("a"), make("b"), make("c")
    longer = [*PATH, b"next-0", b"next-1"]
    first.store(Tier.CPU)
    first.end_turn(PATH)
    all_rounds(first, then)
    for tier in (Tier.CPU, Tier.REMOTE):
        then.policy.lookup(then.space.name, longer, 1.0)
        objects = [CacheObject(chunk, Kind.KV, 0, tier, KV_BYTES) for chunk in longer]
        objects.append(CacheObject(longer[-1], Kind.SNAPSHOT, 0, tier, STATE_BYTES))
        then.policy.stored(then.space.name, objects, 1.0)
    then.fleet.came_to_shared_tier(then.space, longer)
    then.end_turn(longer)
    deadline = time.monotonic() + SECONDS
    while not first.fleet.counts["sessions_moved_away"]:
        assert time.monotonic() < deadline
        all_rounds(then, first, starts)
        time.sleep(0.1)
    assert first.known_shared() == starts.known_shared() == longer
    for instance, counted in ((first, 1), (then, 0), (starts, 0)):
        end = instance.policy.space(instance.space.name).nodes[longer[-1]]
        assert instance.policy.reach.records[end].moved == (instance is not then)
        assert instance.fleet.counts["sessions_moved_away"] == counted, "of what was never here, nothing is learned"
    # A hit here: it is ours again, although the view still shows where its last turn ended.
    now = time.monotonic()
    first.policy.lookup(first.space.name, longer, now)
    first.fleet.hit(first.space, longer, len(longer), now)
    first.policy.hit(first.space.name, longer, len(longer) * CHUNK, len(longer) * CHUNK, now)
    end = first.policy.space(first.space.name).nodes[longer[-1]]
    for _ in range(15):
        all_rounds(first, times=1)
        assert not first.policy.reach.records[end].moved
        time.sleep(0.1)


def test_of_those_who_hold_a_lost_copy_exactly_one_puts_it_back_and_another_when_that_one_is_gone(make) -> None:
    instances = {name: make(name) for name in ("a", "b", "c")}
    for instance in instances.values():
        instance.store(Tier.CPU)
    instances["a"].store(Tier.REMOTE)
    all_rounds(*instances.values())
    for _ in range(2):
        asks = next(iter(instances.values()))
        asks.lookup_finds_nothing_shared()
        all_rounds(*instances.values())
        assert all(instance.known_shared() == [] for instance in instances.values())
        # One decides for each chunk, so that between them the whole path is put back, and no chunk by two.
        told = {name: instance.fleet.counts["shared_copies_to_restore"] for name, instance in instances.items()}
        elsewhere = [
            (name, chunk, kind)
            for name, instance in instances.items()
            for chunk in PATH
            for kind in Kind
            if instance.directory.elsewhere(instance.space.name, chunk, kind, time.monotonic()).ours_to_keep
            and (kind == Kind.KV or PATH.index(chunk) in PLACES)
        ]
        assert len(elsewhere) == len({(chunk, kind) for _, chunk, kind in elsewhere}) == 8
        owed = {name: sum(owner == name for owner, _, _ in elsewhere) for name in instances}
        for name, instance in instances.items():
            assert told[name] == owed[name], (told, owed)
            assert set(instance.restored) <= {PATH[-1]}
            instance.fleet.counts["shared_copies_to_restore"] = 0
        # The owner of most of it dies; what it owed falls to the others.
        gone = max(owed, key=lambda name: owed[name])
        instances.pop(gone).directory.withdraw(time.monotonic())
        next(iter(instances.values())).store(Tier.REMOTE)
        all_rounds(*instances.values())
        assert all(instance.known_shared() == PATH for instance in instances.values())


def test_after_the_directory_lost_its_data_everything_is_told_again(make, redis_port: int) -> None:
    one, other = make("a"), make("b")
    one.store(Tier.DISK)
    one.store(Tier.REMOTE)
    all_rounds(one, other)
    assert other.tokens() == {"a": 6, "b": 6, SHARED: 6}
    redis.Redis(port=redis_port).flushall()
    deadline = time.monotonic() + SECONDS
    while one.tokens() != {"a": 6, "b": 6, SHARED: 6} or other.tokens() != {"a": 6, "b": 6, SHARED: 6}:
        assert time.monotonic() < deadline, (one.tokens(), other.tokens())
        all_rounds(one, other, times=1)
    assert one.known_shared() == other.known_shared() == PATH


def test_what_the_queue_refuses_is_told_later_and_too_much_of_it_is_told_anew(make, monkeypatch) -> None:
    monkeypatch.setattr(fleet, "MAX_UNSAID", 8)
    monkeypatch.setattr(fleet, "SAID_PER_ROUND", 4)
    one, other = make("a"), make("b")
    one.store(Tier.CPU)
    all_rounds(one, other)
    one.writer.full = True
    one.remove(Tier.CPU, PATH[4:])
    all_rounds(one, other)
    assert other.tokens() == {"a": 6}, "not told yet"
    one.writer.full = False
    all_rounds(one, other)
    assert other.tokens() == {"a": 3}
    one.writer.full = True
    one.remove(Tier.CPU, PATH[1:])
    many = [f"other-{number}".encode() for number in range(40)]
    one.policy.lookup(one.space.name, many, 1.0)
    one.policy.stored(one.space.name, [CacheObject(chunk, Kind.KV, 0, Tier.CPU, KV_BYTES) for chunk in many], 1.0)
    one.fleet.changed(one.space, many)
    assert one.fleet.unsaid <= 8
    one.writer.full = False
    all_rounds(one, other, times=5)
    held = other.directory.holders(one.space.name, [*PATH, *many], time.monotonic())
    assert [bool(holders) for holders in held] == [True] + [False] * 5 + [True] * 40


def test_our_own_word_that_is_still_on_its_way_is_not_taken_back(make) -> None:
    one = make("a")
    one.store(Tier.CPU)
    one.round()
    # News of the CPU copies are still to be heard when the shared copies are told.
    one.store(Tier.CPU)
    one.fleet.round(time.monotonic())
    one.store(Tier.REMOTE)
    one.fleet.round(time.monotonic())
    assert one.known_shared() == PATH
    all_rounds(one)
    assert one.known_shared() == PATH
    assert one.fleet.counts["shared_copies_lost"] == 0


def test_without_a_shared_tier_a_remote_copy_is_the_instances_own(make) -> None:
    one, other = make("a", shared=""), make("b", shared="")
    one.store(Tier.REMOTE)
    all_rounds(one, other)
    assert other.tokens() == {"a": 6}
    assert other.known_shared() == []


def test_a_new_instance_begins_with_the_statistics_of_the_others_once(make) -> None:
    one = make("a")
    one.store(Tier.CPU)
    for turn in range(64):
        one.policy.hit(one.space.name, PATH, 3 * CHUNK, 3 * CHUNK, 10.0 + turn)
    one.round()
    two = make("b")
    all_rounds(two, times=1)
    learned = two.policy.access.end_probability
    assert learned < 0.2
    all_rounds(one, two)
    assert two.policy.access.end_probability == learned
    assert two.policy.statistics(1.0).hits == 0.0
