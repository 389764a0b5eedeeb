from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from disk_boxes import aligned

from lmcache_histate.backends.disk.io import AbandonedError, DirectIO, PlainIO, RecordIO, address, choose_io
from lmcache_histate.backends.disk.lanes import Lanes
from lmcache_histate.backends.disk.record import (
    BLOCK,
    HEADER_BYTES,
    SEGMENT,
    RecordError,
    payload_checksum,
    record_bytes,
)

HEADER = bytes(range(256)) * 16
SIZES = [0, 1, 4095, 4096, 4097, 100_000, SEGMENT, 2 * SEGMENT + 1, 5 * SEGMENT, 5 * SEGMENT + 777]


@pytest.fixture(params=["direct", "plain"])
def io(request: pytest.FixtureRequest, tmp_path: Path) -> RecordIO:
    if request.param == "plain":
        return PlainIO()
    if choose_io(tmp_path, "auto").name != "direct":
        pytest.skip(f"{tmp_path} has no direct I/O")
    return DirectIO()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 8])
def test_what_was_written_is_read_back(io: RecordIO, tmp_path: Path, size: int, shift: int) -> None:
    source = aligned(size + shift, size)[shift:]
    io.write(tmp_path / "r", HEADER, source, sync=True)
    assert (tmp_path / "r").stat().st_size == record_bytes(size)
    target = aligned(size + shift)[shift:]
    header, checksum = io.read(tmp_path / "r", target, lambda: True)
    assert header == HEADER
    assert target == source
    assert checksum == payload_checksum(source)


def test_bytes_beyond_the_payload_are_zero_and_a_read_leaves_its_neighbours_alone(io: RecordIO, tmp_path: Path) -> None:
    io.write(tmp_path / "r", HEADER, aligned(5000, 1), sync=False)
    assert (tmp_path / "r").read_bytes()[HEADER_BYTES + 5000 :] == bytes(BLOCK * 2 - 5000)
    buffer = aligned(2 * BLOCK, 9)
    before = bytes(buffer)
    io.read(tmp_path / "r", buffer[:5000], lambda: True)
    assert buffer[5000:] == before[5000:]


def test_read_only_sources_are_fine(io: RecordIO, tmp_path: Path) -> None:
    io.write(tmp_path / "r", HEADER, memoryview(b"abc" * 3000), sync=False)
    target = aligned(9000)
    io.read(tmp_path / "r", target, lambda: True)
    assert bytes(target) == b"abc" * 3000


@pytest.mark.parametrize("size", [5000, 5 * SEGMENT])
@pytest.mark.parametrize("change", [-1, -BLOCK, 1, BLOCK])
def test_a_file_of_another_length_is_refused(io: RecordIO, tmp_path: Path, size: int, change: int) -> None:
    io.write(tmp_path / "r", HEADER, aligned(size, 1), sync=False)
    os.truncate(tmp_path / "r", record_bytes(size) + change)
    with pytest.raises(RecordError, match="bytes"):
        io.read(tmp_path / "r", aligned(size), lambda: True)


def test_an_existing_file_is_never_overwritten(io: RecordIO, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        io.write(tmp_path / "r", HEADER, aligned(10), sync=False)
    assert (tmp_path / "r").read_bytes() == b"precious"


@pytest.mark.parametrize("size", [5000, 5 * SEGMENT])
def test_an_abandoned_buffer_is_not_touched(io: RecordIO, tmp_path: Path, size: int) -> None:
    io.write(tmp_path / "r", HEADER, aligned(size, 1), sync=False)
    target = aligned(size)
    with pytest.raises(AbandonedError):
        io.read(tmp_path / "r", target, lambda: False)
    assert bytes(target) == bytes(size)


def test_no_descriptor_leaks(io: RecordIO, tmp_path: Path) -> None:
    io.write(tmp_path / "r", HEADER, aligned(10, 1), sync=False)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        io.read(tmp_path / "r", aligned(10), lambda: True)
        with pytest.raises(RecordError):
            io.read(tmp_path / "r", aligned(9000), lambda: True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_wish_decides(tmp_path: Path) -> None:
    assert choose_io(tmp_path, "off").name == "plain"
    with pytest.raises(ValueError, match="auto"):
        choose_io(tmp_path, "perhaps")
    assert os.listdir(tmp_path) == []


def test_addresses_are_those_of_numpy() -> None:
    array = np.zeros(10_000, np.uint8)
    assert address(memoryview(array)[3:]) == array.ctypes.data + 3


def test_lanes_do_each_step_once_and_end_before_they_return() -> None:
    lanes, lock = Lanes(), threading.Lock()
    done: list[int] = []

    def step(at: int) -> None:
        with lock:
            done.append(at)

    for count in (0, 1, 2, 100):
        done.clear()
        lanes.each(count, step)
        assert sorted(done) == list(range(count))


def test_a_failing_step_ends_the_transfer_with_its_error() -> None:
    def step(at: int) -> None:
        if at == 3:
            raise RecordError("three")

    lanes = Lanes()
    for _ in range(5):  # the helpers come back after each failure
        with pytest.raises(RecordError, match="three"):
            lanes.each(50, step)
