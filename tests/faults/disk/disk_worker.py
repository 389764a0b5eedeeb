"""A process that uses a store hard until it is killed: disk_worker.py FOLDER SEED SHARED.

Objects' contents follow from their numbers, so that whoever opens the folder later can check them. Each line on standard
output is one object whose store was reported as done.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "disk"))

from disk_boxes import MIB, Box, aligned, oid

from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.store import DiskStore

CAPACITY = 40 * MIB
KEYS = 200


def size_of(number: int) -> int:
    """Bytes of an object: whole blocks and odd ends, small and large."""
    return (1000, 4096, 50_001, 300_000, 2 * MIB + 5)[number % 5]


def main(folder: str, seed: int, shared: bool) -> None:
    """Store, load and delete at random on four threads, for ever."""
    box = Box(DiskStore(StoreConfig(Path(folder), CAPACITY, 0, shared=shared)))
    print("ready", flush=True)

    def work(thread: int) -> None:
        rng = random.Random(seed * 10 + thread)
        while True:
            number = rng.randrange(KEYS)
            match rng.randrange(4):
                case 0 | 1:
                    if box.put(number, size_of(number)) is Put.STORED:
                        print(number, flush=True)
                case 2:
                    found = box.get(number, size_of(number))
                    if found is not None and found != bytes(aligned(size_of(number), number)):
                        print("WRONG", number, flush=True)
                case 3:
                    box.store.delete([oid(number)])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, n) for n in range(4)]:
            future.result()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shared")
