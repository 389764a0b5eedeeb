"""Speed and memory of the pure core, against LMCache's own LRU in the same run.

    python benchmarks/core.py                  # 10,000, 100,000 and 1,000,000 units
    python benchmarks/core.py --units 100000   # smaller

Every session is one path of 1,000 chunks with a snapshot at every chunk (the densest case: one unit a chunk), so 1,000
sessions make 1,000,000 units. Times are of the processor, since a shared machine has no others; they are medians of
repeated calls unless a column says otherwise; growth is the ratio between the largest and the smallest cache, so O(path
+ log n) shows as a number near 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.scorer.settings import PolicySettings
from lmcache_histate.state_store.objects import CacheObject, Kind, Tier

SPACE = "model"
BLOCK = 528
KV_BYTES = 32 * 1024 * BLOCK
STATE_BYTES = 49 * 1024 * 1024
GEOMETRY = CacheGeometry(BLOCK, 32 * 1024, STATE_BYTES)
SESSION_CHUNKS = 1000
PATH = 256
BARS = {
    "lookup, 256 chunks": "1 ms",
    "hit, 256 chunks": "1 ms",
    "next victim, 10,000 in a row": "50 us",
    "memory per unit": "700 B",
}


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


def measure(units: int) -> dict[str, float]:
    """All figures for one size: microseconds, except memory in bytes per unit."""
    result = {"memory per unit": memory_per_unit(min(units, 100_000))}
    policy = build(units)
    sessions = max(1, units // SESSION_CHUNKS)
    now = float(sessions)
    policy.order.settle()

    def path(session: int) -> list[bytes]:
        return [chunk_hash(session % sessions, chunk) for chunk in range(PATH)]

    paths = [path(i * 7) for i in range(200)]
    result["lookup, 256 chunks"] = median_us(lambda i: policy.lookup(SPACE, paths[i], now), 200)

    def hit(i: int) -> None:
        policy.hit(SPACE, paths[i], PATH * BLOCK, PATH * BLOCK, now)
        policy.order.settle()

    result["hit, 256 chunks"] = median_us(hit, 200)
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

    result["insert of a path, 256 chunks"] = median_us(insert, 20)
    result["re-price everything"] = median_us(lambda i: policy.publish(), 3)

    def evict(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            victim = policy.next_victim(Tier.CPU, now + 1)
            assert victim is not None
            policy.discard(victim, now + 1)
        return (time.process_time() - start) / count * 1e6

    result["next victim, the first after a change"] = evict(1)
    result["next victim, 10,000 in a row"] = evict(min(10_000, units // 2))
    locked = policy.next_victim(Tier.CPU, now + 1)
    assert locked is not None
    result["next victim, when 100 are locked"] = median_us(lambda i: policy.next_victim(Tier.CPU, now + 1), 100)
    start = time.process_time()
    plain = policy.dump()
    result["to plain data, per unit"] = (time.process_time() - start) / units * 1e6
    again = CachePolicy(PolicySettings(tau=600.0))
    start = time.process_time()
    again.load(plain, now)
    result["from plain data, per unit"] = (time.process_time() - start) / units * 1e6
    return result


def measure_lmcache(units: int) -> dict[str, float]:
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
    result = {"hit, 256 chunks": median_us(lambda i: policy.on_keys_touched(touched[i]), 200)}
    new = [keys(10**6 + i, PATH) for i in range(20)]
    result["insert of a path, 256 chunks"] = median_us(lambda i: policy.on_keys_created(new[i]), 20)
    count = min(10_000, units // 2)

    def evict(ratio: float) -> int:
        victims = [key for action in policy.get_eviction_actions(ratio) for key in action.keys]
        policy.on_keys_removed(victims)
        return len(victims)

    start = time.process_time()
    gone = evict(count / units)
    result["next victim, 10,000 in a row"] = (time.process_time() - start) / max(1, gone // 2) * 1e6
    result["next victim, the first after a change"] = median_us(lambda i: evict(1e-9), 20)
    return result


def shown(name: str, value: float) -> str:
    """A figure with its unit."""
    if name.startswith("memory"):
        return f"{value:,.0f} B"
    return f"{value:,.1f} us" if value < 1000 else f"{value / 1000:,.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1_000_000, help="size of the largest cache")
    parser.add_argument("--no-lmcache", action="store_true", help="leave the comparison out")
    arguments = parser.parse_args()
    console = Console(width=150)
    sizes = [size for size in (10_000, 100_000, 1_000_000) if size < arguments.units] + [arguments.units]
    columns = {}
    for size in sizes:
        with console.status(f"{size:,} units"):
            columns[size] = measure(size)
    lmcache = {} if arguments.no_lmcache else measure_lmcache(sizes[-1])
    table = Table(title="The core: one unit per chunk, 1,000 chunks a session")
    table.add_column("operation")
    for size in sizes:
        table.add_column(f"{size:,} units", justify="right")
    for title in ("growth", "bar", "LMCache LRU", "ours / LMCache"):
        table.add_column(title, justify="right")
    first, last = columns[sizes[0]], columns[sizes[-1]]
    for name in last:
        theirs = lmcache.get(name)
        table.add_row(
            name,
            *(shown(name, columns[size][name]) for size in sizes),
            f"{last[name] / first[name]:.2f}x",
            BARS.get(name, ""),
            "" if theirs is None else shown(name, theirs),
            "" if theirs is None else f"{last[name] / theirs:.1f}x",
        )
    console.print(table)


if __name__ == "__main__":
    main()
