"""kill -9 at random moments: what is served afterwards is byte for byte what was stored."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disk_boxes import Box, bytes_on_disk
from disk_worker import CAPACITY, KEYS, size_of

from lmcache_histate.backends.disk.catalogue import remove_catalogue
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.store import DiskStore

ROUNDS = int(os.environ.get("HISTATE_KILL_ROUNDS", "50"))


def start(folder: Path, seed: int, shared: str) -> subprocess.Popen[str]:
    worker = Path(__file__).with_name("disk_worker.py")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(worker), str(folder), str(seed), shared], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> list[str]:
    """Kill it and return what it had reported."""
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    return output.split("\n")[:-1]


def check(folder: Path, shared: bool) -> int:
    """Open the folder as the next server does, and compare everything in it."""
    box = Box(DiskStore(StoreConfig(folder, CAPACITY, 0, shared=shared)))
    try:
        used = bytes_on_disk(folder)
        assert used <= CAPACITY
        entries = box.store.entries()
        assert not list((folder / "tmp").glob("*/[0-9a-f]*"))
        for entry in entries:
            number = int.from_bytes(entry.object_id.chunk_hash, "big")
            assert box.intact(number, size_of(number)), number
        assert box.store.health.report()[0]["bad_files_removed"] == 0  # published records are whole
        return len(entries)
    finally:
        box.store.close()


@pytest.mark.timeout(300)
def test_killed_at_random_moments_it_never_serves_anything_wrong(tmp_path: Path) -> None:
    rng, folder, kept = random.Random(7), tmp_path / "store", 0
    for round_ in range(ROUNDS):
        process = start(folder, round_, "alone")
        time.sleep(rng.uniform(0.0, 0.5))
        reported = kill(process)
        assert not [line for line in reported if line.startswith("WRONG")]
        if round_ % 3 == 0:
            remove_catalogue(folder)
        if round_ % 5 == 0:
            kept = check(
                folder, shared=False
            )  # the other rounds go straight on: a start after a crash, and a crash again
    assert check(folder, shared=False) > 0
    assert kept <= KEYS


def test_one_of_two_servers_on_a_shared_folder_is_killed(tmp_path: Path) -> None:
    rng, folder = random.Random(8), tmp_path / "store"
    for round_ in range(2):
        survivor, victim = start(folder, 100 + round_, "shared"), start(folder, 200 + round_, "shared")
        time.sleep(rng.uniform(0.1, 0.4))
        reported = kill(victim)
        late = start(folder, 300 + round_, "shared")  # starts while the survivor works, and cleans up after the victim
        time.sleep(0.3)
        reported += kill(survivor) + kill(late)
        assert not [line for line in reported if line.startswith("WRONG")]
        check(folder, shared=True)
    assert check(folder, shared=False) > 0
