"""Moving records between memory and disk: direct I/O where the file system has it, plain I/O elsewhere.

Both speak the small protocol `RecordIO`. They block; callers run them on threads (every system call here, the
checksum and the staging copies release the GIL). Threads were chosen over io_uring by measurement, see
`docs/disk.md`.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from lmcache_histate.backends.disk.lanes import Lanes
from lmcache_histate.backends.disk.record import (
    BLOCK,
    HEADER_BYTES,
    SEGMENT,
    RecordError,
    combine,
    padded,
    record_bytes,
    segment_digest,
)

logger = logging.getLogger(__name__)

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC


class AbandonedError(Exception):
    """The caller gave its buffer up while it was being used. Nothing is wrong with the record."""


class RecordIO(Protocol):
    """How whole records are written and read."""

    name: str
    """`direct` or `plain`, for logs and reports."""

    def write(self, path: str, header: bytes, payload: memoryview, sync: bool) -> None:
        """Create `path` and fill it with a record; with `sync` its data is on stable storage on return.

        Raises:
            OSError: as the system says; the file may be left half written, the caller removes it.
        """
        ...

    def read(self, path: str, payload: memoryview, still_wanted: Callable[[], bool]) -> tuple[bytes, int]:
        """Fill `payload` with the record's payload.

        Args:
            still_wanted: Asked before every touch of `payload`; once false, the read stops and raises.

        Returns:
            The unverified header block, and the checksum of what was read.

        Raises:
            OSError: as the system says.
            RecordError: the file's length is not that of a record with this payload.
            AbandonedError: the buffer is no longer wanted.
        """
        ...


def address(view: memoryview) -> int:
    """Memory address of a view's first byte."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class AlignedPool:
    """Reusable page-aligned buffers of one size. Thread-safe.

    Args:
        size: Bytes of one buffer, a multiple of `BLOCK`.
        keep: Most buffers kept for reuse; more are handed out when asked for, and dropped when they come back.
    """

    def __init__(self, size: int, keep: int) -> None:
        self._size = size
        self._keep = keep
        self._free: deque[memoryview] = (
            deque()
        )  # its ends are atomic; a queue.Queue costs small objects several microseconds

    def take(self) -> memoryview:
        """A buffer with arbitrary content."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(
                mmap.mmap(-1, self._size)
            )  # anonymous pages: aligned, and returned to the system when dropped

    def give(self, buffer: memoryview) -> None:
        """Return a buffer that nothing uses any more."""
        if len(self._free) < self._keep:
            self._free.append(buffer)


def _copy(to: memoryview, source: memoryview | bytes) -> None:
    # numpy.copyto releases the GIL, a slice assignment of memoryviews does not.
    np.copyto(np.frombuffer(to, np.uint8)[: len(source)], np.frombuffer(source, np.uint8))


def _write_all(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    left = list(pieces)
    while left:
        done = os.pwritev(fd, left, offset)
        if done == 0 or done % BLOCK:
            # A cut inside a block cannot be continued with direct I/O, and in practice means that no room is left.
            raise OSError(errno.ENOSPC, "the file system wrote less than was asked")
        offset += done
        left = _advance(left, done)


def _read_all(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    left = list(pieces)
    while left:
        done = os.preadv(fd, left, offset)
        if done == 0 or (done % BLOCK and done != sum(map(len, left))):
            raise RecordError(f"the file ends early, after {offset + done} bytes")
        offset += done
        left = _advance(left, done)


def _advance(pieces: list[memoryview], done: int) -> list[memoryview]:
    while pieces and done >= len(pieces[0]):
        done -= len(pieces[0])
        pieces = pieces[1:]
    return [pieces[0][done:], *pieces[1:]] if pieces and done else pieces


def _check_length(fd: int, payload_bytes: int) -> None:
    size, expected = os.fstat(fd).st_size, record_bytes(payload_bytes)
    if size != expected:
        raise RecordError(f"the file has {size} bytes, a record of {payload_bytes} bytes of payload has {expected}")


def _digests(payload: memoryview) -> list[int]:
    return [segment_digest(payload[at : at + SEGMENT]) for at in range(0, len(payload), SEGMENT)]


class DirectIO:
    """Records by O_DIRECT: the page cache is neither filled nor trusted, and aligned callers pay no copy.

    A buffer that does not start on a `BLOCK` boundary goes through a pooled staging buffer, one `SEGMENT` at a time.
    """

    name = "direct"

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._edges = AlignedPool(2 * BLOCK, 64)  # a header block and the padded tail of a payload
        self._staging = AlignedPool(SEGMENT, 4)

    def write(self, path: str, header: bytes, payload: memoryview, sync: bool) -> None:
        """See `RecordIO.write`."""
        fd = os.open(path, _CREATE | os.O_DIRECT, 0o644)
        edges = self._edges.take()
        try:
            _copy(edges, header)
            whole = len(payload) - len(payload) % BLOCK
            tail = edges[BLOCK : BLOCK + padded(len(payload) - whole)]
            if len(tail):
                tail[:] = bytes(payload[whole:]).ljust(BLOCK, b"\0")
            if whole == 0 or address(payload) % BLOCK == 0:
                pieces = [edges[:BLOCK], payload[:whole], tail]
                _write_all(fd, [p for p in pieces if len(p)], 0)
            else:
                self._write_staged(fd, edges[:BLOCK], payload[:whole], tail)
            if sync:
                os.fdatasync(fd)
        finally:
            self._edges.give(edges)
            os.close(fd)

    def _write_staged(self, fd: int, header: memoryview, payload: memoryview, tail: memoryview) -> None:
        staging = self._staging.take()
        try:
            _write_all(fd, [header], 0)
            for at in range(0, len(payload), SEGMENT):
                piece = payload[at : at + SEGMENT]
                _copy(staging, piece)
                _write_all(fd, [staging[: len(piece)]], HEADER_BYTES + at)
            if len(tail):
                _write_all(fd, [tail], HEADER_BYTES + len(payload))
        finally:
            self._staging.give(staging)

    def read(self, path: str, payload: memoryview, still_wanted: Callable[[], bool]) -> tuple[bytes, int]:
        """See `RecordIO.read`."""
        fd = os.open(path, _READ | os.O_DIRECT)
        edges = self._edges.take()
        try:
            _check_length(fd, len(payload))
            if len(payload) > 2 * SEGMENT and address(payload) % BLOCK == 0:
                return self._read_in_lanes(fd, edges, payload, still_wanted)
            whole = len(payload) - len(payload) % BLOCK
            tail = edges[BLOCK : BLOCK + padded(len(payload) - whole)]
            _wanted(still_wanted)
            if whole == 0 or address(payload) % BLOCK == 0:
                pieces = [edges[:BLOCK], payload[:whole], tail]
                _read_all(fd, [p for p in pieces if len(p)], 0)
            else:
                _read_all(fd, [edges[:BLOCK]], 0)
                self._read_staged(fd, payload[:whole], still_wanted)
                if len(tail):
                    _read_all(fd, [tail], HEADER_BYTES + whole)
            if len(tail):
                _wanted(still_wanted)
                payload[whole:] = tail[: len(payload) - whole]
            return bytes(edges[:BLOCK]), combine(_digests(payload))
        finally:
            self._edges.give(edges)
            os.close(fd)

    def _read_in_lanes(
        self, fd: int, edges: memoryview, payload: memoryview, still_wanted: Callable[[], bool]
    ) -> tuple[bytes, int]:
        """Read and digest an aligned payload segment by segment on several threads."""
        starts = range(0, len(payload), SEGMENT)
        digests = [0] * len(starts)

        def step(at: int) -> None:
            piece = payload[starts[at] : starts[at] + SEGMENT]
            whole = len(piece) - len(piece) % BLOCK
            tail = edges[BLOCK : BLOCK + padded(len(piece) - whole)]  # only the last piece has one
            head = edges[:BLOCK] if at == 0 else edges[:0]
            _wanted(still_wanted)
            offset = HEADER_BYTES + starts[at] - len(head)
            _read_all(fd, [p for p in (head, piece[:whole], tail) if len(p)], offset)
            if len(tail):
                piece[whole:] = tail[: len(piece) - whole]
            digests[at] = segment_digest(piece)

        self._lanes.each(len(starts), step)
        return bytes(edges[:BLOCK]), combine(digests)

    def _read_staged(self, fd: int, payload: memoryview, still_wanted: Callable[[], bool]) -> None:
        staging = self._staging.take()
        try:
            for at in range(0, len(payload), SEGMENT):
                piece = payload[at : at + SEGMENT]
                _read_all(fd, [staging[: len(piece)]], HEADER_BYTES + at)
                _wanted(still_wanted)
                _copy(piece, staging[: len(piece)])
        finally:
            self._staging.give(staging)


class PlainIO:
    """Records through the page cache, for file systems without direct I/O. No alignment is asked of anyone."""

    name = "plain"

    def write(self, path: str, header: bytes, payload: memoryview, sync: bool) -> None:
        """See `RecordIO.write`."""
        fd = os.open(path, _CREATE, 0o644)
        try:
            padding = bytes(padded(len(payload)) - len(payload))
            left = [memoryview(header), payload, memoryview(padding)]
            left, offset = [p for p in left if len(p)], 0
            while left:
                done = os.pwritev(fd, left, offset)
                if done == 0:
                    raise OSError(errno.ENOSPC, "the file system wrote less than was asked")
                offset += done
                left = _advance(left, done)
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def read(self, path: str, payload: memoryview, still_wanted: Callable[[], bool]) -> tuple[bytes, int]:
        """See `RecordIO.read`."""
        fd = os.open(path, _READ)
        try:
            _check_length(fd, len(payload))
            header = bytearray(HEADER_BYTES)
            _wanted(still_wanted)
            left, offset = [p for p in (memoryview(header), payload) if len(p)], 0
            while left:
                done = os.preadv(fd, left, offset)
                if done == 0:
                    raise RecordError(f"the file ends early, after {offset} bytes")
                offset += done
                left = _advance(left, done)
            return bytes(header), combine(_digests(payload))
        finally:
            os.close(fd)


def _wanted(still_wanted: Callable[[], bool]) -> None:
    if not still_wanted():
        raise AbandonedError


def read_header_block(path: str) -> tuple[bytes, int]:
    """The first `HEADER_BYTES` of a file, fewer if it is shorter, and its length in bytes.

    Raises:
        OSError: as the system says.
    """
    fd = os.open(path, _READ)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # without it a cold header drags 128 KiB of payload along
        return os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size
    finally:
        os.close(fd)


def choose_io(folder: Path, wish: str) -> RecordIO:
    """The I/O that works in `folder`, found by writing and reading back one record there.

    Args:
        wish: `on` demands direct I/O, `off` forbids it, `auto` takes it if the file system has it.

    Raises:
        ValueError: `wish` is something else, or direct I/O was demanded and does not work there.
        OSError: nothing can be written there at all.
    """
    if wish not in ("on", "off", "auto"):
        raise ValueError(f"direct_io must be on, off or auto, not {wish!r}")
    if wish == "off":
        return PlainIO()
    probe, io = folder / f"probe-{os.getpid()}", DirectIO()
    data = memoryview(mmap.mmap(-1, BLOCK))
    try:
        io.write(str(probe), bytes(HEADER_BYTES), data, sync=False)
        io.read(str(probe), data, lambda: True)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        if wish == "on":
            raise ValueError(f"{folder} has no direct I/O ({e.strerror}); set direct_io to auto or off") from e
        return PlainIO()
    finally:
        probe.unlink(missing_ok=True)
    return io
