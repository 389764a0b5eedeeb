"""Tenants (``cache_salt``) on one storage: what they hold is theirs alone, and no more than their quota."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from storage import KV_GROUP, MIB, STATE_GROUP, Storage, chunk_hashes, eventually, kv_bytes, state_bytes

pytestmark = pytest.mark.slow

Start = Callable[..., Storage]
TURN = 8 * kv_bytes() + state_bytes()
"""Bytes of what `serve` stores."""


def serve(storage: Storage, name: str, salt: str) -> list[bytes]:
    path = chunk_hashes(name, 8)
    storage.lookup(path, salt)
    storage.store(path, 0, 8, snapshots=[7], salt=salt)
    return path


def held(storage: Storage, path: list[bytes], salt: str) -> int:
    """Objects of a path in CPU memory or on disk."""
    keys = [*storage.keys(path, KV_GROUP, salt), *storage.keys(path, STATE_GROUP, salt)]
    on_disk = set(storage.on_disk(keys)) if storage.config.local_disk else set()
    return len(on_disk | set(storage.resident(keys)))


def evicted(storage: Storage) -> int:
    return storage.module.report_status()["histate"]["evicted_for_quota"]


def test_a_tenant_over_its_quota_loses_what_is_worth_least_of_its_own(start: Start) -> None:
    # The oldest session of all is bob's, and there is room for everything: only alice's quota is short.
    storage = start(eviction="lru", quotas={"alice": 3.5 * TURN / 2**30})
    bob = [serve(storage, f"b{number}", "bob") for number in range(5)]
    nobody = serve(storage, "n", "")
    alice = [serve(storage, f"a{number}", "alice") for number in range(6)]
    assert eventually(lambda: sum(held(storage, path, "alice") for path in alice) <= 3.5 * 9)
    assert storage.lookup(alice[-1], "alice") == 8
    assert held(storage, alice[0], "alice") == 0
    assert held(storage, alice[1], "alice") == 0
    for path in bob:
        assert storage.lookup(path, "bob") == 8
    assert storage.lookup(nobody) == 8
    assert evicted(storage) > 0


def test_quotas_change_while_the_server_runs(start: Start) -> None:
    storage = start(eviction="lru", quotas={"*": 2.0 * TURN / 2**30, "_default": 10 * MIB, "carol": 100 * MIB})
    for number in range(4):
        for salt in ("alice", "carol", ""):
            serve(storage, f"{salt}{number}", salt)

    def sessions(salt: str) -> int:
        return sum(held(storage, chunk_hashes(f"{salt}{number}", 8), salt) == 9 for number in range(4))

    assert eventually(lambda: sessions("alice") == 2)
    assert (sessions("carol"), sessions("")) == (4, 4)
    # What LMCache's PUT and DELETE /quota/{cache_salt} do:
    storage.manager.quota_manager.set_quota("carol", TURN)
    assert eventually(lambda: sessions("carol") == 1)
    storage.manager.quota_manager.set_default_limit_bytes(None)
    for number in range(4):
        serve(storage, f"alice{number}", "alice")
    time.sleep(1.5)
    assert sessions("alice") == 4
    assert sessions("") == 4


def test_a_move_to_disk_does_not_count_twice(start: Start) -> None:
    # Six snapshots of one session; five become historical and move down while the quota holds all of it exactly.
    quota = 24 * kv_bytes() + 6 * state_bytes()
    storage = start(quotas={"alice": quota / 2**30})
    path = chunk_hashes("a", 24)
    storage.lookup(path, "alice")
    for begin in range(0, 24, 4):
        storage.store(path, begin, begin + 4, snapshots=[begin + 3], salt="alice")
    historical = storage.keys(path[3:20:4], STATE_GROUP, "alice")
    assert eventually(lambda: len(storage.on_disk(historical)) == 5 and not storage.resident(historical))
    time.sleep(1.5)  # another look at every tenant
    assert evicted(storage) == 0
    assert storage.lookup(path, "alice") == 24


def test_a_quota_covers_memory_and_disk_together(start: Start) -> None:
    storage = start(write_through=True, eviction="lru", quotas={"alice": 4 * TURN / 2**30})
    paths = [serve(storage, f"a{number}", "alice") for number in range(6)]
    policy = storage.keeper.policy
    assert eventually(lambda: evicted(storage) > 0)

    def total() -> int:
        return sum(policy.tree.tier_bytes)

    time.sleep(1.0)
    assert eventually(lambda: total() <= 4 * TURN)
    assert storage.lookup(paths[-1], "alice") == 8


def test_a_model_without_snapshots_shares_the_memory_fairly(start: Start) -> None:
    storage = start(cpu_gib=16 * MIB, disk=False, eviction="lru")  # about 250 chunks
    storage.register("plain", hybrid=False)
    used = chunk_hashes("used", 16)
    storage.lookup(used)
    storage.store(used, 0, 16)
    storage.register("tiny")
    for number in range(40):
        serve(storage, f"s{number}", "")
        assert eventually(storage.has_room)
        if number % 4 == 3:
            storage.register("plain", hybrid=False)
            assert storage.lookup(used) == 16, "what is used goes on being served"
            storage.register("tiny")
    assert storage.module.report_status()["histate"]["evicted_from_cpu"] > 0
    assert storage.lookup(chunk_hashes("s0", 8)) == 0
    storage.register("plain", hybrid=False)
    assert storage.lookup(used) == 16


def test_what_is_being_read_from_disk_goes_when_it_is_released(start: Start) -> None:
    storage = start(write_through=True, eviction="lru")
    path = serve(storage, "a", "alice")
    keys = [*storage.keys(path, KV_GROUP, "alice"), *storage.keys([path[7]], STATE_GROUP, "alice")]
    assert eventually(lambda: len(storage.on_disk(keys)) == 9)
    (_, disk), *_ = storage.manager.l2_adapters()
    task = disk.submit_lookup_and_lock_task(keys, {})
    assert eventually(lambda: (found := disk.query_lookup_and_lock_result(task)) is not None and found.popcount() == 9)
    storage.manager.quota_manager.set_quota("alice", 0)
    assert eventually(lambda: not storage.resident(keys))
    time.sleep(1.0)
    assert len(storage.on_disk(keys)) == 9
    assert storage.keeper.policy.tree.tier_bytes[1] == TURN, "the core still knows what it could not delete"
    disk.submit_unlock(keys)
    assert eventually(lambda: not storage.on_disk(keys) and storage.keeper.policy.tree.tier_bytes[1] == 0)
