"""The server module of a real LMCache storage manager as a member of a fleet: what it tells, hears and puts back."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from storage import CHUNK, Storage, chunk_hashes, eventually

from lmcache_histate.backends.locate import Locator
from lmcache_histate.config import Config, HiStateSettings

PATH = chunk_hashes("session", 8)
SNAPSHOTS = (3, 7)
END = 8 * CHUNK
MIB = 1 / 1024


@pytest.fixture
def server(tmp_path: Path, redis_port: int):
    settings = HiStateSettings(
        directory=f"redis://127.0.0.1:{redis_port}",
        directory_lease=120.0,
        instance="a",
        instance_address="http://a:8000",
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    storage = Storage(
        Config(
            max_local_cpu_size=32 * MIB,
            local_disk=str(tmp_path / "disk"),
            max_local_disk_size=32 * MIB,
            remote_url=f"file://{shared}",
            histate=settings,
        )
    )
    storage.shared = shared  # type: ignore[attr-defined]
    yield storage
    storage.close()


@pytest.mark.slow
def test_a_server_tells_what_it_holds_and_puts_back_what_the_shared_tier_lost(server, redis_port: int) -> None:
    tier = f"shared:file://{server.shared}"
    with Locator(f"redis://127.0.0.1:{redis_port}", timeout_s=10.0) as locator:

        def located(path: list[bytes]) -> dict[str, tuple[int, int, int]]:
            try:
                found = locator.locate("tiny", chunk_hashes=path).locations
            except ValueError:
                return {}  # nobody has registered yet
            return {one.member.name: (one.cpu_tokens, one.disk_tokens, one.tokens) for one in found}

        assert server.lookup(PATH) == 0
        server.store(PATH, 0, 8, SNAPSHOTS)
        server.end_turn(PATH)
        everything = {"a": (END, END, END), tier: (0, 0, END)}
        assert eventually(lambda: located(PATH) == everything, 60.0), located(PATH)
        # The snapshot inside has become historical: on disk, and not worth a copy on the shared tier.
        half = {"a": (0, END // 2, END // 2)}
        assert eventually(lambda: located(PATH[:7]) == half, 60.0), located(PATH[:7])
        assert server.module.report_status()["histate"]["instance"] == "a"
        assert server.module.report_status()["histate"]["directory_connected"] == 1
        # The shared tier loses everything. The next lookup notices, and the only holder puts it back.
        for file in server.shared.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()

        def status() -> dict[str, Any]:
            return server.module.report_status()["histate"]

        def noticed() -> bool:
            # Its view may be a moment behind what it said itself: then the lookup after this one notices.
            assert server.lookup(PATH) == 8
            time.sleep(0.3)
            return status()["shared_copies_lost"] > 0

        assert eventually(noticed, 60.0), status()
        assert eventually(lambda: any(server.shared.iterdir()), 60.0), status()
        assert eventually(lambda: located(PATH) == everything, 60.0), located(PATH)
        assert status()["errors"] == 0
        server.close()
        assert eventually(lambda: located(PATH) == {tier: (0, 0, END)}, 60.0), "it gave up its lease when it stopped"


def test_without_a_directory_a_server_knows_itself(tmp_path: Path) -> None:
    storage = Storage(Config(max_local_cpu_size=32 * MIB))
    try:
        storage.lookup(PATH)
        storage.store(PATH, 0, 8, SNAPSHOTS)
        directory = storage.module._directory_writer.directory

        def located() -> list[tuple[int, ...]]:
            found = directory.locate("tiny@1@", PATH, time.monotonic())
            return [(one.cpu_tokens, one.disk_tokens, one.tokens) for one in found]

        assert eventually(lambda: located() == [(END, END, END)], 60.0), located()
        assert storage.module.report_status()["histate"]["errors"] == 0
    finally:
        storage.close()
