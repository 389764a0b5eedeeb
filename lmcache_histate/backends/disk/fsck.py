"""Checking a store's folder without a server, and repairing it: what `histate fsck` runs.

A check changes nothing. A repair deletes what could never be served (damaged records, leftovers), writes lost
manifests anew and brings the catalogue in line with the files; it never touches a record that is good, nor a file
that is not the store's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from lmcache_histate.backends.disk import namespace as namespaces
from lmcache_histate.backends.disk.catalogue import FILE, Catalogue, Row
from lmcache_histate.backends.disk.lock import LOCK_FILE, FolderInUseError, FolderLock, scratch_is_dead
from lmcache_histate.backends.disk.record import (
    HEADER_BYTES,
    SEGMENT,
    SUFFIX,
    Header,
    RecordError,
    combine,
    decode_header,
    segment_digest,
)
from lmcache_histate.backends.disk.recovery import verify_header

_THREADS = 4
_CHUNK = 64
_OURS = {LOCK_FILE, "ledger", "ns", "tmp", FILE, f"{FILE}-wal", f"{FILE}-shm"}


class Problem(Enum):
    """What can be wrong in a store."""

    DAMAGED = "damaged record"
    MANIFEST = "manifest lost or unreadable"
    LEFTOVER = "leftover of a dead process"
    CATALOGUE = "catalogue unreadable"
    UNLISTED = "record that the catalogue does not know"
    DANGLING = "catalogue row without a record"
    FOREIGN = "not a file of the store"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    problem: Problem
    path: Path
    detail: str
    repaired: bool
    """Whether it no longer is. Foreign files never are: they are not the store's to delete."""


@dataclass
class NamespaceReport:
    """What one namespace holds."""

    name: str
    model: str
    records: int = 0
    """Good ones."""

    payload_bytes: int = 0
    disk_bytes: int = 0
    damaged: int = 0


@dataclass
class FsckReport:
    """What a check or a repair found."""

    root: Path
    repair: bool
    in_use: bool
    """A server holds the folder: temporary files and the catalogue are in flux, and were not judged."""

    payloads: bool
    """Whether payload checksums were verified, not only headers and lengths."""

    namespaces: list[NamespaceReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong (any more)."""
        return all(f.repaired or f.problem is Problem.FOREIGN for f in self.findings)


def fsck(
    root: Path, repair: bool = False, payloads: bool = True, progress: Callable[[int], None] | None = None
) -> FsckReport:
    """Check a store, or repair it.

    Args:
        root: The store's folder (`local_disk`; the adapter's `base_path`).
        repair: Whether to repair what can be. The folder must not be in use then.
        payloads: Whether to read all payloads and verify their checksums; without, only headers and lengths.
        progress: Called now and then with the number of records checked since the last call.

    Raises:
        FileNotFoundError: there is no store in this folder; nothing was made.
        FolderInUseError: a repair was asked for and a server holds the folder.
        OSError: the folder cannot be read.
    """
    if not (root / LOCK_FILE).exists() and not (root / "ns").is_dir():
        raise FileNotFoundError(
            f"{root} holds no disk tier: it has neither {LOCK_FILE} nor ns/. Name the folder that local_disk names"
        )
    with contextlib.ExitStack() as stack:
        in_use = False
        try:
            stack.callback(FolderLock(root, shared=False).release)
        except FolderInUseError:
            if repair:
                raise
            in_use = True
        except OSError:
            if repair:
                raise  # a read-only folder can be checked, not repaired
        report = FsckReport(root, repair, in_use, payloads)
        _Check(report, progress or (lambda count: None)).run()
    return report


class _Check:
    """One run over a folder."""

    def __init__(self, report: FsckReport, progress: Callable[[int], None]) -> None:
        self._report = report
        self._root = report.root
        self._progress = progress
        self._good: dict[str, dict[str, Row]] = {}

    def run(self) -> None:
        for entry in sorted(self._root.iterdir()):
            if entry.name not in _OURS:
                self._find(Problem.FOREIGN, entry, "left alone")
        if not self._report.in_use:
            self._leftovers()
        with ThreadPoolExecutor(_THREADS, "histate-fsck") as pool:
            for folder in namespaces.folders(self._root):
                self._namespace(folder, pool)
        if not self._report.in_use:
            self._catalogue()

    def _find(self, problem: Problem, path: Path, detail: str, repair: Callable[[], None] | None = None) -> None:
        repaired = False
        if self._report.repair and repair is not None:
            try:
                repair()
                repaired = True
            except OSError as e:
                detail = f"{detail}; cannot be repaired: {e}"
        self._report.findings.append(Finding(problem, path, detail, repaired))

    def _leftovers(self) -> None:
        scratch = self._root / "tmp"
        for folder in sorted(scratch.iterdir()) if scratch.is_dir() else []:
            if scratch_is_dead(folder):
                size = sum(p.lstat().st_size for p in folder.rglob("*"))
                remove = folder.unlink if not folder.is_dir() else lambda folder=folder: shutil.rmtree(folder)
                self._find(Problem.LEFTOVER, folder, f"{size} bytes", remove)

    def _namespace(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        files = list(self._files(folder))
        chunks = [files[at : at + _CHUNK] for at in range(0, len(files), _CHUNK)]
        known = namespaces.load(folder)
        report = NamespaceReport(folder.name, known.model if known is not None else "")
        rows = self._good.setdefault(folder.name, {})
        for checked in pool.map(lambda chunk: [(p, *self._record(folder.name, p)) for p in chunk], chunks):
            for path, header, why in checked:
                if header is None:
                    report.damaged += 1
                    self._find(Problem.DAMAGED, path, why, path.unlink)
                    continue
                report.records += 1
                report.payload_bytes += header.payload_bytes
                report.disk_bytes += path.stat().st_blocks * 512
                report.model = report.model or header.object_id.model
                stored = header.stored_at
                rows[path.name] = Row(header.object_id, header.payload_bytes, stored, stored, header.place)
            self._progress(len(checked))
        self._report.namespaces.append(report)
        if known is None:
            if report.records:
                model = report.model
                detail = f"{report.records} records of {model}"
                repair = lambda: namespaces.write_manifest(folder, model, None, "")  # noqa: E731
            else:
                detail, repair = "no good record in it", lambda: shutil.rmtree(folder)
            self._find(Problem.MANIFEST, folder, detail, repair)

    def _files(self, folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if len(entry.name) == 2 and entry.is_dir():
                for path in sorted(entry.iterdir()):
                    if path.suffix == SUFFIX and path.is_file():
                        yield path
                    else:
                        self._find(Problem.FOREIGN, path, "left alone")
            elif entry.name.startswith(f".{namespaces.MANIFEST}."):
                self._find(Problem.LEFTOVER, entry, "a manifest that was being written", entry.unlink)
            elif entry.name != namespaces.MANIFEST:
                self._find(Problem.FOREIGN, entry, "left alone")

    def _record(self, namespace: str, path: Path) -> tuple[Header | None, str]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            return None, str(e)
        try:
            header = decode_header(os.pread(fd, HEADER_BYTES, 0))
            verify_header(header, namespace, path.name, os.fstat(fd).st_size)
            if path.parent.name != path.name[:2]:
                raise RecordError("the record lies in the wrong folder")
            if self._report.payloads and self._checksum(fd, header.payload_bytes) != header.payload_checksum:
                raise RecordError("the payload checksum does not match")
        except (RecordError, OSError) as e:
            return None, str(e)
        finally:
            os.close(fd)
        return header, ""

    @staticmethod
    def _checksum(fd: int, size: int) -> int:
        digests = []
        for at in range(0, size, SEGMENT):
            digests.append(segment_digest(os.pread(fd, min(SEGMENT, size - at), HEADER_BYTES + at)))
            os.posix_fadvise(
                fd, HEADER_BYTES + at, SEGMENT, os.POSIX_FADV_DONTNEED
            )  # a check must not empty the page cache
        return combine(digests)

    def _catalogue(self) -> None:
        path = self._root / FILE
        if not path.exists():
            listed: set[tuple[str, str]] = set()
        else:
            rows = self._listed(path)
            if rows is None:
                self._find(Problem.CATALOGUE, path, "it is not a database of this version", self._rebuild)
                return
            listed = rows
        good = {(name, file) for name, rows in self._good.items() for file in rows}
        if listed != good:
            # One line for each kind: a lost catalogue is one fault, not a hundred thousand.
            repair = self._rebuild if self._report.repair else None
            for problem, difference in ((Problem.UNLISTED, good - listed), (Problem.DANGLING, listed - good)):
                if difference:
                    self._find(problem, path, f"{len(difference)} of them", repair)
                    repair = (lambda: None) if repair is not None else None  # one rebuild repairs both

    def _listed(self, path: Path) -> set[tuple[str, str]] | None:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
                return set(db.execute("SELECT ns, file FROM objects"))
        except sqlite3.Error:
            return None

    def _rebuild(self) -> None:
        catalogue = Catalogue(self._root)  # moves an unreadable one out of the way
        try:
            for namespace, rows in self._good.items():
                known = dict(catalogue.rows(namespace, ""))
                for file, row in rows.items():
                    if file not in known:
                        catalogue.put(namespace, file, row)
                for file in known.keys() - rows.keys():
                    catalogue.drop(namespace, file)
            for namespace, file in self._listed(self._root / FILE) or set():
                if namespace not in self._good:
                    catalogue.drop(namespace, file)
            if not catalogue.flush(600):
                raise OSError("the catalogue cannot be written")
        finally:
            catalogue.close()
