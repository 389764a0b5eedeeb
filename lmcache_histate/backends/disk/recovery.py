"""Finding out what a folder holds: the files are the truth, the catalogue adds what only it knows.

Every published record is found again by listing the shards; one without a catalogue row is taken in from its header.
Files that cannot be records (cut, grown, misnamed, unreadable headers) are deleted and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_histate.backends.disk import namespace as namespaces
from lmcache_histate.backends.disk.catalogue import Catalogue, Row
from lmcache_histate.backends.disk.io import read_header_block
from lmcache_histate.backends.disk.namespace import Namespace
from lmcache_histate.backends.disk.record import (
    SUFFIX,
    Header,
    RecordError,
    decode_header,
    file_name,
    padded,
    record_bytes,
)

logger = logging.getLogger(__name__)

_THREADS = 4  # enough to keep the disk's queue filled; more only fight for the interpreter
_CHUNK = 256


@dataclass
class Recovered:
    """What a scan found."""

    rows: dict[Namespace, dict[str, Row]] = field(default_factory=dict)
    """By namespace and file name."""

    from_headers: list[tuple[Namespace, str]] = field(default_factory=list)
    """Objects that the catalogue did not know: it should be told."""

    vanished: list[tuple[str, str]] = field(default_factory=list)
    """Namespace and file name of catalogue rows without a file: it should forget them."""

    bad: list[tuple[Path, str]] = field(default_factory=list)
    """Files that are no good records, and why."""


def scan(root: Path, catalogue: Catalogue | None, now: float) -> Recovered:
    """List a store's records.

    Args:
        root: The store's folder.
        catalogue: What to ask first; `None` reads every header.
        now: Unix seconds. Times from the future (a clock that stepped back) count as now.

    Raises:
        OSError: the folder itself cannot be listed.
    """
    found = Recovered()
    with ThreadPoolExecutor(_THREADS, "histate-disk-scan") as pool:
        for folder in namespaces.folders(root):
            _scan_namespace(folder, catalogue, now, pool, found)
    return found


def _scan_namespace(
    folder: Path, catalogue: Catalogue | None, now: float, pool: ThreadPoolExecutor, found: Recovered
) -> None:
    files = dict(_list_files(folder))
    namespace = namespaces.load(folder) or _adopt(folder, files)
    if namespace is None:
        return
    rows = found.rows.setdefault(namespace, {})
    known = dict(catalogue.rows(namespace.name, namespace.model)) if catalogue is not None else {}
    strangers: list[tuple[str, int]] = []
    for file, size in files.items():
        row = known.pop(file, None)
        if row is not None and size == record_bytes(row.payload_bytes) and file_name(row.object_id) == file:
            rows[file] = row._replace(last_access=min(row.last_access, now), stored_at=min(row.stored_at, now))
        else:
            strangers.append((file, size))
    found.vanished.extend((namespace.name, file) for file in known)
    chunks = [strangers[at : at + _CHUNK] for at in range(0, len(strangers), _CHUNK)]
    for checked in pool.map(lambda chunk: [(file, *_check(namespace, file, size)) for file, size in chunk], chunks):
        for file, header, why in checked:
            if header is None:
                found.bad.append((Path(namespace.path(file)), why))
                continue
            stored = min(header.stored_at, now)
            rows[file] = Row(header.object_id, header.payload_bytes, stored, stored, header.place)
            found.from_headers.append((namespace, file))


def _check(namespace: Namespace, file: str, size: int) -> tuple[Header | None, str]:
    try:
        header = decode_header(read_header_block(f"{namespace.folder}/{file[:2]}/{file}"))
        verify_header(header, namespace.name, file, size)
    except (RecordError, OSError) as e:
        return None, str(e)
    return header, ""


def verify_header(header: Header, namespace: str, file: str, size: int) -> None:
    """Whether a header belongs to the file that it stands in.

    Args:
        size: Length of the file in bytes.

    Raises:
        RecordError: it does not; the message says why.
    """
    if header.namespace != namespace:
        raise RecordError(f"the record belongs to namespace {header.namespace!r}")
    if file_name(header.object_id) != file:
        raise RecordError("the record's key is not the one its name stands for")
    if record_bytes(header.payload_bytes) != size:
        raise RecordError(f"the file has {size} bytes, its header promises {record_bytes(header.payload_bytes)}")


def _list_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every record file in a namespace folder."""
    for shard in _entries(folder):
        if len(shard.name) != 2 or not shard.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(Path(shard.path)):
            if entry.name.endswith(SUFFIX) and entry.name.startswith(shard.name):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _adopt(folder: Path, files: dict[str, int]) -> Namespace | None:
    """The namespace of a folder whose manifest is lost: any of its records knows the model."""
    for file in files:
        with contextlib.suppress(RecordError, OSError):
            header = decode_header(read_header_block(folder / file[:2] / file))
            if header.namespace == folder.name:
                logger.warning("the manifest of %s is lost: it is written anew, without the layout", folder)
                with contextlib.suppress(OSError):
                    namespaces.write_manifest(folder, header.object_id.model, None, "")
                return Namespace(folder.name, folder, header.object_id.model, None, False)
    return None


def count_bytes(root: Path, block: int, charge_of: Callable[[int], int], namespace_bytes: int) -> int:
    """Bytes that the records and namespaces under `root` are accounted with, from the files alone.

    Args:
        block: The file system's block in bytes.
        charge_of: Charge of a file of so many bytes.
        namespace_bytes: Charge of one namespace.
    """
    total = 0
    for folder in namespaces.folders(root):
        total += namespace_bytes + sum(charge_of(padded(size, block)) for _, size in _list_files(folder))
    return total
