"""The directory against plain commands to the same server, on loopback.

    python -m benchmarks.directory                     # 1,000,000 records for the memory row; about two minutes
    python -m benchmarks.directory --records 100000    # smaller

It starts a redis-server of its own. Rates and times depend on the machine and on what else runs; the ratios to plain commands,
measured in turns with ours, do not. The bars of `locate` are on processor time, since a shared machine has no other times (the
99th percentile of a waiting time is then that of somebody else's work); the elapsed times are printed beside those of a plain
pipeline. The last column says whether the row's bar holds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lmcache_histate.backends.directory_writer import DirectoryWriter
from lmcache_histate.state_store.directory.encoding import CHUNK, pack_chunk
from lmcache_histate.state_store.directory.keys import Keys, namespace_tag
from lmcache_histate.state_store.directory.protocol import ChunkHeld, NamespaceFacts, SessionHit, held_bit
from lmcache_histate.state_store.directory.reader import DirectoryReader
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.scripts import BUCKETS
from lmcache_histate.state_store.directory.url import parse_directory_url
from lmcache_histate.state_store.objects import Kind, Tier

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "directory"))
from redis_box import redis_server  # one server to test and to measure with

SPACE = "model@1@"
FACTS = NamespaceFacts(528, 528 * 32 * 1024, 49 * 1024 * 1024)
KV, SNAPSHOT = held_bit(Kind.KV, Tier.CPU), held_bit(Kind.SNAPSHOT, Tier.DISK)
PATH = 256
INSTANCES = 16


def chunk_hash(session: int, chunk: int) -> bytes:
    """32 bytes that are spread like LMCache's hashes."""
    spread = (session * 1_000_003 + chunk) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return spread.to_bytes(8, "big") + session.to_bytes(12, "big") + chunk.to_bytes(12, "big")


def path(session: int) -> list[ChunkHeld]:
    """The chunks of one session, a snapshot at every eighth."""
    hashes = [b"", *(chunk_hash(session, chunk) for chunk in range(PATH))]
    return [
        ChunkHeld(hashes[i], KV | (SNAPSHOT if i % 8 == 0 else 0), hashes[i - 1], i * FACTS.block_tokens)
        for i in range(1, PATH + 1)
    ]


def bucket_of(chunk: bytes) -> str:
    """The key that holds the record of a chunk, as the scripts compute it."""
    return f"{Keys().of(namespace_tag(SPACE, FACTS))}:c:{int.from_bytes(chunk[1:3], 'big') % BUCKETS}"


def instance(url: str, name: str) -> RedisDirectory:
    """A registered instance with a lease that outlasts the benchmark."""
    directory = RedisDirectory(parse_directory_url(url), name, lease_s=600.0)
    directory.register(SPACE, FACTS, time.monotonic())
    return directory


def commands(server: redis.Redis) -> int:
    """Commands that clients sent so far; those that scripts ran are not among them."""
    info: Any = server.info("commandstats")
    return sum(int(info.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("evalsha", "eval", "pipeline"))


def p99(times: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(times, n=100, method="inclusive")[98]


class Times(NamedTuple):
    """Seconds of repeated calls: 99th percentiles."""

    elapsed: float
    processor: float
    """Of the calling thread."""


def timed(call: Callable[[], object], repeats: int = 2000) -> Times:
    """How long `call()` takes."""
    elapsed, processor = [], []
    for _ in range(repeats):
        start, worked = time.perf_counter(), time.thread_time()
        call()
        processor.append(time.thread_time() - worked)
        elapsed.append(time.perf_counter() - start)
    return Times(p99(elapsed), p99(processor))


def server_seconds(server: redis.Redis) -> float:
    """Processor time of the server's main thread so far."""
    info: Any = server.info("cpu")
    return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])


def round_trips(url: str) -> tuple[int, int]:
    """Requests that a client sends for a path of 256 chunks, by its count and by the server's."""
    directory = instance(url, "counted")
    directory.publish(SPACE, path(1_000_000), 0.0)  # the server learns the script
    with redis.Redis.from_url(url) as server:
        before = directory.client.round_trips, commands(server)
        directory.publish(SPACE, path(1_000_001), 0.0)
        after = directory.client.round_trips, commands(server)
    directory.close()
    return after[0] - before[0], after[1] - before[1]


def enqueue_us(url: str) -> tuple[float, float]:
    """Median and p99 of one `put`, in microseconds, while the thread publishes what is put."""
    writer = DirectoryWriter(RedisDirectory(parse_directory_url(url), "enqueues", lease_s=600.0), "enqueues")
    writer.join(SPACE, FACTS)
    writer.start()
    times = []
    for i in range(20_000):
        change = SessionHit(chunk_hash(i % 100, 7), 4224)
        start = time.perf_counter()
        writer.put(SPACE, change)
        times.append(time.perf_counter() - start)
        if i % 100 == 0:
            time.sleep(0.001)
    writer.close()
    return statistics.median(times) * 1e6, p99(times) * 1e6


class Locating(NamedTuple):
    """What one question for 256 chunks that 16 instances hold takes."""

    asked: Times
    """Asking the server."""
    server: float
    """Seconds that the server works on it, on average."""
    viewed: Times
    """From the local view."""
    plain: Times
    """A pipeline of 256 HGETs, without any decoding."""


def locating(url: str, repeats: int = 2000) -> Locating:
    """Measure `locate`."""
    directories = [instance(url, f"gpu-{i:02}") for i in range(INSTANCES)]
    for directory in directories:
        directory.publish(SPACE, path(0), 0.0)
    hashes = [change.chunk_hash for change in path(0)]
    reader, viewer = DirectoryReader(parse_directory_url(url)), directories[0]
    found = reader.locate(SPACE, FACTS, hashes)
    assert [location.tokens for location in found] == [PATH * FACTS.block_tokens] * INSTANCES
    viewer.poll(time.monotonic())
    while viewer.age(time.monotonic()) > 600.0:
        viewer.poll(time.monotonic())
    assert viewer.locate(SPACE, hashes, time.monotonic()) == found
    with redis.Redis.from_url(url) as server:

        def plain() -> None:
            pipe = server.pipeline(transaction=False)
            for chunk in hashes:
                pipe.hget(bucket_of(chunk), CHUNK + chunk)
            assert None not in pipe.execute()

        before = server_seconds(server)
        asked = timed(lambda: reader.locate(SPACE, FACTS, hashes), repeats)
        worked = (server_seconds(server) - before) / repeats
        viewed = timed(lambda: viewer.locate(SPACE, hashes, time.monotonic()), repeats)
        piped = timed(plain, repeats // 4)
    for directory in directories:
        directory.close()
    reader.close()
    return Locating(asked, worked, viewed, piped)


def publish_rates(url: str, rounds: int = 40) -> tuple[float, float]:
    """Records a second: ours, and a plain pipelined HSET of the same fields and records to the same keys. In turns."""
    directory = instance(url, "publisher")
    ours = plain = 0.0
    with redis.Redis.from_url(url) as server:
        for i in range(rounds):
            changes = path(2_000_000 + i)
            start = time.perf_counter()
            directory.publish(SPACE, changes, 0.0)
            ours += time.perf_counter() - start
            others = path(3_000_000 + i)
            start = time.perf_counter()
            pipe = server.pipeline(transaction=False)
            for change in others:
                record = pack_chunk(change.position, change.parent, ((1, change.held),))
                pipe.hset("plain:" + bucket_of(change.chunk_hash), CHUNK + change.chunk_hash, record)
            pipe.execute()
            plain += time.perf_counter() - start
    directory.close()
    return rounds * PATH / ours, rounds * PATH / plain


def memory_per_record(url: str, records: int) -> float:
    """Bytes of the server's memory for each chunk record, keys, feed and all."""
    with redis.Redis.from_url(url) as server:
        server.flushall()
        used: Any = server.info("memory")
        before = int(used["used_memory"])
        directory = instance(url, "full")
        for session in track(range(records // PATH), description=f"{records:,} records", transient=True):
            directory.publish(SPACE, path(session), 0.0)
        used = server.info("memory")
        directory.close()
        return (int(used["used_memory"]) - before) / (records // PATH * PATH)


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.2f} ms"


def main() -> int:
    """Measure everything and print the table; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000, help="records for the memory row (default 1000000)")
    records = parser.parse_args().records
    table = Table("", "measured", "bar", "", title="Directory in Redis, loopback")
    missed = False

    def row(name: str, measured: str, bar: str = "", holds: bool | None = None) -> None:
        nonlocal missed
        missed = missed or holds is False
        table.add_row(name, measured, bar, "" if holds is None else "[green]holds[/]" if holds else "[red]MISSED[/]")

    with redis_server() as server:
        by_client, by_server = round_trips(server.url)
        row("round trips to publish 256 chunks", str(by_client), "1", by_client == 1)
        row("  scripts that the server ran for them", str(by_server), "1", by_server == 1)
        middle, tail = enqueue_us(server.url)
        row("enqueue one change, median", f"{middle:.2f} us", "20 us", middle <= 20)
        row("  p99, with the thread publishing", f"{tail:.1f} us")
        found = locating(server.url)
        worked = found.asked.processor + found.server
        row("locate 256 chunks, 16 instances: p99 of the client + server", ms(worked), "2 ms", worked <= 2e-3)
        row("  of which server, mean", ms(found.server))
        row("  from the local view, p99", ms(found.viewed.processor), "2 ms", found.viewed.processor <= 2e-3)
        row("  elapsed, p99: asking the server", ms(found.asked.elapsed))
        row("  elapsed, p99: from the local view", ms(found.viewed.elapsed))
        row("  elapsed, p99: plain pipeline of 256 HGETs", ms(found.plain.elapsed))
        ours, plain = publish_rates(server.url)
        row("publish", f"{ours:,.0f} records/s")
        row("  plain pipelined HSET of the same bytes", f"{plain:,.0f} records/s")
        row("  ratio", f"{ours / plain:.2f}", "0.70", ours / plain >= 0.7)
        size = memory_per_record(server.url, records)
        # The feed is of one size whatever there is, so fewer records carry more of it each.
        holds = size <= 160 if records >= 1_000_000 else None
        row(f"memory per record at {records:,}", f"{size:.1f} B", "160 B at 1,000,000", holds)
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
