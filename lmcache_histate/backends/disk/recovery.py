"""Finding out what a folder holds: the files are the truth, the catalogue adds what only it knows.

Every published record is found again by listing the shards; one without a catalogue row is taken in from its header.
Files that cannot be records (cut, grown, misnamed, unreadable headers) are deleted and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    shards = list(_shards(folder))
    namespace = namespaces.load(folder) or _adopt(folder, shards)
    if namespace is None:
        return
    rows = found.rows.setdefault(namespace, {})
    known = dict(catalogue.rows(namespace.name, namespace.model)) if catalogue is not None else {}
    for shard in pool.map(lambda name: _scan_shard(namespace, name, known, now), shards):
        rows.update(shard.known)
        rows.update(shard.from_headers)
        found.from_headers.extend((namespace, file) for file in shard.from_headers)
        found.bad.extend((Path(namespace.path(file)), why) for file, why in shard.bad.items())
    found.vanished.extend((namespace.name, file) for file in known.keys() - rows.keys())


@dataclass
class _Shard:
    """What one shard folder holds, by file name."""

    known: dict[str, Row] = field(default_factory=dict)
    from_headers: dict[str, Row] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)


def _scan_shard(namespace: Namespace, shard: str, known: Mapping[str, Row], now: float) -> _Shard:
    """List a shard, and read the headers of what the catalogue does not know, or not of this length."""
    found = _Shard()
    for entry in _records(namespace.folder, shard):
        file = entry.name
        row = known.get(file)
        try:
            if row is not None:
                size = entry.stat(follow_symlinks=False).st_size
                if size == record_bytes(row.payload_bytes) and file_name(row.object_id) == file:
                    last_access, stored_at = min(row.last_access, now), min(row.stored_at, now)
                    found.known[file] = row._replace(last_access=last_access, stored_at=stored_at)
                    continue
            block, size = read_header_block(entry.path)
            header = decode_header(block)
            verify_header(header, namespace.name, file, size)
        except FileNotFoundError:
            continue
        except (RecordError, OSError) as e:
            found.bad[file] = str(e)
            continue
        stored = min(header.stored_at, now)
        found.from_headers[file] = Row(header.object_id, header.payload_bytes, stored, stored, header.place)
    return found


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


def _shards(folder: Path) -> Iterator[str]:
    """Names of a namespace's shard folders."""
    for entry in _entries(folder):
        if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
            yield entry.name


def _records(folder: Path, shard: str) -> Iterator[os.DirEntry[str]]:
    """Record files in a shard of a namespace's folder."""
    for entry in _entries(folder / shard):
        if entry.name.endswith(SUFFIX) and entry.name.startswith(shard):
            yield entry


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _adopt(folder: Path, shards: Iterable[str]) -> Namespace | None:
    """The namespace of a folder whose manifest is lost: any of its records knows the model."""
    for entry in (entry for shard in shards for entry in _records(folder, shard)):
        with contextlib.suppress(RecordError, OSError):
            header = decode_header(read_header_block(entry.path)[0])
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
        total += namespace_bytes
        for entry in (entry for shard in _shards(folder) for entry in _records(folder, shard)):
            with contextlib.suppress(FileNotFoundError):
                total += charge_of(padded(entry.stat(follow_symlinks=False).st_size, block))
    return total
