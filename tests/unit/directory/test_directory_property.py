"""Several instances in any order of events, against a slow plain directory."""

from __future__ import annotations

import pytest
from directory_boxes import (
    FACTS,
    PREFIX,
    SHARED,
    SPACE,
    PlainDirectory,
    catch_up,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis_box import RedisServer

from lmcache_histate.state_store.directory.protocol import (
    ALL_BITS,
    REMOTE_BITS,
    Change,
    ChunkHeld,
    LeaseLost,
    SessionEnded,
)
from lmcache_histate.state_store.directory.reader import DirectoryReader
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url

NAMES = ("a", "b", "c")
TIERS = {"a": SHARED, "b": SHARED, "c": ""}
CHUNKS = [bytes([1, index, 7 * index]) for index in range(6)]


def change_of(chunk: int, held: int, removed: int, placed: bool) -> ChunkHeld:
    """A change of one chunk; where it stands is the same whoever says it."""
    removed &= REMOTE_BITS
    parent = CHUNKS[chunk - 1] if chunk and placed else b""
    return ChunkHeld(CHUNKS[chunk], held & ~removed, parent, 64 * (chunk + 1) if placed else 0, removed)


chunk_changes = st.builds(change_of, st.integers(0, 5), st.integers(0, ALL_BITS), st.integers(0, 63), st.booleans())
session_ends = st.builds(
    SessionEnded, st.sampled_from(CHUNKS), st.integers(1, 999), st.one_of(st.just(b""), st.sampled_from(CHUNKS))
)
names = st.sampled_from(NAMES)


class Instances(RuleBasedStateMachine):
    """Three instances that publish, die, restart, lose their answers; a server that is emptied and swept."""

    server: RedisServer

    @initialize()
    def begin(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.plain = PlainDirectory()
        self.plain.tiers = dict(TIERS)
        self.made: list[RedisDirectory] = []
        self.running: dict[str, RedisDirectory] = {}
        self.reader = DirectoryReader(parse_directory_url(self.server.url))
        # It takes no lease, so it sweeps nothing and only sees.
        self.watcher = self._make("watcher", "")
        self.watcher.register(SPACE, FACTS, 0.0)
        self.watcher.withdraw(0.0)
        self.now = 0.0

    def teardown(self) -> None:
        for directory in getattr(self, "made", []):
            directory.client.close()
        if hasattr(self, "reader"):
            self.reader.close()

    def _make(self, name: str, shared_tier: str) -> RedisDirectory:
        directory = RedisDirectory(
            parse_directory_url(self.server.url), name, shared_tier=shared_tier, lease_s=100_000.0, shared_ttl_s=1e6
        )
        self.made.append(directory)
        return directory

    @rule(name=names)
    def starts(self, name: str) -> None:
        """Also while its predecessor still has a lease."""
        self.running[name] = self._make(name, TIERS[name])
        self.running[name].register(SPACE, FACTS, self.now)
        self.plain.register(name, TIERS[name])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), said=st.lists(st.one_of(chunk_changes, session_ends), max_size=6), lost_answer=st.booleans())
    def publishes(self, data: st.DataObject, said: list[Change], lost_answer: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        directory = self.running[name]
        directory.publish(SPACE, said, self.now)
        if lost_answer:
            directory._seats[SPACE].batch -= 1
            directory.publish(SPACE, said, self.now)
        for change in said:
            assert isinstance(change, ChunkHeld | SessionEnded)
            self.plain.publish(name, change)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        directory = self.running.pop(name)
        with self.server.client() as client:
            client.delete(f"{PREFIX}:l:{directory._seats[SPACE].number}")
        self.plain.died(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), times=st.sampled_from([1, 30]))
    def polls(self, data: st.DataObject, times: int) -> None:
        """And sweeps: thirty times is a whole round."""
        for _ in range(times):
            self.running[data.draw(st.sampled_from(sorted(self.running)))].poll(self.now)

    @rule()
    def server_loses_everything(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.plain.shared.clear()
        self.plain.places.clear()
        self.plain.sessions.clear()
        for name, directory in self.running.items():
            try:
                directory.poll(self.now)
                raise AssertionError("it must notice")
            except LeaseLost:
                directory.register(SPACE, FACTS, self.now)
            self.plain.register(name, TIERS[name])

    @invariant()
    def all_answers_are_right(self) -> None:
        if not hasattr(self, "plain"):
            return
        self.now += 1.0
        catch_up(self.watcher, self.now)
        expected = [self.plain.holders(chunk) for chunk in CHUNKS]
        held = self.watcher.holders(SPACE, CHUNKS, self.now)
        assert [{holder.member.name: holder.held for holder in holders} for holders in held] == expected
        located = self.plain.locate(CHUNKS, FACTS)
        for answer in (self.watcher.locate(SPACE, CHUNKS, self.now), self.reader.locate(SPACE, FACTS, CHUNKS)):
            assert {at.member.name: (at.cpu_tokens, at.disk_tokens, at.tokens) for at in answer} == located
        places = {
            record.chunk_hash: (record.parent, record.position) for record in self.watcher.records(SPACE, self.now)
        }
        assert places == {
            chunk: self.plain.places[chunk]
            for chunk, holders in zip(CHUNKS, expected, strict=True)
            if holders and chunk in self.plain.places
        }
        for end, holders in zip(CHUNKS, expected, strict=True):
            session, known = self.watcher.session(SPACE, end, self.now), self.plain.sessions.get(end)
            if holders:  # a session whose chunk nobody holds may be swept at any time
                assert (session and (session.position, session.instance, session.moved_to)) == known


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_any_order_of_events(server: RedisServer, examples: int) -> None:
    machine = type("Machine", (Instances,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
