"""A disk that fails under LMCache's tiers: misses, one clear line, and nothing wrong served.

`Storage.lookup` compares every byte that comes back with what its key says it must be.
"""

from __future__ import annotations

import logging
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_boxes import SlowIO, bytes_on_disk
from storage import KV_GROUP, STATE_GROUP, Storage, chunk_hashes, eventually, hybrid_config
from workload import Workload

from lmcache_histate.backends import arguments
from lmcache_histate.state_store.objects import Tier

pytestmark = pytest.mark.slow

MIB = 1 / 1024
CHUNKS = 16


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """Start storages; all are closed afterwards."""
    running: list[Storage] = []

    def begin(
        disk: Path | None = None, cpu_gib: float = 32 * MIB, disk_gib: float = 64 * MIB, **settings: Any
    ) -> Storage:
        running.append(Storage(hybrid_config(disk or tmp_path / "disk", cpu_gib, disk_gib, **settings)))
        return running[-1]

    yield begin
    for storage in running:
        storage.close()


def keys_of(storage: Storage, path: list[bytes]) -> list[Any]:
    return storage.keys(path, KV_GROUP) + storage.keys(path, STATE_GROUP)


def stored_on_disk(storage: Storage, sessions: int) -> list[list[bytes]]:
    """Paths with a snapshot at every chunk, on disk and no longer in CPU memory; needs `write_through`."""
    paths = [chunk_hashes(f"s{number}", CHUNKS) for number in range(sessions)]
    for path in paths:
        storage.store(path, 0, CHUNKS, snapshots=range(CHUNKS))
        assert eventually(lambda path=path: len(storage.on_disk(keys_of(storage, path))) == 2 * CHUNKS)
    empty_cpu_memory(storage)
    return paths


def empty_cpu_memory(storage: Storage) -> None:
    assert eventually(lambda: storage.manager.clear() or storage.manager.get_l1_usage()[0] == 0)


def store_of(storage: Storage) -> Any:
    return storage.manager.l2_adapters()[0][1].store


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and words in r.getMessage()]


def test_flipped_bits_and_cut_files_are_misses(
    start: Callable[..., Storage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, rng = start(write_through=True), random.Random(2)
    paths = stored_on_disk(storage, 6)
    store, damaged = store_of(storage), 0
    for entry in store.entries():
        path = Path(entry.namespace.path(entry.file))
        match rng.randrange(8):
            case 0:
                with path.open("r+b") as file:
                    at = rng.randrange(path.stat().st_size)
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            case 1:
                with path.open("r+b") as file:
                    file.truncate(rng.randrange(path.stat().st_size))
            case _:
                continue
        damaged += 1
    assert damaged > 30
    assert any(storage.lookup(path) < CHUNKS for path in paths)
    for path in paths:  # a prompt stored anew is served whole, from what was good and what was written again
        hit = storage.lookup(path)
        storage.store(path, 0, CHUNKS, snapshots=range(CHUNKS))
        assert storage.lookup(path) == CHUNKS >= hit
    counters = store.health.report()[0]
    assert 0 < counters["damaged_removed"] <= damaged
    assert len(lines(caplog, "is not served")) == 1
    assert storage.module.report_status()["histate"]["errors"] == 0


def test_a_folder_deleted_underneath_is_made_anew(
    start: Callable[..., Storage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = start(write_through=True)
    paths = stored_on_disk(storage, 2)
    shutil.rmtree(tmp_path / "disk")
    assert [storage.lookup(path) for path in paths] == [0, 0]
    assert eventually(lambda: storage.keeper.policy.tree.tier_bytes[Tier.DISK] == 0)
    again = stored_on_disk(storage, 1)
    assert storage.lookup(again[0]) == CHUNKS
    assert len(lines(caplog, "was deleted in use")) == 1
    assert storage.module.report_status()["histate"]["errors"] == 0
    storage.close()
    assert start(write_through=True).lookup(again[0]) == CHUNKS


def test_a_disk_that_turns_read_only_costs_hits_only(
    start: Callable[..., Storage],
    failing_disk: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_floor(monkeypatch)
    storage = start(failing_disk / "s", write_through=True)
    (path,) = stored_on_disk(storage, 1)
    # What ext4 does on a write error: the file system turns read-only under open files.
    subprocess.run(["mount", "-o", "remount,abort", str(failing_disk)], check=True)
    for number in range(40):  # more than CPU memory holds: the oldest goes, though nothing can be written down
        new = chunk_hashes(f"new{number}", CHUNKS)
        assert eventually(storage.has_room)
        storage.store(new, 0, CHUNKS, snapshots=[CHUNKS - 1])
    assert storage.lookup(new) == CHUNKS
    assert storage.lookup(path) == CHUNKS
    assert len([line for line in lines(caplog, "cannot be written") if "catalogue" not in line]) == 1
    assert storage.module.report_status()["histate"]["errors"] == 0


def without_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tier fill its file system to the last byte: the file systems here are smaller than the usual floor."""
    spec_of = arguments.disk_adapter_spec

    def spec(config: Any) -> dict[str, Any]:
        spec = spec_of(config)
        spec["adapter_params"]["min_free_gb"] = 0
        return spec

    monkeypatch.setattr(arguments, "disk_adapter_spec", spec)


@pytest.mark.parametrize("floor", [True, False])
def test_a_file_system_of_64_mib_that_fills(
    start: Callable[..., Storage],
    small_disk: Path,
    floor: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not floor:
        without_floor(monkeypatch)
    storage = start(small_disk / "s", cpu_gib=16 * MIB, disk_gib=1.0)  # far more than the file system has
    workload = Workload(storage, 4)
    for _ in range(400):
        workload.turn()
        # On a busy machine the disk would fall behind, and what it holds in the end would be a matter of speed.
        assert eventually(lambda: storage.has_room() and storage.keeper.status()["moves_in_flight"] == 0, 60.0)
    assert workload.hits > 50
    counters, troubles = store_of(storage).health.report()
    status = storage.module.report_status()["histate"]
    storage.close()
    objects = len(store_of(storage).entries())
    assert (objects == 0) if floor else (objects > 300)
    assert len(lines(caplog, str(small_disk / "s"))) <= 2, "one line for each cause"
    assert counters.get("damaged_removed", 0) == 0
    assert not floor or "floor" in troubles
    if not floor:  # the least valuable made room for others, as at the tier's own limit
        assert status["evicted_from_disk"] > 0
    assert status["errors"] == 0
    again = start(small_disk / "s", cpu_gib=16 * MIB, disk_gib=1.0)
    assert store_of(again).health.report()[0]["recovered"] == objects
    workload = Workload(again, 4)
    for _ in range(50):
        workload.turn()


def test_a_load_that_outlives_its_request_writes_into_nobody_elses_memory(start: Callable[..., Storage]) -> None:
    storage = start(cpu_gib=8 * MIB, write_through=True)
    (path,) = stored_on_disk(storage, 1)
    core = store_of(storage)._core
    slow = SlowIO(core.io)
    core.io = slow
    found: list[int] = []
    request = threading.Thread(target=lambda: found.append(storage.lookup(path, read=False)))
    request.start()
    assert slow.reading.wait(30)
    storage.manager.clear(force=True)  # the request is over: its memory goes to others while the disk still reads
    others = [chunk_hashes(f"other{number}", CHUNKS) for number in range(3)]
    for other in others:
        storage.store(other, 0, CHUNKS, snapshots=[CHUNKS - 1])
    slow.go_on.set()
    request.join(60)
    assert not request.is_alive()
    core.io = slow._real
    for other in others:
        assert storage.lookup(other) in (0, CHUNKS)  # compares bytes
    assert sum(storage.lookup(other) == CHUNKS for other in others) > 0
    empty_cpu_memory(storage)
    assert storage.lookup(path) == CHUNKS
    assert store_of(storage).health.report()[0]["load_abandoned"] > 0


def test_a_server_that_stops_waits_for_the_load_in_hand(start: Callable[..., Storage]) -> None:
    storage = start(write_through=True)
    (path,) = stored_on_disk(storage, 1)
    core = store_of(storage)._core
    core.io = slow = SlowIO(core.io)
    request = threading.Thread(target=lambda: storage.lookup(path, read=False), daemon=True)
    request.start()
    assert slow.reading.wait(30)
    stop = threading.Thread(target=storage.close)
    stop.start()
    stop.join(0.5)
    slow.go_on.set()
    stop.join(60)
    assert not stop.is_alive()
    again = start(write_through=True)
    assert again.lookup(path) == CHUNKS


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0])
def test_a_clock_that_steps_evicts_nothing_and_breaks_no_restart(
    start: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    real = time.time
    storage = start(write_through=True)
    paths = stored_on_disk(storage, 4)
    assert storage.lookup(paths[0]) == CHUNKS
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert [storage.lookup(path) for path in paths] == [CHUNKS] * 4
    new = chunk_hashes("new", CHUNKS)
    storage.store(new, 0, CHUNKS, snapshots=[CHUNKS - 1])
    assert eventually(lambda: len(storage.on_disk(storage.keys(new, KV_GROUP))) == CHUNKS)
    status = storage.module.report_status()["histate"]
    assert status["evicted_from_disk"] == status["evicted_from_cpu"] == 0
    assert store_of(storage).flush_catalogue()
    storage.close()
    again = start(write_through=True)  # the clock is still wrong
    assert [again.lookup(path) for path in [*paths, new]] == [CHUNKS] * 5
    again.close()
    monkeypatch.setattr(time, "time", real)  # and now it is right again
    last = start(write_through=True)
    assert [last.lookup(path) for path in [*paths, new]] == [CHUNKS] * 5
    assert all(entry.last_access <= real() for entry in store_of(last).entries())
    assert last.module.report_status()["histate"]["evicted_from_disk"] == 0
    assert bytes_on_disk(store_of(last).config.root) <= store_of(last).config.capacity_bytes
