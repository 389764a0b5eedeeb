"""An instance as a server has it: a directory writer, an owner that knows what is held, requests that say things."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from directory_boxes import FACTS, KV, SNAPSHOT, SPACE, chunk_hash

from lmcache_histate.backends.directory_writer import DirectoryWriter
from lmcache_histate.state_store.directory.protocol import Change, ChunkHeld, SessionHit
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import parse_directory_url

LEASE = 3.0
PATIENCE = 90.0
"""Seconds after which something counts as never happening: the machine may be busy."""


def until(condition: Callable[[], bool], what: str = "it") -> float:
    """Wait for something and return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + PATIENCE, f"{what} did not happen within {PATIENCE} s"
        time.sleep(0.01)
    return time.monotonic() - start


class Instance:
    """One instance in this process.

    Args:
        url: of the server.
        name: of the instance.
        offset: seconds by which its clock differs from everybody else's.
        queue_limit: of its writer.
    """

    def __init__(self, url: str, name: str, offset: float = 0.0, queue_limit: int = 1 << 16) -> None:
        self.offset = offset
        self.directory = RedisDirectory(parse_directory_url(url), name, lease_s=LEASE)
        self.writer = DirectoryWriter(self.directory, name, queue_limit, clock=self.clock)
        self.writer.join(SPACE, FACTS)
        self.held: dict[int, int] = {}
        self.put_seconds: list[float] = []
        self._unsaid: dict[int, None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._owner = threading.Thread(target=self._own, daemon=True)
        self._requests = threading.Thread(target=self._request, daemon=True)
        self.writer.start()
        self._owner.start()
        self._requests.start()

    def clock(self) -> float:
        return time.monotonic() + self.offset

    def close(self) -> None:
        self._stop.set()
        self._owner.join()
        self._requests.join()
        self.writer.close()

    # What the controller of a server does

    def hold(self, chunks: Iterable[int], held: int = KV | SNAPSHOT) -> None:
        """From now on it holds these chunks (or not, with 0)."""
        with self._lock:
            for index in chunks:
                self.held[index] = held
                self._unsaid[index] = None

    def _own(self) -> None:
        while not self._stop.wait(0.005):
            again = self.writer.to_be_told_again()
            with self._lock:
                if again:
                    self._unsaid = dict.fromkeys(self.held)
                while self._unsaid:
                    index = next(iter(self._unsaid))
                    change = ChunkHeld(
                        chunk_hash(index), self.held[index], chunk_hash(index - 1) if index else b"", 64 * (index + 1)
                    )
                    if not self._put(change):
                        break
                    del self._unsaid[index]

    # What a request does: says something, and must not wait

    def _request(self) -> None:
        while not self._stop.wait(0.005):
            self._put(SessionHit(chunk_hash(0), 64))

    def _put(self, change: Change) -> bool:
        start = time.perf_counter()
        taken = self.writer.put(SPACE, change)
        self.put_seconds.append(time.perf_counter() - start)
        return taken

    def p99_put_us(self) -> float:
        """Of the calls since the last question, at least a hundred."""
        until(lambda: len(self.put_seconds) >= 100, "a hundred calls")
        times, self.put_seconds = self.put_seconds, []
        return statistics.quantiles(times, n=100)[98] * 1e6

    # What it sees

    def sees(self, chunks: Iterable[int]) -> list[set[str]]:
        """Names of the holders of each chunk."""
        hashes = [chunk_hash(index) for index in chunks]
        return [{holder.member.name for holder in held} for held in self.directory.holders(SPACE, hashes, self.clock())]

    def sees_all(self, name: str, chunks: Iterable[int]) -> bool:
        return all(name in names for names in self.sees(chunks))

    def sees_held(self, name: str, chunks: Iterable[int], held: int) -> bool:
        """Whether it sees exactly this of all the chunks."""
        hashes = [chunk_hash(index) for index in chunks]
        return all(
            held in [holder.held for holder in holders if holder.member.name == name]
            for holders in self.directory.holders(SPACE, hashes, self.clock())
        )

    def sees_none(self, name: str, chunks: Iterable[int]) -> bool:
        return not any(name in names for names in self.sees(chunks))


class Watch:
    """Looks at what an instance sees of another, all the time; remembers when it last saw a chunk it should not."""

    def __init__(self, instance: Instance, name: str, chunks: Iterable[int]) -> None:
        self._instance, self._name, self._chunks = instance, name, list(chunks)
        self.last_seen = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.003):
            now = time.monotonic()
            if not self._instance.sees_none(self._name, self._chunks):
                self.last_seen = now

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Process:
    """One instance in a process of its own, told what to do over a pipe."""

    def __init__(self, url: str, name: str, prefix: Iterable[str] = ()) -> None:
        script = Path(__file__).parent / "directory_worker.py"
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(script), url, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # It imports what this process imported, from where it did.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.ask("name")

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(b"> "):
                return json.loads(line[2:])
        raise AssertionError(f"the instance ended with {self.process.wait()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
