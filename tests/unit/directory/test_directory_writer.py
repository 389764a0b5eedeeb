"""The writer's queue and health, with directories that do what a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from directory_boxes import FACTS, KV, SPACE, chain, hashes_of
from redis_box import RedisServer

from lmcache_histate.backends.directory_writer import DirectoryState, DirectoryWriter
from lmcache_histate.state_store.directory.local import LocalDirectory
from lmcache_histate.state_store.directory.protocol import (
    AccessDenied,
    Change,
    ChunkHeld,
    DirectoryError,
    LeaseLost,
    NamespaceFacts,
    OutOfMemory,
    Registration,
    Unreachable,
    Unusable,
)
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url


class Troubled(LocalDirectory):
    """A directory that raises what it is told to, or waits."""

    lease_s = 2.0
    other_schemas: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__("a")
        self.trouble: DirectoryError | None = None
        self.once: list[DirectoryError] = []
        self.gate = threading.Event()
        self.gate.set()
        self.published: list[list[Change]] = []
        self.registrations = 0
        self.withdrawn = 0
        self.answer = Registration("a", False)

    def _meet(self) -> None:
        self.gate.wait(60.0)
        if self.once:
            raise self.once.pop(0)
        if self.trouble is not None:
            raise self.trouble

    def register(self, namespace: str, facts: NamespaceFacts, now: float) -> Registration:
        self._meet()
        super().register(namespace, facts, now)
        self.registrations += 1
        return self.answer

    def publish(self, namespace: str, changes: Sequence[Change], now: float) -> None:
        self._meet()
        super().publish(namespace, changes, now)
        self.published.append(list(changes))

    def poll(self, now: float) -> None:
        self._meet()

    def withdraw(self, now: float) -> None:
        self.withdrawn += 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(0.005)


@pytest.fixture
def directory() -> Troubled:
    return Troubled()


@pytest.fixture
def writer(directory: Troubled) -> DirectoryWriter:
    made = DirectoryWriter(directory, "a")
    made.join(SPACE, FACTS)
    return made


def test_changes_arrive_in_order_and_merged(directory: Troubled, writer: DirectoryWriter) -> None:
    directory.gate.clear()
    writer.start()
    path = chain(600, KV)
    for change in [*path, *(change._replace(held=0) for change in path[10:20])]:
        assert writer.put(SPACE, change)
    assert writer.put("never joined", path[0])
    directory.gate.set()
    until(lambda: writer.status()["directory_queued"] == 0 and sum(map(len, directory.published)) >= 600)
    writer.close()
    assert [len(batch) for batch in directory.published] == [256, 256, 88]
    assert directory.holders(SPACE, hashes_of(path[:1]), 0.0) != [()]
    assert directory.holders(SPACE, hashes_of(path[10:20]), 0.0) == [()] * 10
    assert writer.to_be_told_again() == [SPACE]
    assert writer.to_be_told_again() == []


def test_a_full_queue_refuses_and_nothing_waits(directory: Troubled) -> None:
    writer = DirectoryWriter(directory, "a", queue_limit=100)
    writer.join(SPACE, FACTS)
    directory.gate.clear()
    writer.start()
    taken = [writer.put(SPACE, ChunkHeld(bytes([index % 250, 1]), KV)) for index in range(150)]
    assert taken == [True] * 100 + [False] * 50
    assert writer.status()["directory_refused"] == 50
    directory.gate.set()
    until(lambda: writer.put(SPACE, ChunkHeld(b"late", KV)))
    writer.close()
    assert directory.holders(SPACE, [b"late"], 0.0) != [()], "what was taken is sent before it ends"


@pytest.mark.parametrize(
    ("error", "state", "withdraws"),
    [
        (Unreachable("redis://x cannot be reached"), DirectoryState.LOST, False),
        (AccessDenied("redis://x refuses"), DirectoryState.ACCESS_DENIED, True),
        (OutOfMemory("redis://x is out of memory"), DirectoryState.OUT_OF_MEMORY, True),
        (Unusable("redis://x is something else"), DirectoryState.UNUSABLE, True),
    ],
)
def test_each_trouble_is_one_line_and_heals(
    directory: Troubled,
    writer: DirectoryWriter,
    error: DirectoryError,
    state: DirectoryState,
    withdraws: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "lmcache_histate.backends.directory_writer.logger.warning", lambda text, *parts: lines.append(text % parts)
    )
    writer.start()
    until(lambda: writer.state is DirectoryState.CONNECTED)
    directory.trouble = error
    until(lambda: writer.status()["directory_failures"] >= 3)
    assert writer.state is state
    assert writer.status()["directory_connected"] == 0
    assert bool(directory.withdrawn) == withdraws
    directory.trouble = None
    until(lambda: writer.state is DirectoryState.CONNECTED)
    assert directory.registrations == (2 if withdraws else 1)
    writer.close()
    assert len(lines) == 2
    assert str(error) in lines[0]
    assert "Requests go on" in lines[0]
    assert "is back" in lines[1]


def test_the_same_batch_is_sent_again_after_an_unknown_outcome(directory: Troubled, writer: DirectoryWriter) -> None:
    writer.start()
    until(lambda: directory.registrations == 1)
    directory.gate.clear()
    for change in chain(3):
        writer.put(SPACE, change)
    directory.once = [Unreachable("no answer")] * 3
    directory.gate.set()
    until(lambda: bool(directory.published))
    writer.close()
    assert [len(batch) for batch in directory.published] == [3]


def test_a_lost_lease_has_everything_told_again(directory: Troubled, writer: DirectoryWriter) -> None:
    writer.start()
    until(lambda: writer.to_be_told_again() == [SPACE])
    directory.once = [LeaseLost("gone")]
    until(lambda: directory.registrations == 2)
    until(lambda: writer.to_be_told_again() == [SPACE])
    writer.close()


def test_a_lost_name_and_another_schema_are_said_once(
    directory: Troubled, writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    for level in ("warning", "error"):
        monkeypatch.setattr(
            f"lmcache_histate.backends.directory_writer.logger.{level}", lambda text, *parts: lines.append(text % parts)
        )
    directory.answer = Registration("a~12", False)
    directory.other_schemas = (7,)
    writer.start()
    until(lambda: directory.registrations == 1)
    directory.once = [LeaseLost("gone")]
    until(lambda: directory.registrations == 2)
    until(lambda: len(lines) >= 2)
    writer.close()
    assert writer.instance == "a~12"
    assert len(lines) == 2
    assert "claimed the name a" in lines[0]
    assert "goes on as a~12" in lines[0]
    assert "schema 7" in lines[1]
    assert writer.status()["directory_names_lost"] == 1


def test_a_bug_does_not_end_the_thread(
    directory: Troubled, writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("lmcache_histate.backends.directory_writer.logger.exception", logged.append)
    writer.start()
    until(lambda: directory.registrations == 1)
    writer.put(SPACE, ChunkHeld(b"", KV))  # no hash is empty; LocalDirectory refuses it as well
    directory.once = [ZeroDivisionError()]  # type: ignore[list-item]
    until(lambda: bool(logged))
    until(lambda: directory.registrations == 2)
    writer.put(SPACE, ChunkHeld(b"fine", KV))
    until(lambda: directory.holders(SPACE, [b"fine"], 0.0) != [()])
    writer.close()


def test_closing_a_writer_that_never_ran(directory: Troubled) -> None:
    DirectoryWriter(directory, "a").close()


def test_with_a_real_server(server: RedisServer) -> None:
    made = []
    for name in ("a", "b"):
        directory = RedisDirectory(parse_directory_url(server.url), name, lease_s=30.0)
        writer = DirectoryWriter(directory, name)
        writer.join(SPACE, FACTS)
        writer.start()
        made.append(writer)
    a, b = made
    for change in chain(300):
        a.put(SPACE, change)
    until(lambda: len(b.directory.locate(SPACE, hashes_of(chain(300)), time.monotonic())) == 1)
    assert b.status()["directory_members"] == 2
    until(lambda: 0 <= b.status()["directory_age_seconds"] < 60)  # known once a round is over
    a.close()
    until(lambda: b.directory.locate(SPACE, hashes_of(chain(300)), time.monotonic()) == [])
    b.close()
