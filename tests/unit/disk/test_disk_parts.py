"""Ledger, locks, catalogue, namespaces, folder synchronisation, settings: each alone."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_boxes import MODEL, layout, oid

from lmcache_histate.backends.disk import namespace as namespaces
from lmcache_histate.backends.disk.catalogue import FILE, Catalogue, Row
from lmcache_histate.backends.disk.health import Health
from lmcache_histate.backends.disk.hints import PlaceHints
from lmcache_histate.backends.disk.ledger import Ledger, LocalLedger, SharedLedger
from lmcache_histate.backends.disk.lock import FolderInUseError, FolderLock, Scratch, sweep_scratch
from lmcache_histate.backends.disk.namespace import Namespaces
from lmcache_histate.backends.disk.record import Kind, Place
from lmcache_histate.backends.disk.settings import HELP, parse
from lmcache_histate.backends.disk.syncing import GroupSync, file_system
from lmcache_histate.backends.disk.tasks import Batches

# ---- ledger


@pytest.fixture(params=["local", "shared"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    return LocalLedger() if request.param == "local" else SharedLedger(tmp_path / "ledger", 7)


def test_use_and_promises_never_exceed_the_capacity(ledger: Ledger) -> None:
    worst = 0

    def work(seed: int) -> None:
        nonlocal worst
        rng, mine, promised = random.Random(seed), 0, 0
        for _ in range(300):
            size = rng.randrange(1, 40)
            match rng.randrange(4):
                case 0 | 1 if ledger.reserve(size, 100):
                    if rng.random() < 0.3:
                        ledger.release(size)
                    else:
                        promised += size
                case 2:
                    ledger.publish(promised)
                    mine, promised = mine + promised, 0
                case 3:
                    ledger.free(mine)
                    mine = 0
            worst = max(worst, sum(ledger.totals()))
        ledger.release(promised)
        ledger.free(mine)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 0 < worst <= 100
    assert ledger.totals() == (0, 0)


def test_two_servers_count_together_and_the_dead_are_forgotten(tmp_path: Path) -> None:
    one, two = SharedLedger(tmp_path / "ledger", 1), SharedLedger(tmp_path / "ledger", 2)
    assert one.reserve(60, 100)
    assert not two.reserve(50, 100)
    assert two.reserve(40, 100)
    two.publish(40)
    assert one.totals() == (40, 60)
    one.set_used(40, {1})  # a third server found that process 1 is dead
    assert two.totals() == (40, 0)


# ---- locks


def test_a_folder_is_held_alone(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, shared=False)
    for shared in (False, True):
        with pytest.raises(FolderInUseError, match=f"pid {os.getpid()}.*declare this one shared"):
            FolderLock(tmp_path, shared)
    first.release()
    FolderLock(tmp_path, shared=True).release()


def test_a_shared_folder_is_held_together_but_not_with_one_who_wants_it_alone(tmp_path: Path) -> None:
    held = [FolderLock(tmp_path, shared=True) for _ in range(3)]
    with pytest.raises(FolderInUseError):
        FolderLock(tmp_path, shared=False)
    for lock in held:
        lock.release()


def test_a_lock_notices_that_its_file_was_replaced(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, shared=False)
    assert lock.still_ours()
    (tmp_path / "LOCK").unlink()
    assert not lock.still_ours()
    lock.acquire()
    assert lock.still_ours()
    lock.release()


def test_only_the_temporary_files_of_the_dead_are_swept(tmp_path: Path) -> None:
    alive, dead = Scratch(tmp_path), Scratch(tmp_path)
    (alive.folder / "1").write_text("being written")
    (dead.folder / "1").write_text("left")
    os.close(dead._fd)  # what the kernel does when a process dies
    (tmp_path / "tmp" / "odd").mkdir()
    assert sweep_scratch(tmp_path) == ({dead.token}, 1)
    assert (alive.folder / "1").exists()
    assert not dead.folder.exists()
    assert not (tmp_path / "tmp" / "odd").exists()


# ---- catalogue


def row(number: int) -> Row:
    return Row(oid(number, "tenant"), number, 1.5, 2.5 + number, Place(b"parent", number * 64, Kind.KV))


def test_rows_survive_and_the_last_word_counts(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    for number in range(1000):
        catalogue.put("ns", f"f{number}", row(number))
    catalogue.put("ns", "f1", row(7))
    catalogue.drop("ns", "f2")
    catalogue.put("other", "f3", row(3))
    assert catalogue.flush()
    catalogue.drop("ns", "f4")
    catalogue.close()
    again = Catalogue(tmp_path)
    rows = dict(again.rows("ns", MODEL))
    again.close()
    assert len(rows) == 998
    assert rows["f5"] == row(5)
    assert rows["f1"] == row(7)


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_a_damaged_catalogue_is_begun_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_bytes(content)
    catalogue = Catalogue(tmp_path)
    assert list(catalogue.rows("ns", MODEL)) == []
    catalogue.put("ns", "f1", row(1))
    assert catalogue.flush()
    catalogue.close()
    assert "damaged" in caplog.text


def test_a_catalogue_damaged_while_running_is_written_again_in_full(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path, everything=lambda: [("ns", f"f{n}", row(n)) for n in range(500)])
    for number in range(500):
        catalogue.put("ns", f"f{number}", row(number))
    assert catalogue.flush()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    with open(tmp_path / FILE, "r+b") as f:
        f.seek(4096)
        f.write(b"\xff" * 30_000)
    for number in range(500):
        catalogue.put("ns", f"f{number}", row(number))
    catalogue.close()
    again = Catalogue(tmp_path)
    rows = dict(again.rows("ns", MODEL))
    again.close()
    assert rows == {f"f{n}": row(n) for n in range(500)}


def test_a_catalogue_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    catalogue = Catalogue(tmp_path)
    assert catalogue.healthy
    catalogue.close()


# ---- namespaces


def test_model_layout_and_fingerprint_each_make_another_namespace() -> None:
    names = {
        namespaces.namespace_name(model, shape, fingerprint)
        for model in ("a/b", "a-b")
        for shape in (layout(1), layout(2), layout(1, "torch.float32"), layout(1) + layout(1))
        for fingerprint in ("", "r1")
    }
    assert len(names) == 16


@pytest.mark.parametrize("model", ["../../etc/passwd", "a/b:c d", "", "\N{SNOWMAN}" * 100, "." * 10])
def test_any_model_name_makes_a_harmless_folder(model: str) -> None:
    name = namespaces.namespace_name(model, layout(1), "")
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name.encode()) <= 100


def test_a_serializers_objects_are_found_whatever_the_layout_of_the_lookup(tmp_path: Path) -> None:
    names = Namespaces(tmp_path, "", False)
    flat = names.get_or_make(MODEL, layout(10, "torch.uint8"), lambda: None)
    real = names.get_or_make(MODEL, layout(10), lambda: None)
    assert names.candidates(MODEL, layout(10)) == (real, flat)
    assert names.candidates(MODEL, layout(99)) == (flat,)
    assert set(names.candidates(MODEL, None)) == {real, flat}
    assert names.candidates("other", None) == ()


def test_the_manifest_can_be_read_by_people_and_by_us(tmp_path: Path) -> None:
    made = namespaces.create(tmp_path, MODEL, layout(10), "r1")
    assert f'"model": "{MODEL}"' in (made.folder / "manifest.json").read_text()
    read = namespaces.load(made.folder)
    assert read is not None
    assert (read.name, read.model, read.layout) == (made.name, MODEL, layout(10))
    (made.folder / "manifest.json").write_text('{"layout": 3}')
    assert namespaces.load(made.folder) is None


# ---- synchronisation, batches, health, hints


def test_everybody_who_waits_is_served_and_told_of_errors(tmp_path: Path) -> None:
    sync = GroupSync()
    folders = [str(tmp_path / str(n)) for n in range(5)]
    for folder in folders:
        Path(folder).mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: sync.sync(folders[: n % 6]), range(60)))
        sync.sync([folders[0], str(tmp_path / "deleted since")])
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            sync.sync([folders[0], str(tmp_path / "file" / "in a file")])
        sync.sync(folders)


def test_the_type_of_a_file_system_is_found() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/sys")) in ("sysfs", file_system(Path("/")))
    assert file_system(Path("/")) != ""


def test_a_batch_finishes_once_whatever_its_steps_do() -> None:
    batches, done = Batches(3, "test"), threading.Semaphore(0)
    seen: list[int] = []

    def step(at: int) -> None:
        seen.append(at)
        raise RuntimeError(f"step {at}")

    for count in (0, 1, 50):
        batches.run(count, step, done.release)
        assert done.acquire(timeout=10)
    assert sorted(seen) == sorted([0, *range(50)])
    batches.close()
    batches.run(2, step, done.release)  # after closing: on this thread
    assert done.acquire(blocking=False)
    batches.close()


def test_trouble_is_said_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    health = Health(logging.getLogger("t"))
    with caplog.at_level(logging.INFO, "t"):
        for _ in range(100):
            health.trouble("full", "the disk is full")
        health.well("full")
        health.well("full")
        for _ in range(100):
            health.notice("damage", "a record is damaged")
    assert [r.message for r in caplog.records] == ["the disk is full", "over: the disk is full", "a record is damaged"]
    assert health.report() == ({"trouble_full": 100}, {})


def test_hints_are_bounded_and_say_what_they_know() -> None:
    hints = PlaceHints(max_chunks=2)
    for number in range(3):
        hints.note_chunk(MODEL, oid(number).chunk_hash, b"p", number)
    hints.note_kind(MODEL, 1, Kind.SNAPSHOT)
    assert hints.place_of(oid(0)) == Place()
    assert hints.place_of(oid(2)) == Place(b"p", 2, Kind.UNKNOWN)
    assert hints.place_of(oid(2, group=1)) == Place(b"p", 2, Kind.SNAPSHOT)


# ---- settings


def test_settings_are_read(tmp_path: Path) -> None:
    config = parse({"base_path": str(tmp_path), "max_capacity_gb": 2.5, "direct_io": False, "shared": True})
    assert config.capacity_bytes == 5 << 29
    assert (config.direct_io, config.shared, config.min_free_bytes) == ("off", True, 1 << 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_path": ""}, "base_path must name a folder"),
        ({"base_path": 3}, "base_path must be a str"),
        ({"max_capacity_gb": None}, "max_capacity_gb is required"),
        ({"max_capacity_gb": "10"}, "max_capacity_gb must be a number"),
        ({"max_capacity_gb": 0.001}, "the least that works is 16777216"),
        ({"max_capacity_gb": float("nan")}, "must be a number"),
        ({"direct_io": "maybe"}, "direct_io.*auto, on or off"),
        ({"store_threads": 0}, "store_threads.*1 to 64"),
        ({"shared": "yes"}, "shared must be a bool"),
        ({"capacity": 3}, "unknown field.*capacity"),
    ],
)
def test_bad_settings_say_what_to_set(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse({"base_path": "/x", "max_capacity_gb": 1, **change})


def test_the_help_names_every_field() -> None:
    from lmcache_histate.backends.disk import settings

    assert all(f"- {name}" in HELP or f", {name}" in HELP for name in settings._FIELDS)
