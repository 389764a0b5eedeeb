"""The disk tier against the raw device and LMCache's own tiers, in one run, so that the ratios mean something.

    python benchmarks/disk.py FOLDER [--rounds 21] [--objects 100000] [--skip-recovery]

`raw` is one O_DIRECT `pwrite` and `fdatasync` to a new file for each object, or one O_DIRECT `pread`; `store` is the
disk tier's store on the same thread. The others are LMCache adapters and move a task at a time the way LMCache's
controllers do (submit, wait for the event fd, collect): `histate` the disk tier, `fs` and `fs_native` LMCache's own,
which synchronise nothing and may lose what they report as stored; `fs synced` is `fs` plus the fsyncs it leaves out.
All use page-aligned buffers of an LMCache allocator. Contenders take turns within each round; the table shows the
lower quartile of the times, which a busy machine disturbs least. The page cache is dropped for `fs` before it reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import random
import select
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import (  # noqa: E402
    add_l2_adapters_args,
    parse_args_to_l2_adapters_config,
)
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry  # noqa: E402
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lmcache_histate.backends.disk.catalogue import remove_catalogue  # noqa: E402
from lmcache_histate.backends.disk.core import Put  # noqa: E402
from lmcache_histate.backends.disk.namespace import layout_of  # noqa: E402
from lmcache_histate.backends.disk.record import (  # noqa: E402
    NOWHERE,
    Header,
    Kind,
    ObjectId,
    Place,
    encode_header,
    file_name,
    payload_checksum,
)
from lmcache_histate.backends.disk.settings import StoreConfig  # noqa: E402
from lmcache_histate.backends.disk.store import DiskStore  # noqa: E402

MIB = 1 << 20
SHAPES = ((1, 1.2), (8, 1.2), (1, 16.0), (1, 49.0))
"""Objects a task, and MiB an object: a chunk of KV alone and as LMCache stores a prompt's, and two sizes of
snapshots.
"""

LOAD_BAR, STORE_BAR, RECOVERY_BAR_SECONDS = 0.9, 0.8, 10.0


class Raw:
    """The device: what any tier could reach at best with one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def store(self, names: list[int], obj: Any) -> None:
        """Write new files with one call each, and synchronise their data."""
        for name in names:
            self._store(name, obj)

    def _store(self, name: int, obj: Any) -> None:
        fd = os.open(self._folder / str(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
        view = memoryview(obj.byte_array)
        assert os.pwritev(fd, [view], 0) == len(view)
        os.fdatasync(fd)
        os.close(fd)

    def load(self, names: list[int], objects: list[Any]) -> None:
        """Read them back with one call each."""
        for name, obj in zip(names, objects, strict=True):
            self._load(name, obj)

    def _load(self, name: int, obj: Any) -> None:
        fd = os.open(self._folder / str(name), os.O_RDONLY | os.O_DIRECT)
        view = memoryview(obj.byte_array)
        assert os.preadv(fd, [view], 0) == len(view)
        os.close(fd)

    def close(self) -> None:
        """Nothing is open."""


class Alone:
    """The store under the adapter, on the calling thread like `raw`: the disk's work without LMCache's hand-overs."""

    def __init__(self, folder: Path) -> None:
        self._store = DiskStore(StoreConfig(folder, 64 << 30))

    @staticmethod
    def _id(name: int) -> ObjectId:
        return ObjectId("bench/model", name.to_bytes(32, "little"), 0x01000100, 0, "")

    def store(self, names: list[int], obj: Any) -> None:
        """Durable stores, with one synchronisation of the folders at the end."""
        namespace = self._store.namespace("bench/model", layout_of(obj.get_shapes(), obj.get_dtypes()))
        dirty: set[str] = set()
        view = np.frombuffer(obj.byte_array, np.uint8).data
        for name in names:
            assert self._store.put(namespace, self._id(name), view, NOWHERE, obj.is_valid, dirty) is Put.STORED
        assert self._store.sync(dirty)

    def load(self, names: list[int], objects: list[Any]) -> None:
        """Verified loads."""
        for name, obj in zip(names, objects, strict=True):
            candidates = self._store.candidates("bench/model", layout_of(obj.get_shapes(), obj.get_dtypes()))
            load = self._store.begin_load(candidates, self._id(name))
            assert load is not None
            assert self._store.load(load, np.frombuffer(obj.byte_array, np.uint8).data, obj.is_valid)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class Tier:
    """An LMCache L2 adapter, driven the way LMCache's controllers drive it."""

    def __init__(self, spec: dict[str, Any], folder: Path, cold: bool) -> None:
        parser = argparse.ArgumentParser()
        add_l2_adapters_args(parser)
        config = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(spec)]))
        self._adapter = create_l2_adapter_from_registry(config.adapters[0], None)
        self._folder = folder
        self._cold = cold

    @staticmethod
    def _key(name: int) -> ObjectKey:
        return ObjectKey(chunk_hash=name.to_bytes(32, "little"), model_name="bench/model", kv_rank=0x01000100)

    @staticmethod
    def _wait(fd: int, ask: Callable[[], Any]) -> Any:
        while True:
            select.select([fd], [], [], 30)
            os.eventfd_read(fd)
            if (answer := ask()) is not None:
                return answer

    def store(self, names: list[int], obj: Any) -> None:
        """One task, until LMCache would be told that it is stored."""
        adapter = self._adapter
        task = adapter.submit_store_task([self._key(name) for name in names], [obj] * len(names))
        done = self._wait(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None)
        assert done[task].is_successful()

    def before_load(self) -> None:
        """Make the coming reads cold where the tier reads through the page cache."""
        if self._cold:
            for path in self._folder.rglob("*"):
                if path.is_file():
                    fd = os.open(path, os.O_RDONLY)
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)

    def load(self, names: list[int], objects: list[Any]) -> None:
        """One task: look up and lock, load, unlock."""
        adapter, keys = self._adapter, [self._key(name) for name in names]
        layout = {0: MemoryLayoutDesc(objects[0].get_shapes(), objects[0].get_dtypes())}
        task = adapter.submit_lookup_and_lock_task(keys, layout)
        found = self._wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
        assert found.popcount() == len(keys)
        task = adapter.submit_load_task(keys, objects)
        loaded = self._wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        assert loaded.popcount() == len(keys)
        adapter.submit_unlock(keys)

    def close(self) -> None:
        """Close the adapter."""
        self._adapter.close()


class SyncedTier(Tier):
    """LMCache's `fs`, made to keep what it reports as stored: each file and the folder synchronised."""

    def store(self, names: list[int], obj: Any) -> None:
        """One task, and the missing synchronisation."""
        super().store(names, obj)
        for name in names:
            key = self._key(name)
            fsync(next(self._folder.glob(f"*{key.chunk_hash.hex()}*")), os.O_RDONLY)
        fsync(self._folder, os.O_DIRECTORY)


def fsync(path: Path, flags: int) -> None:
    """Synchronise a file or folder."""
    fd = os.open(path, flags)
    os.fsync(fd)
    os.close(fd)


def contenders(root: Path) -> dict[str, Any]:
    plugin = {
        "type": "plugin",
        "module_path": "lmcache_histate.backends.disk.adapter",
        "class_name": "HiStateDiskAdapter",
        "config_class_name": "HiStateDiskConfig",
        "adapter_params": {"base_path": str(root / "histate"), "max_capacity_gb": 64},
    }
    fs = {"type": "fs", "base_path": str(root / "fs")}
    native = {"type": "fs_native", "base_path": str(root / "fs_native"), "use_odirect": True}
    return {
        "raw": Raw(root / "raw"),
        "store": Alone(root / "store"),
        "histate": Tier(plugin, root / "histate", False),
        "fs": Tier(fs, root / "fs", True),
        "fs synced": SyncedTier(fs | {"base_path": str(root / "synced")}, root / "synced", True),
        "fs_native": Tier(native, root / "fs_native", False),
    }


def throughput(
    root: Path, count: int, size: float, rounds: int, numbers: itertools.count[int]
) -> dict[str, tuple[float, float]]:
    """MiB/s of storing and loading tasks of so many objects, by contender, from the lower quartile of the times."""
    length = int(size * MIB) // 4096 * 4096
    memory = torch.frombuffer(mmap.mmap(-1, (count + 1) * length + MIB), dtype=torch.uint8)
    allocator = TensorMemoryAllocator(memory)
    source, *targets = (allocator.allocate(torch.Size([length // 2]), torch.bfloat16) for _ in range(count + 1))
    source.raw_data.random_(0, 256)
    for target in targets:
        target.raw_data.fill_(1)
    tiers = contenders(root)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in tiers}
    stored: dict[str, list[list[int]]] = {name: [] for name in tiers}
    for _ in range(rounds):
        for name in random.sample(list(tiers), len(tiers)):
            names = list(itertools.islice(numbers, count))
            began = time.perf_counter()
            tiers[name].store(names, source)
            times[name][0].append(time.perf_counter() - began)
            stored[name].append(names)
            os.sync()  # what a contender left unwritten would be paid for by the next one that synchronises
    for tier in tiers.values():
        if isinstance(tier, Tier):
            tier.before_load()
    for turn in range(rounds):
        for name in random.sample(list(tiers), len(tiers)):
            began = time.perf_counter()
            tiers[name].load(stored[name][turn], targets)
            times[name][1].append(time.perf_counter() - began)
            for target in targets:
                assert torch.equal(source.raw_data, target.raw_data), f"{name} returned other bytes"
                target.raw_data.zero_()
    for tier in tiers.values():
        tier.close()
    mib = count * length / MIB

    def speed(seconds: list[float]) -> float:
        return mib / sorted(seconds)[len(seconds) // 4]

    return {name: (speed(stores), speed(loads)) for name, (stores, loads) in times.items()}


def recovery(root: Path, objects: int) -> dict[str, float]:
    """Seconds to open a store of so many objects: with its catalogue, and without, from the headers."""
    config = StoreConfig(root, 64 << 30, direct_io="off", sync=False)
    store = DiskStore(config)
    namespace = store.namespace("bench/model", (((2048,), "torch.uint8"),))
    store.close()
    payload = memoryview(bytes(2048))
    checksum, padding = payload_checksum(payload), bytes(2048)
    for number in range(objects):
        oid = ObjectId("bench/model", number.to_bytes(32, "big"), 0x01000100, 0, "")
        place = Place((number - 1).to_bytes(32, "big") if number else b"", 64 * (number + 1), Kind.KV)
        path = Path(namespace.path(file_name(oid)))
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as f:
            f.write(encode_header(Header(namespace.name, oid, 2048, checksum, time.time(), place)) + payload + padding)
    os.sync()

    def opening() -> float:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        except OSError:
            print("the page cache cannot be dropped (not root): recovery is measured warm", file=sys.stderr)
        began = time.perf_counter()
        store = DiskStore(config)
        took = time.perf_counter() - began
        assert store.usage().objects == objects
        store.close()
        return took

    from_headers = opening()
    with_catalogue = opening()
    remove_catalogue(root)
    again = opening()
    return {"from record headers": min(from_headers, again), "with the catalogue": with_catalogue}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(".bench"),
        help="a folder on the disk to measure; emptied of what the run leaves (default .bench)",
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--skip-recovery", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    console, failed, numbers = Console(width=128), [], itertools.count(1)
    names = ("raw", "store", "histate", "fs synced", "fs", "fs_native")
    table = Table("objects a task", "", *names, "store / raw", "histate / fs", title="Disk tier, MiB/s")
    for count, size in SHAPES:
        with tempfile.TemporaryDirectory(dir=args.folder) as root:
            rounds = max(5, int(args.rounds * min(1, 10 / count / size)))
            speed = throughput(Path(root), count, size, rounds, numbers)
        for at, what, bar, rival in ((0, "store", STORE_BAR, "fs synced"), (1, "load", LOAD_BAR, "fs")):
            of_raw, of_fs = speed["store"][at] / speed["raw"][at], speed["histate"][at] / speed[rival][at]
            if of_raw < bar or of_fs < 1:
                failed.append(f"{what} of {count} x {size} MiB")
            good = (of_raw >= bar, of_fs >= 1)
            marks = [f"[{'green' if ok else 'red'}]{r:.2f}" for r, ok in zip((of_raw, of_fs), good, strict=True)]
            table.add_row(f"{count} x {size} MiB", what, *(f"{speed[n][at]:,.0f}" for n in names), *marks)
    console.print(table)
    if not args.skip_recovery:
        root = Path(tempfile.mkdtemp(dir=args.folder))
        times = recovery(root, args.objects)
        shutil.rmtree(root)
        table = Table("recovery", "seconds", title=f"Opening a store of {args.objects:,} objects")
        for how, seconds in times.items():
            table.add_row(how, f"{seconds:.2f}")
            if seconds >= RECOVERY_BAR_SECONDS:
                failed.append(f"recovery {how}")
        console.print(table)
    bars = f"load {LOAD_BAR} and store {STORE_BAR} of raw, not slower than fs, recovery {RECOVERY_BAR_SECONDS:.0f} s"
    console.print(f"[red]missed: {', '.join(failed)}" if failed else f"[green]all bars met: {bars}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
