"""Damage, full and read-only disks, deleted folders, two servers: misses, one clear line, nothing wrong served."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_boxes import MIB, Box, bytes_on_disk, oid

from lmcache_histate.backends.disk.catalogue import FILE
from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.store import DiskStore


@pytest.fixture
def open_at() -> Iterator[Callable[..., Box]]:
    opened: list[DiskStore] = []

    def open_one(root: Path, capacity: int = 256 * MIB, **settings: object) -> Box:
        removed: list[object] = []
        settings.setdefault("sync", False)  # nothing here cuts the power
        opened.append(DiskStore(StoreConfig(root, capacity, 0, **settings), removed.extend))  # type: ignore[arg-type]
        box = Box(opened[-1])
        box.removed = removed  # type: ignore[attr-defined]
        return box

    yield open_one
    for store in opened:
        store.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_flipped_bits_and_cut_files_are_misses_and_are_removed(open_at: Callable[..., Box], tmp_path: Path) -> None:
    box, rng = open_at(tmp_path / "s"), random.Random(3)
    sizes = {number: rng.choice([1, 5000, 100_000, 5 * MIB]) for number in range(40)}
    for number, size in sizes.items():
        assert box.put(number, size) is Put.STORED
    used = box.store.usage().used_bytes
    for number, size in sizes.items():
        path = box.file(number)
        if number % 4 == 0:
            os.truncate(path, rng.randrange(path.stat().st_size))
        elif number % 4 == 1:
            with open(path, "r+b") as f:
                at = rng.randrange(4096 + size)
                f.seek(at)
                byte = f.read(1)[0]
                f.seek(at)
                f.write(bytes([byte ^ 1 << rng.randrange(8)]))
        elif number % 4 == 2:
            with open(path, "ab") as f:
                f.write(bytes(4096))
    for number, size in sizes.items():
        assert box.intact(number, size) == (number % 4 == 3), number
    counters = box.store.health.report()[0]
    assert counters["damaged_removed"] == 30
    assert len(box.removed) == 30  # type: ignore[attr-defined]
    assert len(list(tmp_path.rglob("*.hsr"))) == 10
    assert box.store.usage().used_bytes < used
    assert all(box.put(number, size) is not Put.FAILED for number, size in sizes.items())
    assert all(box.intact(number, size) for number, size in sizes.items())


def test_damage_found_at_start_is_removed(
    open_at: Callable[..., Box], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = open_at(tmp_path / "s")
    for number in range(9):
        box.put(number)
    cut, renamed = box.file(0), box.file(1)
    box.store.close()
    os.truncate(cut, 100)
    renamed.rename(renamed.with_name(renamed.name[:2] + "0" * 30 + ".hsr"))
    box = open_at(tmp_path / "s")
    assert [n for n in range(9) if box.intact(n)] == list(range(2, 9))
    assert box.store.health.report()[0]["bad_files_removed"] == 2
    assert any("is not a good record" in line for line in lines(caplog))


def test_a_disk_that_fills_drops_stores_and_says_so_once(
    open_at: Callable[..., Box], small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = open_at(small_disk / "s")
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda n: box.put(n, MIB), range(100)))
    stored = [n for n, o in enumerate(outcomes) if o is Put.STORED]
    assert 40 < len(stored) < 64
    assert set(outcomes) <= {Put.STORED, Put.FULL}
    assert all(box.intact(n, MIB) for n in stored)
    assert sum("full" in line or "floor" in line for line in lines(caplog)) <= 2  # ours at most once for each cause
    assert not [p for p in (small_disk / "s" / "tmp").rglob("*") if p.is_file() and p.name != "owner"]
    box.store.delete([oid(n) for n in stored[:5]])
    assert box.put(1000, MIB) is Put.STORED
    box.store.close()
    again = open_at(small_disk / "s")
    assert all(again.intact(n, MIB) for n in [*stored[5:], 1000])


def test_somebody_else_fills_the_disk(open_at: Callable[..., Box], small_disk: Path) -> None:
    box = open_at(small_disk / "s")
    assert box.put(1, MIB) is Put.STORED
    with pytest.raises(OSError, match="space"):
        (small_disk / "other").write_bytes(bytes(200 * MIB))
    for number in range(2, 10):
        assert box.put(number, MIB) in (Put.FULL, Put.FAILED)
    assert box.intact(1, MIB)
    (small_disk / "other").unlink()
    assert box.put(2, MIB) is Put.STORED
    assert box.store.health.report()[1] == {}


def test_a_disk_that_turns_read_only_serves_what_it_has(
    open_at: Callable[..., Box], failing_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = open_at(failing_disk / "s")
    box.put(1)
    box.store.flush_catalogue()
    # What ext4 does on a write error: the file system turns read-only under open files.
    subprocess.run(["mount", "-o", "remount,abort", str(failing_disk)], check=True)
    assert {box.put(n) for n in range(2, 50)} == {Put.FAILED}
    assert box.intact(1)
    assert box.store.delete([oid(1)]).failed == [oid(1)]
    assert box.intact(1)
    assert sum("cannot be written" in line and "catalogue" not in line for line in lines(caplog)) == 1
    assert box.store.health.report()[1].keys() == {"write", "delete"}
    box.store.close()  # without waiting for ever on what cannot be written


def test_one_file_that_cannot_be_deleted_does_not_stop_the_others(open_at: Callable[..., Box], tmp_path: Path) -> None:
    box = open_at(tmp_path / "s")
    for number in range(5):
        box.put(number)
    stuck = box.file(2)
    if subprocess.run(["chattr", "+i", str(stuck)], capture_output=True, check=False).returncode:
        pytest.skip("files cannot be made immutable here (needs root and a file system with attributes)")
    try:
        deleted = box.store.delete([oid(n) for n in range(5)])
        assert deleted.failed == [oid(2)]
        assert len(deleted.entries) == 4
        assert box.intact(2)
    finally:
        subprocess.run(["chattr", "-i", str(stuck)], check=True)
    assert len(box.store.delete([oid(2)]).entries) == 1


def test_permission_lost_in_the_middle(tmp_path: Path) -> None:
    """As an ordinary user, whom permissions bind: a child process drops root first."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "unit" / "disk")!r})
from pathlib import Path
from disk_boxes import MIB, Box
from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.store import DiskStore
root = Path({str(tmp_path / "s")!r})
root.mkdir()
os.chown(root, 65534, 65534)
os.setgid(65534); os.setuid(65534)
box = Box(DiskStore(StoreConfig(root, 64 * MIB, 0)))
assert box.put(1) is Put.STORED and box.put(2) is Put.STORED
path = box.file(1)
path.chmod(0)
assert box.get(1) is None and box.intact(2)
os.chmod(box.store._core.scratch.folder, 0o500)
assert {{box.put(n) for n in range(10, 20)}} == {{Put.FAILED}}
assert box.intact(2)
os.chmod(box.store._core.scratch.folder, 0o700)
path.chmod(0o600)
assert box.put(10) is Put.STORED and box.intact(1)
box.store.close()
print("fine")
"""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.getuid() and folder != Path("/") and not folder.stat().st_mode & 1:
            folder.chmod(folder.stat().st_mode | 0o11)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "Permission denied" in done.stderr and "import" in done.stderr:
        pytest.skip("this interpreter is not readable by other users")
    assert done.stdout == "fine\n", done.stderr
    assert done.stderr.count("cannot be written") == 1


@pytest.mark.parametrize("what", ["everything", "namespace", "scratch", "catalogue"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_folder_deleted_underneath(
    open_at: Callable[..., Box], tmp_path: Path, what: str, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "s"
    box = open_at(root, shared=shared)
    for number in range(20):
        box.put(number)
    box.store.flush_catalogue()
    match what:
        case "everything":
            shutil.rmtree(root)
        case "namespace":
            shutil.rmtree(box.ns().folder)
        case "scratch":
            shutil.rmtree(root / "tmp")
        case "catalogue":
            for path in root.glob(f"{FILE}*"):
                path.unlink()
    kept = what in ("scratch", "catalogue")
    assert [box.intact(n) for n in range(3)] == [kept] * 3
    assert box.put(100) is Put.STORED
    assert box.intact(100)
    if not kept:
        assert len(box.removed) == 20  # type: ignore[attr-defined]
        assert [e.object_id for e in box.store.entries()] == [oid(100)]
        assert sum("deleted in use" in line for line in lines(caplog)) == 1
    used = box.store.usage().used_bytes
    assert bytes_on_disk(root) <= used
    box.store.close()
    again = open_at(root, shared=shared)
    assert again.intact(100)
    assert again.store.usage().used_bytes == used


def test_a_folder_that_another_server_took_over_is_left_alone(open_at: Callable[..., Box], tmp_path: Path) -> None:
    root = tmp_path / "s"
    first = open_at(root)
    first.put(1)
    root.rename(tmp_path / "moved")
    second = open_at(root)
    second.put(2)
    assert first.put(3) is Put.FAILED
    assert first.get(1) is None
    assert second.intact(2)
    assert "folder" in first.store.health.report()[1]
    assert [e.object_id for e in second.store.entries()] == [oid(2)]


def test_a_namespace_folder_of_rubbish_is_lived_with(open_at: Callable[..., Box], tmp_path: Path) -> None:
    root = tmp_path / "s"
    (root / "ns" / "what").mkdir(parents=True)
    (root / "ns" / "what" / "manifest.json").write_text("[]")
    (root / "ns" / "file").write_text("")
    box = open_at(root)
    box.put(1)
    (box.ns().folder / "zz").mkdir()
    (box.ns().folder / "00" / "notes.txt").write_text("mine")
    box.store.close()
    again = open_at(root)
    assert again.intact(1)
    assert (again.ns().folder / "00" / "notes.txt").read_text() == "mine"


def test_an_hour_of_random_work_in_a_small_store_never_exceeds_its_bytes(
    open_at: Callable[..., Box], tmp_path: Path
) -> None:
    """Thousands of stores and deletions at the limit: what an hour brings, without the waiting."""
    import threading

    box, stop, worst = open_at(tmp_path / "s", 24 * MIB), threading.Event(), 0

    def watch() -> None:
        nonlocal worst
        while not stop.wait(0.02):
            worst = max(worst, bytes_on_disk(tmp_path / "s"))

    def work(seed: int) -> int:
        rng, stored = random.Random(seed), 0
        for _ in range(500):
            number = rng.randrange(400)
            if box.put(number, 40_000 + 1000 * (number % 300)) is Put.FULL:
                victims = sorted(box.store.entries(), key=lambda e: e.last_access)[:8]
                box.store.delete(e.object_id for e in victims)
            else:
                stored += 1
        return stored

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(4) as pool:
        stored = sum(pool.map(work, range(4)))
    stop.set()
    watcher.join()
    assert stored > 500
    assert 12 * MIB < worst <= 24 * MIB
    assert box.store.usage().reserved_bytes == 0
    total = sum(e.charge for e in box.store.entries())
    used = box.store.usage().used_bytes
    box.store.close()
    again = open_at(tmp_path / "s", 24 * MIB)
    assert again.store.usage().used_bytes == used
    assert sum(e.charge for e in again.store.entries()) == total
