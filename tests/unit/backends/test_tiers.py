"""What the controller does with real objects: demotion, eviction, reading back, restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from storage import CHUNK, KV_GROUP, MIB, STATE_GROUP, Storage, chunk_hashes, eventually, kv_bytes

from lmcache_histate.backends import room


def test_a_turn_hits_its_last_snapshot(start: Callable[..., Storage]) -> None:
    storage = start()
    path = chunk_hashes("a", 10)
    storage.store(path, 0, 10, snapshots=[3, 9])
    assert storage.lookup(path) == 10
    assert storage.lookup(path[:9]) == 4
    assert storage.lookup(path[:3]) == 0


def test_overtaken_snapshots_move_to_disk_and_come_back_byte_for_byte(start: Callable[..., Storage]) -> None:
    storage = start()
    path = chunk_hashes("a", 12)
    storage.store(path, 0, 4, snapshots=[3])
    storage.store(path, 4, 8, snapshots=[7])
    storage.store(path, 8, 12, snapshots=[11])
    historical = storage.keys([path[3], path[7]], STATE_GROUP)
    final = storage.keys([path[11]], STATE_GROUP)
    assert eventually(lambda: len(storage.on_disk(historical)) == 2 and not storage.resident(historical))
    assert storage.resident(final) == final
    assert storage.on_disk(final) == []
    assert len(storage.resident(storage.keys(path, KV_GROUP))) == 12
    assert storage.lookup(path[:8]) == 8  # bytes are compared in there
    assert eventually(lambda: not storage.resident(historical)), "a snapshot that was read back stays below"


def test_snapshots_stay_in_cpu_memory_when_the_setting_says_so(start: Callable[..., Storage]) -> None:
    storage = start(snapshots_to_disk=False)
    path = chunk_hashes("a", 8)
    storage.store(path, 0, 4, snapshots=[3])
    storage.store(path, 4, 8, snapshots=[7])
    keys = storage.keys([path[3], path[7]], STATE_GROUP)
    assert not eventually(lambda: bool(storage.on_disk(keys)), seconds=2.0)
    assert storage.resident(keys) == keys


def test_cpu_memory_can_be_a_buffer_only(start: Callable[..., Storage]) -> None:
    storage = start(local_cpu=False)
    path = chunk_hashes("a", 8)
    keys = storage.store(path, 0, 8, snapshots=[3, 7])
    for _ in range(2):
        assert eventually(lambda: storage.on_disk(keys) == keys and not storage.resident(keys))
        assert storage.lookup(path) == 8


def test_a_full_cpu_tier_makes_room_instead_of_dropping_stores(start: Callable[..., Storage]) -> None:
    storage = start(cpu_gib=16 * MIB, eviction="lru")  # about 250 chunks of KV
    last: list[bytes] = []
    for number in range(24):
        path = chunk_hashes(f"s{number}", 32)
        storage.lookup(path)  # as every request does: the order of its chunks is known from here on
        for begin in range(0, 32, 8):
            stored = storage.store(path, begin, begin + 8, snapshots=[begin + 7])
            if len(stored) < 9:
                assert eventually(storage.has_room)
                assert len(storage.store(path, begin, begin + 8, snapshots=[begin + 7])) > 0
        last = path
    assert eventually(storage.has_room)
    assert storage.lookup(last) == 32
    status = storage.module.report_status()["histate"]
    assert status["errors"] == 0
    assert status["moved_to_disk"] > 0


def test_cold_kv_goes_to_disk_and_serves_a_late_hit(start: Callable[..., Storage]) -> None:
    storage = start(cpu_gib=16 * MIB, eviction="lru")
    first = chunk_hashes("first", 16)
    storage.lookup(first)
    storage.store(first, 0, 16, snapshots=[7, 15])
    kv = storage.keys(first, KV_GROUP)
    for number in range(60):
        path = chunk_hashes(f"s{number}", 32)
        storage.lookup(path)
        for begin in range(0, 32, 8):
            storage.store(path, begin, begin + 8, snapshots=[begin + 7])
            assert eventually(storage.has_room)
        if not storage.resident(kv):
            break
    assert len(storage.on_disk(kv)) == 16, "the oldest session left CPU memory"
    assert storage.lookup(first) == 16
    assert len(storage.resident(kv)) == 16, "KV that was read back stays"


def test_the_disk_tier_never_exceeds_its_bytes(start: Callable[..., Storage]) -> None:
    storage = start(cpu_gib=8 * MIB, disk_gib=16 * MIB)
    (_, disk), *_ = storage.manager.l2_adapters()
    for number in range(40):
        path = chunk_hashes(f"s{number}", 16)
        for begin in range(0, 16, 8):
            storage.store(path, begin, begin + 8, snapshots=[begin + 7])
            assert disk.get_usage().total_bytes_used <= disk.get_usage().total_capacity_bytes
            eventually(storage.has_room)
    status = storage.module.report_status()["histate"]
    assert status["evicted_from_disk"] > 0
    assert status["errors"] == 0


def test_without_a_disk_the_cheapest_units_are_deleted(start: Callable[..., Storage]) -> None:
    storage = start(cpu_gib=8 * MIB, disk=False, eviction="lru")
    for number in range(12):
        path = chunk_hashes(f"s{number}", 16)
        storage.lookup(path)
        storage.store(path, 0, 8, snapshots=[7])
        storage.store(path, 8, 16, snapshots=[15])
        eventually(storage.has_room)
    assert storage.module.report_status()["histate"]["evicted_from_cpu"] > 0
    assert storage.lookup(path) == 16


def test_after_a_restart_the_disk_serves_what_it_held(start: Callable[..., Storage]) -> None:
    storage = start(write_through=True)
    path = chunk_hashes("a", 12)
    storage.store(path, 0, 6, snapshots=[5])
    storage.store(path, 6, 12, snapshots=[11])
    everything = storage.keys(path, KV_GROUP) + storage.keys([path[5], path[11]], STATE_GROUP)
    assert eventually(lambda: len(storage.on_disk(everything)) == len(everything))
    assert eventually(lambda: len(storage.keeper.policy.tree) == 12)
    storage.close()

    again = start(write_through=True, registered=False)
    again.register()
    assert again.lookup(path) == 12
    tree = again.keeper.policy.tree
    assert eventually(lambda: len(tree) == 12)
    space = tree.namespaces[0]
    assert [tree.position[space.nodes[chunk]] for chunk in path] == [CHUNK * (index + 1) for index in range(12)]


def test_what_another_model_left_on_disk_is_not_read_at_every_lookup(
    start: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = start(write_through=True)
    path = chunk_hashes("a", 4)
    keys = storage.store(path, 0, 4, snapshots=[3])
    assert eventually(lambda: storage.on_disk(keys) == keys)
    storage.close()

    again = start(write_through=True, registered=False)
    again.register("other")
    scans: list[None] = []
    monkeypatch.setattr(again.keeper._chains, "on_disk", lambda: scans.append(None) or iter(()))
    for number in range(3):
        again.lookup(chunk_hashes(f"b{number}", 4))
    assert eventually(lambda: again.keeper.status()["lookups"] == 3)
    assert not scans


def test_tensor_parallel_ranks_leave_together(start: Callable[..., Storage]) -> None:
    storage = start(world_size=2)
    path = chunk_hashes("a", 8)
    storage.store(path, 0, 4, snapshots=[3])
    storage.store(path, 4, 8, snapshots=[7])
    historical = storage.keys([path[3]], STATE_GROUP)
    assert len(historical) == 2
    assert eventually(lambda: len(storage.on_disk(historical)) == 2 and not storage.resident(historical))
    assert storage.lookup(path[:5]) == 4


def test_tenants_never_see_each_other(start: Callable[..., Storage]) -> None:
    storage = start()
    path = chunk_hashes("a", 6)
    storage.store(path, 0, 6, snapshots=[5], salt="alice")
    assert storage.lookup(path, salt="alice") == 6
    assert storage.lookup(path, salt="bob") == 0
    assert storage.lookup(path) == 0


def test_replaced_snapshots_of_an_answer_are_dropped(start: Callable[..., Storage]) -> None:
    storage = start()
    path = chunk_hashes("a", 8)
    storage.store(path, 0, 6, snapshots=[5])
    storage.store(path, 6, 7, snapshots=[6])
    storage.store(path, 7, 8, snapshots=[7])
    from lmcache_histate.backends.layout import Namespace

    storage.keeper.drop_snapshots(Namespace("tiny", 1, ""), [path[6]])
    replaced = storage.keys([path[6]], STATE_GROUP)
    assert eventually(lambda: not storage.resident(replaced))
    assert not eventually(lambda: bool(storage.on_disk(replaced)), seconds=1.5)
    assert storage.lookup(path) == 8
    assert storage.lookup(path[:7]) == 6


def test_placement_facts_follow_the_model(start: Callable[..., Storage]) -> None:
    storage = start()
    facts = storage.keeper.placement_facts("tiny", 1)
    assert facts.snapshot_tokens == 64
    assert facts.residence_ratio == 1.0
    assert kv_bytes() == 64 * 1024


def test_the_write_budget_slows_demotion_first(start: Callable[..., Storage]) -> None:
    hour = 24 * 4 * MIB  # 4 MiB an hour
    storage = start(cpu_gib=16 * MIB, eviction="lru", max_disk_writes_per_day=hour)
    for number in range(16):
        path = chunk_hashes(f"s{number}", 32)
        storage.lookup(path)
        for begin in range(0, 32, 8):
            storage.store(path, begin, begin + 8, snapshots=[begin + 7])
            eventually(storage.has_room)
    status = storage.module.report_status()["histate"]
    assert 0 < status["bytes_moved_to_disk"] <= 4 * 2**20 + 2**18
    assert status["evicted_from_cpu"] > 0
    assert storage.lookup(path) == 32


def test_a_lookup_that_finds_nothing_costs_nothing_and_leaves_nothing(start: Callable[..., Storage]) -> None:
    storage = start()
    assert storage.lookup(chunk_hashes("nobody", 50)) == 0
    assert eventually(lambda: storage.module.report_status()["histate"]["lookups"] == 1)
    assert storage.manager.get_l1_usage()[0] == 0


def test_removed_behind_our_back_is_noticed(start: Callable[..., Storage]) -> None:
    storage = start()
    path = chunk_hashes("a", 8)
    keys = storage.store(path, 0, 8, snapshots=[7])
    assert eventually(lambda: len(storage.keeper.policy.tree) == 8)
    storage.manager.delete_l1_keys(keys[:4])
    assert storage.lookup(path) == 0
    storage.manager.clear(force=True)
    assert eventually(lambda: storage.keeper.policy.tree.tier_bytes[0] == 0)


def test_a_load_from_disk_gets_its_room(start: Callable[..., Storage]) -> None:
    storage = start(cpu_gib=8 * MIB, eviction="lru")
    first = chunk_hashes("first", 64)  # 4 MiB of KV: half of CPU memory, far more than is ever left free
    storage.lookup(first)
    for begin in range(0, 64, 8):
        storage.store(first, begin, begin + 8, snapshots=[begin + 7])
        assert eventually(storage.has_room)
    kv = storage.keys(first, KV_GROUP)
    for number in range(60):
        path = chunk_hashes(f"s{number}", 16)
        storage.lookup(path)
        for begin in range(0, 16, 8):
            storage.store(path, begin, begin + 8, snapshots=[begin + 7])
            assert eventually(storage.has_room)
        if len(storage.on_disk(kv)) == 64 and not storage.resident(kv):
            break
    assert len(storage.on_disk(kv)) == 64
    assert storage.lookup(first) == 64


def test_a_model_that_does_not_come_back_gives_its_disk_to_others(
    start: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "STRANGERS_SECONDS", 0.0)
    storage = start(write_through=True, disk_gib=32 * MIB)
    old = chunk_hashes("old", 320)
    for begin in range(0, 320, 16):
        storage.store(old, begin, begin + 16, snapshots=[begin + 15])
    kv = storage.keys(old, KV_GROUP)
    assert eventually(lambda: len(storage.on_disk(kv)) == 320)
    storage.close()

    again = start(write_through=True, disk_gib=32 * MIB, registered=False)
    again.register("another")
    numbers = iter(range(100))

    def a_new_session_finds_room() -> bool:
        path = chunk_hashes(f"s{next(numbers)}", 16)
        again.store(path, 0, 16, snapshots=[15])
        return eventually(lambda: len(again.on_disk(again.keys(path, KV_GROUP))) == 16, 0.5)

    assert all(eventually(a_new_session_finds_room) for _ in range(12))
    assert len(again.on_disk(kv)) < 320 - 100
