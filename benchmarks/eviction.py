"""What eviction costs the stores that go on meanwhile, with and without it in one run.

    python -m benchmarks.eviction                  # CPU memory alone, then with a disk below (.bench)
    python -m benchmarks.eviction --pairs 100 --folder /mnt/nvme/bench

A real LMCache storage manager with HiState's server module. Stores of 16 chunks come one after another, each as the server
does it for a worker: reserve, copy, finish. Every block of them begins with memory filled just below the high watermark, so
that the controller evicts as much as comes in while it comes in; or with as much of it deleted beforehand, so that nothing
has to go. The two take turns, in short blocks that share the machine's weather; the ratio is the median over the pairs.
In every row 1,000 objects and more are evicted, by deletion or by writing them to disk.

Stores come 50 ms apart, 390 MiB a second: what prefill of 12,000 tokens a second makes of a model with 32 KiB of KV a token.
Evicting adds at most 5% to their latency. The last rows leave the pauses out, so that stores compete with the controller for
Python's one interpreter all the time: no bar, but the worst case.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

warnings.filterwarnings("ignore")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "backends"))
import storage as tiers  # noqa: E402  # one storage manager to test and to measure with

from lmcache_histate.geometry import GIB  # noqa: E402

BAR = 1.05
STORE_CHUNKS = 16
BLOCK_STORES = 4
BLOCK_OBJECTS = STORE_CHUNKS * BLOCK_STORES
ARENA_OBJECTS = 480
OBJECT_BYTES = 1_228_800
"""1.2 MiB: the smallest objects, where what eviction does for each weighs most."""
HIGH, LOW = 0.8, 0.75
GAP_SECONDS = 0.05


class Block(NamedTuple):
    """One block of stores."""

    mean_ms: float
    worst_ms: float
    dropped: int
    """Objects that found no room."""
    evicted: int


class Load:
    """Stores of ever new sessions.

    Args:
        storage: The tiers.
    """

    def __init__(self, storage: tiers.Storage) -> None:
        self._storage = storage
        self._numbers = itertools.count()
        self._source = torch.randint(0, 256, (tiers.kv_bytes(),), dtype=torch.uint8)
        self._stored: deque[Any] = deque()

    def store(self) -> tuple[float, int]:
        """One store; its seconds, and how many of its objects found no room."""
        storage = self._storage
        path = tiers.chunk_hashes(f"s{next(self._numbers)}", STORE_CHUNKS)
        keys = storage.keys(path, tiers.KV_GROUP)
        began = time.perf_counter()
        reserved = storage.manager.reserve_write(keys, storage.layouts[tiers.KV_GROUP])
        for obj in reserved.values():
            obj.tensor.view(torch.uint8).flatten().copy_(self._source)
        storage.manager.finish_write(list(reserved))
        took = time.perf_counter() - began
        self._stored += reserved
        return took, len(keys) - len(reserved)

    def block(self, evicting: bool, gap: float) -> Block:
        """A block of stores, ``gap`` seconds apart, from a well-defined fill and a controller at rest."""
        target = int(HIGH * ARENA_OBJECTS) - (STORE_CHUNKS if evicting else BLOCK_OBJECTS + STORE_CHUNKS)
        while self._objects() + STORE_CHUNKS <= target:
            self.store()
        settle(self._storage)
        while self._objects() > target:
            self._storage.manager.delete_l1_keys([self._stored.popleft() for _ in range(min(8, len(self._stored)))])
        settle(self._storage)
        before = evicted(self._storage)
        stores = []
        for _ in range(BLOCK_STORES):
            stores.append(self.store())
            time.sleep(gap)
        times = [1e3 * seconds for seconds, _ in stores]
        settle(self._storage)
        gone = evicted(self._storage) - before
        return Block(statistics.fmean(times), max(times), sum(dropped for _, dropped in stores), gone)

    def _objects(self) -> int:
        return int(self._storage.manager.get_l1_usage()[0] // OBJECT_BYTES)


def evicted(storage: tiers.Storage) -> int:
    """Objects that have left CPU memory for others so far."""
    status = storage.module.report_status()["histate"]
    return int(status["evicted_from_cpu"] + status.get("moved_to_disk", 0))


def settle(storage: tiers.Storage) -> None:
    """Wait until the controller has nothing left to do."""
    calm = 0
    while calm < 5:
        time.sleep(0.05)
        status = storage.module.report_status()["histate"]
        calm = 0 if status["queued_events"] or status["moves_in_flight"] else calm + 1


def measure(folder: Path | None, pairs: int, gap: float) -> tuple[list[Block], list[Block]]:
    """Blocks without and with eviction.

    Args:
        folder: Of the disk tier; None for CPU memory alone, from which everything is deleted.
        pairs: Blocks of each.
        gap: Seconds between stores.
    """
    tiers.KV_SHAPE = torch.Size([2, 2, tiers.CHUNK, OBJECT_BYTES // (2 * 2 * 2 * tiers.CHUNK)])
    config = tiers.hybrid_config(
        folder,
        cpu_gib=ARENA_OBJECTS * OBJECT_BYTES / GIB,
        disk_gib=1 + 2 * pairs * BLOCK_OBJECTS * OBJECT_BYTES / GIB,
        cpu_high_watermark=HIGH,
        cpu_low_watermark=LOW,
    )
    running = tiers.Storage(config, hybrid=False)
    blocks: dict[bool, list[Block]] = {False: [], True: []}
    try:
        load = Load(running)
        for _ in range(ARENA_OBJECTS // STORE_CHUNKS):
            load.store()  # the arena's pages are touched for the first time
        for _ in track(range(pairs), description="with a disk" if folder else "CPU memory alone"):
            for evicting in random.sample([False, True], 2):
                blocks[evicting].append(load.block(evicting, gap))
    finally:
        running.close()
    return blocks[False], blocks[True]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--skip-disk", action="store_true", help="only CPU memory alone")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="on the disk to use (default .bench)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # copies on several threads wait for each other's turns on a busy machine
    table = Table(
        "victims go", "store, ms", "while evicting, ms", "worst, ms", "evicted", "dropped", "ratio",
        title=f"Stores of {STORE_CHUNKS} objects of 1.2 MiB, without / with eviction",
    )  # fmt: skip
    missed = []
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        for name, folder, gap in (
            ("away", None, GAP_SECONDS),
            ("to disk", Path(root) / "paced", GAP_SECONDS),
            ("away, no pause", None, 0.0),
            ("to disk, no pause", Path(root) / "unpaced", 0.0),
        ):
            if folder is not None and args.skip_disk:
                continue
            without, with_eviction = measure(folder, args.pairs, gap)
            calm, busy = (statistics.median(block.mean_ms for block in blocks) for blocks in (without, with_eviction))
            ratio = statistics.median(b.mean_ms / a.mean_ms for a, b in zip(without, with_eviction, strict=True))
            if gap and ratio > BAR:
                missed.append(name)
            table.add_row(
                name,
                f"{calm:.2f}",
                f"{busy:.2f}",
                f"{max(b.worst_ms for b in without):.0f} / {max(b.worst_ms for b in with_eviction):.0f}",
                f"{sum(b.evicted for b in without)} / {sum(b.evicted for b in with_eviction)}",
                f"{sum(b.dropped for b in without)} / {sum(b.dropped for b in with_eviction)}",
                f"[{'red' if ratio > BAR else 'green'}]{ratio:.2f}",
            )
    console = Console(width=128)
    console.print(table)
    console.print(f"[red]missed: {', '.join(missed)}" if missed else f"[green]evicting adds at most {BAR - 1:.0%}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
