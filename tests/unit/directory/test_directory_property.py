"""Several instances in any order of events, against a slow plain directory.

Seeds instead of hypothesis: every step talks to a real server, and shrinking would talk to it for minutes.
"""

from __future__ import annotations

from random import Random

import pytest
from directory_boxes import FACTS, PREFIX, SHARED, SPACE, PlainDirectory, catch_up
from redis_box import RedisServer

from lmcache_histate.state_store.directory.protocol import ALL_BITS, REMOTE_BITS, ChunkHeld, LeaseLost, SessionEnded
from lmcache_histate.state_store.directory.reader import DirectoryReader
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url

TIERS = {"a": SHARED, "b": SHARED, "c": ""}
CHUNKS = [bytes([1, index, 7 * index]) for index in range(6)]
STEPS = 40


class Instances:
    """Three instances that publish, die, restart, lose answers; a server that is swept and emptied."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        self.server, self.random = server, Random(seed)
        self.plain = PlainDirectory()
        self.plain.tiers = dict(TIERS)
        self.made: list[RedisDirectory] = []
        self.running: dict[str, RedisDirectory] = {}
        self.reader = DirectoryReader(parse_directory_url(server.url))
        self.now = 0.0
        self.doubtful: set[bytes] = set()
        """Ends whose chunk nobody held for a while: their sessions may have been swept."""
        # It takes no lease, so it sweeps nothing and only sees.
        self.watcher = self._make("watcher", "")
        self.watcher.register(SPACE, FACTS, 0.0)
        self.watcher.withdraw(0.0)
        for name in TIERS:
            self.starts(name)

    def close(self) -> None:
        for directory in self.made:
            directory.client.close()
        self.reader.close()

    def _make(self, name: str, shared_tier: str) -> RedisDirectory:
        address = parse_directory_url(self.server.url)
        directory = RedisDirectory(address, name, shared_tier=shared_tier, lease_s=100_000.0, shared_ttl_s=1e6)
        self.made.append(directory)
        return directory

    def _change(self) -> ChunkHeld | SessionEnded:
        draw = self.random
        chunk = draw.randrange(len(CHUNKS))
        if draw.random() < 0.3:
            return SessionEnded(CHUNKS[chunk], draw.randint(1, 999), draw.choice([b"", *CHUNKS]))
        # Where a chunk stands is the same whoever says it.
        placed, removed = draw.random() < 0.7, draw.randint(0, ALL_BITS) & REMOTE_BITS if draw.random() < 0.3 else 0
        held = draw.choice([0, draw.randint(0, ALL_BITS), ALL_BITS]) & ~removed
        parent = CHUNKS[chunk - 1] if chunk and placed else b""
        return ChunkHeld(CHUNKS[chunk], held, parent, 64 * (chunk + 1) if placed else 0, removed)

    # -- what happens ----------------------------------------------------------------------------------------------

    def starts(self, name: str) -> None:
        """Also while its predecessor still has a lease."""
        self.running[name] = self._make(name, TIERS[name])
        self.running[name].register(SPACE, FACTS, self.now)
        self.plain.register(name, TIERS[name])

    def publishes(self, name: str) -> None:
        said = [self._change() for _ in range(self.random.randint(1, 6))]
        directory = self.running[name]
        directory.publish(SPACE, said, self.now)
        for change in said:
            self._note(name, change)

    def _note(self, name: str, change: ChunkHeld | SessionEnded) -> None:
        self.plain.publish(name, change)
        if isinstance(change, SessionEnded):
            self.doubtful.discard(change.end)

    def publishes_late(self, name: str) -> None:
        """A batch whose answer was lost is sent once more, and the server carries it out after the next one."""
        first, second = self._change(), self._change()
        directory = self.running[name]
        seat = directory._seats[SPACE]
        for change in (first, second):
            directory.publish(SPACE, [change], self.now)
            self._note(name, change)
        seat.batch -= 2
        directory.publish(SPACE, [first], self.now)
        seat.batch += 1

    def dies(self, name: str) -> None:
        directory = self.running.pop(name)
        with self.server.client() as client:
            client.delete(f"{PREFIX}:l:{directory._seats[SPACE].number}")
        self.plain.died(name)

    def sweeps(self, name: str) -> None:
        for _ in range(20):  # a whole round
            self.running[name].poll(self.now)

    def loses_everything(self) -> None:
        with self.server.client() as client:
            client.flushall()
        self.plain.shared.clear()
        self.plain.sessions.clear()
        for name, directory in self.running.items():
            with pytest.raises(LeaseLost):
                directory.poll(self.now)
            directory.register(SPACE, FACTS, self.now)
            self.plain.register(name, TIERS[name])

    def step(self) -> str:
        kind = self.random.choices(
            ["publishes", "publishes_late", "starts", "dies", "sweeps", "flush"], [10, 3, 2, 2, 2, 1]
        )
        if kind == ["flush"]:
            self.loses_everything()
            return "flush"
        name = self.random.choice(sorted(TIERS if kind == ["starts"] or not self.running else self.running))
        what = kind[0] if self.running else "starts"
        getattr(self, what)(name)
        return f"{name} {what}"

    # -- what must hold --------------------------------------------------------------------------------------------

    def check(self, story: list[str]) -> None:
        """All answers of a view and of a reader that asks the server, against the plain directory's."""
        self.now += 1.0
        catch_up(self.watcher, self.now)
        expected = [self.plain.holders(chunk) for chunk in CHUNKS]
        held = self.watcher.holders(SPACE, CHUNKS, self.now)
        assert [{holder.member.name: holder.held for holder in holders} for holders in held] == expected, story
        located = self.plain.locate(CHUNKS, FACTS)
        for answer in (self.watcher.locate(SPACE, CHUNKS, self.now), self.reader.locate(SPACE, FACTS, CHUNKS)):
            assert {at.member.name: (at.cpu_tokens, at.disk_tokens, at.tokens) for at in answer} == located, story
        placed = {
            record.chunk_hash: (record.parent, record.position) for record in self.watcher.records(SPACE, self.now)
        }
        # A place that a dead instance said may still be known: it is true whoever said it.
        assert {
            chunk for chunk, held in zip(CHUNKS, expected, strict=True) if held
        } & self.plain.places.keys() <= placed.keys()
        for index, (end, holders) in enumerate(zip(CHUNKS, expected, strict=True)):
            if end in placed:
                assert placed[end] == (CHUNKS[index - 1] if index else b"", 64 * (index + 1)), story
            session, known = self.watcher.session(SPACE, end, self.now), self.plain.sessions.get(end)
            if known is None:
                self.doubtful.discard(end)
            elif not holders:
                self.doubtful.add(end)
            if holders and end not in self.doubtful:
                assert (session and (session.position, session.instance, session.moved_to)) == known, story


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_any_order_of_events(server: RedisServer, seed: int) -> None:
    instances = Instances(server, seed)
    story: list[str] = []
    try:
        for _ in range(STEPS):
            story.append(instances.step())
            instances.check(story)
    finally:
        instances.close()
