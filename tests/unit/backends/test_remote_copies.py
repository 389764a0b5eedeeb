"""What is copied to a remote tier: real LMCache adapters on a shared folder and on a real redis-server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage import KV_GROUP, MIB, STATE_GROUP, Storage, chunk_hashes, eventually, kv_bytes, state_bytes

from lmcache_histate.backends import reconnect
from lmcache_histate.replay.processes import free_ports
from lmcache_histate.state_store.objects import Tier

pytestmark = pytest.mark.slow

Start = Callable[..., Storage]
RESIDE = 3.5
"""Seconds after which an offer that nothing holds back has been made."""


class Remote:
    """A remote tier: its URL, and the names of the objects in it."""

    def __init__(self, url: str, names: Callable[[], list[str]]) -> None:
        self.url = url
        self.names = names

    def holds(self, keys: list) -> int:
        """How many of these objects are there."""
        names = self.names()
        return sum(
            any(f"@{key.object_group_id:x}@{key.chunk_hash.hex()}" in name.replace("0x", "") for name in names)
            for key in keys
        )


class Redis:
    """A redis-server on loopback that keeps nothing on disk, and wants a password."""

    PASSWORD = "p@ss word"

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("needs redis-server")
        self.port = free_ports(1)[0]
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._command += ["--requirepass", self.PASSWORD]
        self._folder = folder
        self.start()

    def start(self) -> None:
        with (self._folder / "redis.log").open("ab") as log:
            self._server = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._folder)
        assert eventually(self._answers)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def names(self) -> list[str]:
        import redis

        with redis.Redis(port=self.port, password=self.PASSWORD) as client:
            return [key.decode() for key in client.scan_iter(count=1000)]

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()


@pytest.fixture
def redis_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    server = Redis(tmp_path)
    begin = Storage.__init__

    def with_password(self: Storage, *arguments: Any, **options: Any) -> None:
        # As `histate server` passes it; HiState removes it again once the clients are made.
        monkeypatch.setenv("LMCACHE_RESP_PASSWORD", Redis.PASSWORD)
        begin(self, *arguments, **options)
        assert "LMCACHE_RESP_PASSWORD" not in os.environ

    monkeypatch.setattr(Storage, "__init__", with_password)
    yield server
    server.kill()


@pytest.fixture(params=["redis", "folder"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        return Remote(f"redis://127.0.0.1:{server.port}", server.names)
    folder = tmp_path / "shared"
    folder.mkdir()
    return Remote(f"file://{folder}", lambda: [str(file.relative_to(folder)) for file in folder.rglob("*.data")])


def counts(storage: Storage) -> dict:
    return storage.module.report_status()["histate"]


def serve(storage: Storage, path: list[bytes], snapshots: list[int], start: int = 0, salt: str = "") -> None:
    """A turn: looked up, stored step by step, ended."""
    storage.lookup(path, salt)
    for last in snapshots:
        storage.store(path, start, last + 1, snapshots=[last], salt=salt)
        start = last + 1
    storage.end_turn(path, salt)


def test_the_end_of_a_turn_is_copied_whole_and_what_lies_inside_is_not(start: Start, remote: Remote) -> None:
    storage = start(remote_url=remote.url)
    path = chunk_hashes("a", 12)
    serve(storage, path, [3, 7, 11])
    kv, final = storage.keys(path, KV_GROUP), storage.keys([path[11]], STATE_GROUP)
    assert eventually(lambda: remote.holds([*kv, *final]) == 13), remote.names()
    assert remote.holds(storage.keys([path[3], path[7]], STATE_GROUP)) == 0
    assert len(remote.names()) == 13
    assert eventually(lambda: counts(storage)["offered_to_remote"] == 1)
    assert counts(storage)["bytes_offered_to_remote"] == 12 * kv_bytes() + state_bytes()
    # The next turn adds what is new.
    longer = chunk_hashes("a", 16)
    serve(storage, longer, [15], start=12)
    assert eventually(lambda: remote.holds(storage.keys([longer[15]], STATE_GROUP)) == 1)
    assert len(remote.names()) == 18
    assert counts(storage)["bytes_offered_to_remote"] == 16 * kv_bytes() + 2 * state_bytes()
    storage.close()

    # Everything here is lost: another machine resumes where the turns ended, byte for byte.
    elsewhere = start(remote_url=remote.url, disk=False)
    assert elsewhere.lookup(longer) == 16
    assert elsewhere.lookup(longer[:15]) == 12
    assert counts(elsewhere)["errors"] == 0


def test_all_ranks_of_a_chunk_are_copied(start: Start, remote: Remote) -> None:
    storage = start(remote_url=remote.url, world_size=2)
    path = chunk_hashes("a", 4)
    serve(storage, path, [3])
    assert eventually(lambda: len(remote.names()) == 2 * 5)
    storage.close()
    assert start(remote_url=remote.url, disk=False, world_size=2).lookup(path) == 4


def test_a_prefix_that_two_sessions_share_is_copied_when_the_second_one_meets_it(start: Start, remote: Remote) -> None:
    storage = start(remote_url=remote.url, offer_to_remote="shared")
    first = chunk_hashes("a", 8)
    serve(storage, first, [3, 7])
    historical = storage.keys([first[3]], STATE_GROUP)
    assert eventually(lambda: len(storage.on_disk(historical)) == 1 and not storage.resident(historical))
    assert not eventually(lambda: bool(remote.names()), RESIDE), "one session shares nothing"
    second = chunk_hashes("b", 8, fork=("a", 5))
    assert storage.lookup(second) == 4  # read back from disk, for a moment
    assert eventually(lambda: remote.holds([*storage.keys(first[:4], KV_GROUP), *historical]) == 5)
    # vLLM saves a state where the two part.
    storage.store(second, 4, 5, snapshots=[4])
    assert eventually(lambda: remote.holds(storage.keys(second[:5], KV_GROUP)) == 5)
    assert eventually(lambda: remote.holds(storage.keys([second[4]], STATE_GROUP)) == 1)
    storage.store(second, 5, 8, snapshots=[7])
    storage.end_turn(second)
    assert not eventually(lambda: len(remote.names()) != 7, RESIDE), "ends of turns were not asked for"


@pytest.mark.parametrize(("setting", "wanted"), [("all", 10), ("none", 0)])
def test_the_setting_decides(start: Start, remote: Remote, setting: str, wanted: int) -> None:
    storage = start(remote_url=remote.url, offer_to_remote=setting)
    path = chunk_hashes("a", 8)
    serve(storage, path, [3, 7])
    if wanted:
        assert eventually(lambda: len(remote.names()) == wanted)
    else:
        assert not eventually(lambda: bool(remote.names()), RESIDE)
    assert storage.lookup(path) == 8


def test_a_remote_copy_lowers_the_price_and_its_end_is_dropped_not_moved(start: Start, remote: Remote) -> None:
    storage = start(cpu_gib=16 * MIB, remote_url=remote.url, eviction="lru")
    first = chunk_hashes("first", 8)
    serve(storage, first, [7])
    assert eventually(lambda: counts(storage)["offered_to_remote"] == 1)
    policy = storage.keeper.policy
    node = policy.space("tiny@1@").nodes[first[7]]

    def is_backed() -> bool:
        with storage.keeper._core:
            policy.order.settle()
            return bool(policy.tree.unit_backed[Tier.CPU][node])

    assert eventually(is_backed)
    everything = [*storage.keys(first, KV_GROUP), *storage.keys([first[7]], STATE_GROUP)]
    for number in range(60):
        path = chunk_hashes(f"s{number}", 32)
        storage.lookup(path)
        for begin in range(0, 32, 8):
            storage.store(path, begin, begin + 8, snapshots=[begin + 7])
            assert eventually(storage.has_room)
        if not storage.resident(everything):
            break
    assert not storage.resident(everything)
    assert storage.on_disk(everything) == []
    assert storage.lookup(first) == 8  # from the remote tier


def test_a_long_prefix_goes_in_pieces_that_leave_room_for_others(start: Start, remote: Remote) -> None:
    storage = start(cpu_gib=8 * MIB, remote_url=remote.url, disk=False)
    path = chunk_hashes("a", 64)  # 4 MiB of KV; a piece is at most 1 MiB
    sizes: list[int] = []
    announce = storage.keeper._offers._announce
    storage.keeper._offers._announce = lambda keys: (sizes.append(len(keys)), announce(keys))
    serve(storage, path, [63])
    assert eventually(lambda: counts(storage)["offered_to_remote"] == 1)
    assert len(remote.names()) == 65
    assert max(sizes) * kv_bytes() <= 2**20
    assert sum(sizes) == 65


def test_what_a_lookup_finds_or_misses_in_the_remote_tier_is_what_is_believed(
    start: Start, redis_server: Redis
) -> None:
    import redis

    url = f"redis://127.0.0.1:{redis_server.port}"
    storage = start(remote_url=url, disk=False)
    path = chunk_hashes("a", 8)
    serve(storage, path, [7])
    assert eventually(lambda: counts(storage)["offered_to_remote"] == 1)
    storage.close()
    elsewhere = start(remote_url=url, disk=False)

    def believed() -> int:
        return int(elsewhere.keeper.policy.tree.tier_bytes[Tier.REMOTE])

    assert elsewhere.lookup(path) == 8
    assert eventually(lambda: believed() == 8 * kv_bytes() + state_bytes())
    with redis.Redis(port=redis_server.port, password=Redis.PASSWORD) as client:
        client.flushall()
    elsewhere.lookup(path)
    assert eventually(lambda: believed() == 0)


@pytest.mark.slow
def test_a_remote_tier_that_dies_costs_hits_only_and_is_used_again_when_it_is_back(
    start: Start, redis_server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "CHECK_SECONDS", 0.2)
    storage = start(remote_url=f"redis://127.0.0.1:{redis_server.port}", disk=False)
    for number in range(3):
        serve(storage, chunk_hashes(f"before{number}", 8), [7])
    assert eventually(lambda: counts(storage)["offered_to_remote"] == 3)
    redis_server.kill()
    for number in range(3):
        path = chunk_hashes(f"after{number}", 8)
        serve(storage, path, [3, 7])
        assert storage.lookup(path) == 8
    assert eventually(lambda: counts(storage)["failed_offers"] >= 1, 60.0)
    assert storage.lookup(chunk_hashes("before0", 8)) == 8, "CPU memory has it"
    gone = chunk_hashes("before1", 8)
    keys = [*storage.keys(gone, KV_GROUP), *storage.keys([gone[7]], STATE_GROUP)]
    assert storage.manager.delete_l1_keys(keys) == (9, 0), "nothing stays locked"
    assert storage.lookup(gone) == 0

    redis_server.start()
    assert eventually(lambda: any(adapter.index > 0 for adapter, _ in storage.manager.l2_adapters()), 60.0)
    assert eventually(lambda: len(storage.manager.l2_adapters()) == 1, 60.0)
    back = chunk_hashes("back", 8)
    serve(storage, back, [7])
    keys = [*storage.keys(back, KV_GROUP), *storage.keys([back[7]], STATE_GROUP)]
    assert eventually(lambda: len([name for name in redis_server.names() if back[7].hex() in name]) == 2, 60.0)
    assert storage.manager.delete_l1_keys(keys) == (9, 0)
    assert storage.lookup(back) == 8
    assert counts(storage)["errors"] == 0


def test_cpu_memory_as_a_buffer_passes_everything_on(start: Start, remote: Remote) -> None:
    storage = start(remote_url=remote.url, disk=False, local_cpu=False)
    path = chunk_hashes("a", 8)
    keys = storage.store(path, 0, 8, snapshots=[3, 7])
    assert eventually(lambda: remote.holds(keys) == 10 and not storage.resident(keys))
    assert storage.lookup(path) == 8


def test_an_attention_only_model_is_copied_too(start: Start, remote: Remote) -> None:
    storage = start(remote_url=remote.url, hybrid=False)
    path = chunk_hashes("a", 6)
    storage.lookup(path)
    storage.store(path, 0, 6)
    storage.end_turn(path)
    assert eventually(lambda: len(remote.names()) == 6)
    storage.close()
    assert start(remote_url=remote.url, disk=False, hybrid=False).lookup(path[:5]) == 5


def test_an_offer_of_what_nobody_has_any_more_is_given_up(start: Start, remote: Remote, monkeypatch) -> None:
    from lmcache_histate.backends import offers

    monkeypatch.setattr(offers, "WAIT_SECONDS", 0.5)
    storage = start(remote_url=remote.url)
    path = chunk_hashes("a", 8)
    serve(storage, path, [7])
    storage.manager.delete_l1_keys(storage.keys([path[7]], STATE_GROUP))
    deadline = time.monotonic() + 20.0
    while storage.keeper._offers._ended or storage.keeper._offers._offers:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert remote.names() == []
