from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_boxes import MIB, Box

from lmcache_histate.backends.disk.catalogue import FILE, remove_catalogue
from lmcache_histate.backends.disk.fsck import FsckReport, Problem, fsck
from lmcache_histate.backends.disk.lock import FolderInUseError


def problems(report: FsckReport) -> list[Problem]:
    return [f.problem for f in report.findings]


@pytest.fixture
def closed(open_box: Callable[..., Box]) -> tuple[Path, dict[int, Path]]:
    """A closed store of ten objects, one of them large, and their files."""
    box = open_box()
    for number in range(10):
        box.put(number, 5 * MIB if number == 0 else 10_000)
    files = {n: box.file(n) for n in range(10)}
    box.store.close()
    return box.store.config.root, files


def test_a_good_store_is_clean_and_counted(closed: tuple[Path, dict[int, Path]]) -> None:
    root, files = closed
    done: list[int] = []
    report = fsck(root, progress=done.append)
    assert report.clean
    assert report.findings == []
    (space,) = report.namespaces
    assert (space.records, space.damaged, space.payload_bytes) == (10, 0, 5 * MIB + 90_000)
    assert space.disk_bytes >= space.payload_bytes
    assert sum(done) == 10
    assert len(files) == 10


def test_a_check_changes_nothing_and_a_repair_leaves_only_what_is_good(
    closed: tuple[Path, dict[int, Path]], open_box: Callable[..., Box]
) -> None:
    root, files = closed
    with open(files[0], "r+b") as f:
        f.seek(3 * MIB)
        f.write(b"?")
    os.truncate(files[1], 5000)
    files[2].rename(files[2].with_name(files[3].name))
    (files[4].parent / "notes.txt").write_text("mine")
    (root / "README").write_text("mine too")
    (root / "tmp" / "dead").mkdir(parents=True)
    (root / "tmp" / "dead" / "1").write_bytes(bytes(100))
    (root / "ns" / "empty").mkdir()
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and p.name not in ("LOCK", FILE)}

    report = fsck(root)
    assert not report.clean
    assert sorted(set(problems(report)), key=lambda p: p.name) == [
        Problem.DAMAGED, Problem.DANGLING, Problem.FOREIGN, Problem.LEFTOVER, Problem.MANIFEST,
    ]  # fmt: skip
    assert problems(report).count(Problem.DAMAGED) == 3
    assert not any(f.repaired for f in report.findings)
    assert {p: p.stat().st_mtime_ns for p in before} == before

    assert (
        sum(n.damaged for n in fsck(root, payloads=False).namespaces) == 2
    )  # the flipped payload bit is not looked for
    repaired = fsck(root, repair=True)
    assert repaired.clean
    again = fsck(root)
    assert again.clean
    assert set(problems(again)) == {Problem.FOREIGN}
    assert (files[4].parent / "notes.txt").read_text() == "mine"
    box = open_box()
    assert [n for n in range(1, 10) if box.intact(n)] == [3, 4, 5, 6, 7, 8, 9]
    assert box.store.health.report()[0]["recovered_from_headers"] == 0


@pytest.mark.parametrize("how", ["lost", "rubbish"])
def test_a_lost_catalogue_is_one_finding_and_rebuilt(closed: tuple[Path, dict[int, Path]], how: str) -> None:
    root, _ = closed
    remove_catalogue(root)
    if how == "rubbish":
        (root / FILE).write_bytes(b"no database" * 900)
    report = fsck(root)
    assert problems(report) == [Problem.UNLISTED if how == "lost" else Problem.CATALOGUE]
    assert fsck(root, repair=True).clean
    assert fsck(root).findings == []


def test_a_lost_manifest_is_written_anew(closed: tuple[Path, dict[int, Path]], open_box: Callable[..., Box]) -> None:
    root, files = closed
    (files[1].parents[1] / "manifest.json").unlink()
    assert problems(fsck(root)) == [Problem.MANIFEST]
    assert fsck(root, repair=True).clean
    assert fsck(root).findings == []
    assert open_box().intact(1)


def test_a_store_in_use_can_be_checked_but_not_repaired(box: Box) -> None:
    box.put(1)
    root = box.store.config.root
    report = fsck(root)
    assert report.in_use
    assert report.clean
    assert report.namespaces[0].records == 1
    with pytest.raises(FolderInUseError):
        fsck(root, repair=True)


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no disk tier.*local_disk"):
        fsck(tmp_path)
    assert list(tmp_path.iterdir()) == []
