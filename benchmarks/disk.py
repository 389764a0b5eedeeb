"""The disk tier against the raw device and LMCache's own tiers, in one run, so that the ratios mean something.

    python benchmarks/disk.py FOLDER [--rounds 15] [--objects 100000] [--skip-recovery]

Every contender moves one object at a time through LMCache's adapter interface (submit, wait for the event fd,
collect), from and to page-aligned buffers of an LMCache allocator; `raw` is one O_DIRECT `pwrite` and `fdatasync` to
a new file, or one O_DIRECT `pread`. Contenders take turns within each round; the table shows medians. The page cache
is dropped for LMCache's `fs` before it reads, as a cache tier's reads are cold by nature. LMCache's tiers do not
synchronise anything: what they store may be lost with the power.
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
import statistics
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
from lmcache_histate.backends.disk.record import (  # noqa: E402
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
SIZES = (1.2, 16.0, 49.0)
LOAD_BAR, STORE_BAR, RECOVERY_BAR_SECONDS = 0.9, 0.8, 10.0


class Raw:
    """The device: what any tier could reach at best with one request at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def store(self, name: int, obj: Any) -> None:
        """Write a new file with one call, and synchronise its data."""
        fd = os.open(self._folder / str(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
        view = memoryview(obj.byte_array)
        assert os.pwritev(fd, [view], 0) == len(view)
        os.fdatasync(fd)
        os.close(fd)

    def load(self, name: int, obj: Any) -> None:
        """Read it back with one call."""
        fd = os.open(self._folder / str(name), os.O_RDONLY | os.O_DIRECT)
        view = memoryview(obj.byte_array)
        assert os.preadv(fd, [view], 0) == len(view)
        os.close(fd)

    def close(self) -> None:
        """Nothing is open."""


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

    def store(self, name: int, obj: Any) -> None:
        """One object, until LMCache would be told that it is stored."""
        adapter = self._adapter
        task = adapter.submit_store_task([self._key(name)], [obj])
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

    def load(self, name: int, obj: Any) -> None:
        """One object: look up and lock, load, unlock."""
        adapter, key = self._adapter, self._key(name)
        layout = {0: MemoryLayoutDesc(obj.get_shapes(), obj.get_dtypes())}
        task = adapter.submit_lookup_and_lock_task([key], layout)
        found = self._wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
        assert found.popcount() == 1
        task = adapter.submit_load_task([key], [obj])
        loaded = self._wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        assert loaded.popcount() == 1
        adapter.submit_unlock([key])

    def close(self) -> None:
        """Close the adapter."""
        self._adapter.close()


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
        "histate": Tier(plugin, root / "histate", False),
        "fs": Tier(fs, root / "fs", True),
        "fs_native": Tier(native, root / "fs_native", False),
    }


def throughput(root: Path, size: float, rounds: int, numbers: itertools.count[int]) -> dict[str, tuple[float, float]]:
    """Median MiB/s of storing and loading, by contender."""
    length = int(size * MIB) // 4096 * 4096
    memory = torch.frombuffer(mmap.mmap(-1, 4 * length + (1 << 20)), dtype=torch.uint8)
    allocator = TensorMemoryAllocator(memory)
    source, target = (allocator.allocate(torch.Size([length // 2]), torch.bfloat16) for _ in range(2))
    assert source is not None
    assert target is not None
    source.raw_data.random_(0, 256)
    target.raw_data.fill_(1)
    tiers = contenders(root)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in tiers}
    stored: dict[str, list[int]] = {name: [] for name in tiers}
    for _ in range(rounds):
        for name in random.sample(list(tiers), len(tiers)):
            number = next(numbers)
            began = time.perf_counter()
            tiers[name].store(number, source)
            times[name][0].append(time.perf_counter() - began)
            stored[name].append(number)
    for tier in tiers.values():
        if isinstance(tier, Tier):
            tier.before_load()
    for turn in range(rounds):
        for name in random.sample(list(tiers), len(tiers)):
            began = time.perf_counter()
            tiers[name].load(stored[name][turn], target)
            times[name][1].append(time.perf_counter() - began)
            assert torch.equal(source.raw_data, target.raw_data), f"{name} returned other bytes"
            target.raw_data.zero_()
    for tier in tiers.values():
        tier.close()
    return {n: (size / statistics.median(s), size / statistics.median(r)) for n, (s, r) in times.items()}


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
        path = namespace.path(file_name(oid))
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
    parser.add_argument("folder", type=Path, help="a folder on the disk to measure; emptied of what the run leaves")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--skip-recovery", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    console, failed, numbers = Console(), [], itertools.count(1)
    table = Table(
        "object", "", "raw", "histate", "fs", "fs_native", "of raw", "of fs", title="Disk tier, MiB/s (median)"
    )
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=args.folder) as root:
            speed = throughput(Path(root), size, max(5, int(args.rounds * min(1.0, 16 / size))), numbers)
        for at, what, bar in ((0, "store", STORE_BAR), (1, "load", LOAD_BAR)):
            of_raw, of_fs = speed["histate"][at] / speed["raw"][at], speed["histate"][at] / speed["fs"][at]
            if of_raw < bar or of_fs < 1:
                failed.append(f"{what} at {size} MiB")
            marks = [
                f"[{'green' if ok else 'red'}]{ratio:.2f}"
                for ratio, ok in ((of_raw, of_raw >= bar), (of_fs, of_fs >= 1))
            ]
            table.add_row(
                f"{size} MiB", what, *(f"{speed[n][at]:,.0f}" for n in ("raw", "histate", "fs", "fs_native")), *marks
            )
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
    bars = (
        f"load {LOAD_BAR} of raw, store {STORE_BAR} of raw with sync, fs in both, recovery {RECOVERY_BAR_SECONDS:.0f} s"
    )
    console.print(f"[red]missed: {', '.join(failed)}" if failed else f"[green]all bars met: {bars}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
