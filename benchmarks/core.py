"""Speed and memory of the pure core, against LMCache's own LRU in the same run.

    python -m benchmarks.core                  # 10,000, 100,000 and 1,000,000 units; two to three minutes, 2 GB
    python -m benchmarks.core --units 100000   # smaller

Every session is one path of 1,000 chunks with a snapshot at every chunk (the densest case: one unit a chunk), so 1,000
sessions make 1,000,000 units. Times are of the processor, since a shared machine has no others; they are medians of
repeated calls unless the row says otherwise. Growth is the ratio between the largest and the smallest cache: an
operation in O(path + log n) grows by half from 10,000 to 1,000,000 units, and by as much again as memory gets slower;
one in O(n) grows a hundredfold. The last column says whether the row's bar holds, for the largest cache.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import MIN_EVENTS_TO_PUBLISH, CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

SPACE = "model"
BLOCK = 528
KV_BYTES = 32 * 1024 * BLOCK
STATE_BYTES = 49 * 1024 * 1024
GEOMETRY = CacheGeometry(BLOCK, 32 * 1024, STATE_BYTES)
SESSION_CHUNKS = 1000
PATH = 256
GROWTH = 6.0
"""Bar for the growth of what must be O(path + log n)."""


class Row(NamedTuple):
    """What is measured, and what it must keep."""

    name: str
    bar: float | None = None
    """Microseconds, or bytes; None without a bar."""
    flat: bool = True
    """Whether its cost must not grow with the cache."""


MEMORY = Row("memory per unit, bytes", 700)
LOOKUP = Row("look-up, 256 chunks", 1000)
HIT = Row("hit, 256 chunks", 1000)
INSERT = Row("insert of a path, 256 chunks")
VICTIMS = Row("next victim, mean of 10,000 in a row", 50)
LOCKED = Row("next victim, when 100 are locked", 50)
FIRST = Row("next victim, the first after a change of all: O(n)", flat=False)
REPRICE = Row("re-pricing of everything: O(n)", flat=False)
REPRICE_SHARE = Row("  its share in one event")
DUMP = Row("to plain data, per unit")
LOAD = Row("from plain data, per unit")
SHADOWS = Row("all 256 chunks missed, on the tuner's four shadows")
ROWS = (MEMORY, LOOKUP, HIT, INSERT, VICTIMS, LOCKED, FIRST, REPRICE, REPRICE_SHARE, DUMP, LOAD, SHADOWS)


def chunk_hash(session: int, chunk: int) -> bytes:
    """32 bytes, as LMCache's hashes have."""
    return session.to_bytes(16, "big") + chunk.to_bytes(16, "little")


def build(units: int) -> CachePolicy:
    """A cache of `units` units, filled turn by turn as a server would."""
    policy = CachePolicy(PolicySettings(tau=600.0))
    policy.add_namespace(SPACE, GEOMETRY)
    chunks = min(SESSION_CHUNKS, units)
    for session in range(units // chunks):
        now = float(session)
        path = [chunk_hash(session, chunk) for chunk in range(chunks)]
        policy.lookup(SPACE, path, now)
        policy.stored(SPACE, [CacheObject(h, Kind.KV, 0, Tier.CPU, KV_BYTES) for h in path], now)
        policy.stored(SPACE, [CacheObject(h, Kind.SNAPSHOT, 0, Tier.CPU, STATE_BYTES) for h in path], now)
        policy.end_turn(SPACE, path, chunks * BLOCK, now)
    return policy


def median_us(call: Callable[[int], object], repeats: int) -> float:
    """Median microseconds of `call(i)`."""
    times = []
    for i in range(repeats):
        start = time.process_time()
        call(i)
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e6


def memory_per_unit(units: int) -> float:
    """Bytes that a cache of `units` units allocates, chunk hashes included; tracing is slow, so up to 100,000."""
    gc.collect()
    tracemalloc.start()
    policy = build(units)
    policy.order.settle()
    policy.next_victim(Tier.CPU, 0.0)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return traced / units


def replay_us(units: int) -> float:
    """Microseconds of a request with `tau="auto"` on a sampled session: 64 sessions that fit by half, all shadows."""
    capacity = min(units, 8192) * KV_BYTES
    policy = CachePolicy(PolicySettings(tau="auto"), {Tier.CPU: float(capacity)})
    policy.add_namespace(SPACE, GEOMETRY)
    paths = [[chunk_hash(session, chunk) for chunk in range(PATH)] for session in range(64)]

    def replay(path: list[bytes], now: float) -> None:
        policy.lookup(SPACE, path, now)
        while policy.tune():
            pass

    for turn in range(64):
        replay(paths[turn], float(turn))
    return median_us(lambda i: replay(paths[i * 7 % 64], 64.0 + i), 100)


def measure(units: int) -> dict[Row, float]:
    """All figures for one size: microseconds, except memory in bytes per unit."""
    result = {MEMORY: memory_per_unit(min(units, 100_000))}
    policy = build(units)
    sessions = max(1, units // SESSION_CHUNKS)
    now = float(sessions)
    policy.order.settle()

    def path(session: int) -> list[bytes]:
        return [chunk_hash(session % sessions, chunk) for chunk in range(PATH)]

    paths = [path(i * 7) for i in range(200)]
    result[LOOKUP] = median_us(lambda i: policy.lookup(SPACE, paths[i], now), 200)

    def hit(i: int) -> None:
        policy.hit(SPACE, paths[i], PATH * BLOCK, PATH * BLOCK, now)
        policy.order.settle()

    result[HIT] = median_us(hit, 200)
    new = [[chunk_hash(10**6 + i, chunk) for chunk in range(PATH)] for i in range(20)]
    objects = [
        [
            CacheObject(h, kind, 0, Tier.CPU, size)
            for kind, size in ((Kind.KV, KV_BYTES), (Kind.SNAPSHOT, STATE_BYTES))
            for h in p
        ]
        for p in new
    ]

    def insert(i: int) -> None:
        policy.lookup(SPACE, new[i], now)
        policy.stored(SPACE, objects[i], now)
        policy.order.settle()

    result[INSERT] = median_us(insert, 20)
    result[REPRICE] = median_us(lambda i: policy.publish(), 3)
    result[REPRICE_SHARE] = result[REPRICE] / max(MIN_EVENTS_TO_PUBLISH, units // 4)

    def evict(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            victim = policy.next_victim(Tier.CPU, now + 1)
            assert victim is not None
            policy.discard(victim, now + 1)
        return (time.process_time() - start) / count * 1e6

    result[FIRST] = evict(1)
    result[VICTIMS] = evict(min(10_000, units // 2))
    locked = policy.next_victim(Tier.CPU, now + 1)
    assert locked is not None
    result[LOCKED] = median_us(lambda i: policy.next_victim(Tier.CPU, now + 1), 100)
    start = time.process_time()
    plain = policy.dump()
    result[DUMP] = (time.process_time() - start) / units * 1e6
    again = CachePolicy(PolicySettings(tau=600.0))
    start = time.process_time()
    again.load(plain, now)
    result[LOAD] = (time.process_time() - start) / units * 1e6
    result[SHADOWS] = replay_us(units)
    return result


def measure_lmcache(units: int) -> dict[Row, float]:
    """LMCache's LRU over the same objects (two keys a unit), the calls that its controller makes."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.eviction_policy.lru import LRUEvictionPolicy

    def keys(session: int, chunks: int) -> list[ObjectKey]:
        return [ObjectKey(chunk_hash(session, chunk), SPACE, 0, group) for chunk in range(chunks) for group in (0, 1)]

    policy = LRUEvictionPolicy()
    chunks = min(SESSION_CHUNKS, units)
    for session in range(units // chunks):
        policy.on_keys_created(keys(session, chunks))
    sessions = units // chunks
    touched = [keys(i * 7 % sessions, PATH) for i in range(200)]
    result = {HIT: median_us(lambda i: policy.on_keys_touched(touched[i]), 200)}
    new = [keys(10**6 + i, PATH) for i in range(20)]
    result[INSERT] = median_us(lambda i: policy.on_keys_created(new[i]), 20)
    count = min(10_000, units // 2)

    def evict(ratio: float) -> int:
        victims = [key for action in policy.get_eviction_actions(ratio) for key in action.keys]
        policy.on_keys_removed(victims)
        return len(victims)

    start = time.process_time()
    gone = evict(count / units)
    result[VICTIMS] = (time.process_time() - start) / max(1, gone // 2) * 1e6
    result[FIRST] = median_us(lambda i: evict(1e-9), 20)
    return result


def shown(row: Row, value: float) -> str:
    """A figure with its unit."""
    if row is MEMORY:
        return f"{value:,.0f} B"
    return f"{value:,.2f} us" if value < 1000 else f"{value / 1000:,.2f} ms"


def verdict(row: Row, value: float, growth: float) -> str:
    """Whether the row keeps its bars."""
    if row.bar is None and not row.flat:
        return ""
    holds = (row.bar is None or value <= row.bar) and (not row.flat or growth <= GROWTH)
    return "[green]holds[/]" if holds else "[red]MISSED[/]"


def bar_text(row: Row) -> str:
    """The row's bars in words."""
    limit = "" if row.bar is None else f"<= {row.bar:,.0f} {'B' if row is MEMORY else 'us'}"
    return ", ".join(part for part in (limit, f"growth <= {GROWTH:.0f}x" if row.flat else "") if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1_000_000, help="size of the largest cache")
    parser.add_argument("--no-lmcache", action="store_true", help="leave the comparison out")
    arguments = parser.parse_args()
    console = Console(width=180)
    sizes = [size for size in (10_000, 100_000, 1_000_000) if size < arguments.units] + [arguments.units]
    columns = {}
    for size in sizes:
        with console.status(f"{size:,} units"):
            columns[size] = measure(size)
    lmcache = {} if arguments.no_lmcache else measure_lmcache(sizes[-1])
    table = Table(title="The core: one unit per chunk, 1,000 chunks a session")
    table.add_column("operation", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,} units", justify="right")
    for title in ("growth", "LMCache LRU", "ours / LMCache", "bar", ""):
        table.add_column(title, justify="right")
    first, last = columns[sizes[0]], columns[sizes[-1]]
    for row in ROWS:
        theirs, growth = lmcache.get(row), last[row] / first[row]
        table.add_row(
            row.name,
            *(shown(row, columns[size][row]) for size in sizes),
            f"{growth:.2f}x",
            "" if theirs is None else shown(row, theirs),
            "" if theirs is None else f"{last[row] / theirs:.1f}x",
            bar_text(row),
            verdict(row, last[row], growth),
        )
    console.print(table)


if __name__ == "__main__":
    main()
