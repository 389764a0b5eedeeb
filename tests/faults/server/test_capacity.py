"""Hours of work against small tiers: neither ever takes more bytes than it was given.

An agent thinks for half a minute between its turns. Nothing here waits for that: what is measured is turns, and an hour of
eight busy agents is about a thousand of them. For a long run::

    HISTATE_CAPACITY_SECONDS=600 nice python -m pytest tests/faults/server/test_capacity.py -s
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from storage import Storage, hybrid_config
from workload import Workload

from lmcache_histate.backends.disk.fsck import fsck
from lmcache_histate.geometry import GIB

SECONDS = float(os.environ.get("HISTATE_CAPACITY_SECONDS", "45"))
SAMPLE_SECONDS = 0.1
MIB = 1 << 20
CPU_BYTES, DISK_BYTES = 12 * MIB, 32 * MIB
WORKERS = 3


def sizes_on_disk(folder: str) -> tuple[int, int]:
    """What a folder takes, temporary files included: blocks as `du` counts them, and the lengths of its files; bytes."""
    blocks = lengths = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        inner = sizes_on_disk(entry.path)
                        blocks, lengths = blocks + inner[0], lengths + inner[1]
                    else:
                        lengths += entry.stat(follow_symlinks=False).st_size
                    blocks += entry.stat(follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        pass
    return blocks, lengths


@dataclass
class Samples:
    """The largest sizes seen, every ``SAMPLE_SECONDS``."""

    storage: Storage
    folder: Path
    count: int = 0
    cpu: int = 0
    blocks: int = 0
    lengths: int = 0
    accounted: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Samples:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        (_, adapter), *_ = self.storage.manager.l2_adapters()
        while not self._stop.wait(SAMPLE_SECONDS):
            self.cpu = max(self.cpu, self.storage.manager.get_l1_usage()[0])
            blocks, lengths = sizes_on_disk(str(self.folder))
            self.blocks, self.lengths = max(self.blocks, blocks), max(self.lengths, lengths)
            self.accounted = max(self.accounted, adapter.get_usage().total_bytes_used)
            self.count += 1


@pytest.fixture
def storage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Storage]:
    config = hybrid_config(tmp_path / "disk", CPU_BYTES / GIB, DISK_BYTES / GIB, write_through=request.param)
    running = Storage(config)
    yield running
    running.close()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("storage", [False, True], indirect=True, ids=["demoted", "write-through"])
def test_an_hour_of_random_work_never_exceeds_its_bytes(storage: Storage, tmp_path: Path) -> None:
    folder, until = tmp_path / "disk", time.monotonic() + SECONDS / 2

    def work(seed: int) -> Workload:
        workload = Workload(storage, seed)
        while time.monotonic() < until:
            workload.turn()
        return workload

    with Samples(storage, folder) as seen, ThreadPoolExecutor(WORKERS) as pool:
        done = list(pool.map(work, range(WORKERS)))
    turns, hits = sum(each.turns for each in done), sum(each.hits for each in done)
    status = storage.module.report_status()["histate"]
    print(
        f"\n{turns} turns, {hits} hits, {seen.count} samples; most bytes: CPU {seen.cpu} of {CPU_BYTES}, disk "
        f"{seen.blocks} in blocks, {seen.lengths} in lengths, {seen.accounted} accounted, of {DISK_BYTES}; {status}"
    )
    assert 0 < seen.cpu <= CPU_BYTES
    assert 0 < seen.blocks <= DISK_BYTES
    assert 0 < seen.lengths <= DISK_BYTES
    assert 0 < seen.accounted <= DISK_BYTES
    assert hits > 0
    assert status["errors"] == 0
    assert status["evicted_from_cpu"] > 0
    assert status["evicted_from_disk"] > 0, "the disk was never full: nothing was shown"
    storage.close()
    report = fsck(folder)
    assert report.clean
    assert sum(namespace.records for namespace in report.namespaces) > 0
