"""The adapter against LMCache's real interface, allocator and storage manager."""

from __future__ import annotations

import argparse
import json
import select
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_boxes import SlowIO
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import BytesBufferMemoryObj

from lmcache_histate.backends.disk.adapter import HiStateDiskAdapter
from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.lock import FolderInUseError
from lmcache_histate.backends.disk.record import Kind, Place

MODEL = "org/hybrid-9b"
SHAPE = torch.Size([2, 1000, 7])


def spec(folder: Path, **params: Any) -> str:
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "lmcache_histate.backends.disk.adapter",
            "class_name": "HiStateDiskAdapter",
            "config_class_name": "HiStateDiskConfig",
            "adapter_params": {
                "base_path": str(folder),
                "max_capacity_gb": 0.25,
                "min_free_gb": 0,
                "sync": False,
                **params,
            },
        }
    )


def load_plugin(text: str) -> HiStateDiskAdapter:
    """As `lmcache server` does it."""
    parser = argparse.ArgumentParser()
    add_l2_adapters_args(parser)
    config = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", text])).adapters[0]
    return create_l2_adapter_from_registry(config, None)


def key(number: int, salt: str = "", group: int = 0) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), MODEL, 0x01000100, group, salt)


class Memory:
    """CPU memory as LMCache hands it out."""

    def __init__(self) -> None:
        self._allocator = TensorMemoryAllocator(torch.zeros(64 << 20, dtype=torch.uint8))

    def new(self, number: int | None = None, shape: torch.Size = SHAPE) -> Any:
        obj = self._allocator.allocate(shape, torch.bfloat16)
        assert obj is not None
        if number is None:
            obj.raw_data.zero_()
        else:
            obj.raw_data.copy_(
                torch.randint(
                    0, 256, obj.raw_data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(number)
                )
            )
        return obj


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def adapters(tmp_path: Path) -> Iterator[Callable[..., HiStateDiskAdapter]]:
    opened: list[HiStateDiskAdapter] = []

    def open_one(**params: Any) -> HiStateDiskAdapter:
        opened.append(load_plugin(spec(tmp_path / "store", **params)))
        return opened[-1]

    yield open_one
    for adapter in opened:
        adapter.close()


@pytest.fixture
def adapter(adapters: Callable[..., HiStateDiskAdapter]) -> HiStateDiskAdapter:
    return adapters()


def wait(fd: int, ask: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while (answer := ask()) is None:
        assert time.monotonic() < deadline, "no completion"
        select.select([fd], [], [], 1)
    return answer


def store(adapter: HiStateDiskAdapter, keys: list[ObjectKey], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    return wait(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None)[task]


def lookup(
    adapter: HiStateDiskAdapter, keys: list[ObjectKey], layout: dict[int, MemoryLayoutDesc] | None = None
) -> list[int]:
    layout = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])} if layout is None else layout
    task = adapter.submit_lookup_and_lock_task(keys, layout)
    found = wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None
    return list(found.get_indices_list())


def load(adapter: HiStateDiskAdapter, keys: list[ObjectKey], objects: list[Any]) -> list[int]:
    task = adapter.submit_load_task(keys, objects)
    done = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None
    return list(done.get_indices_list())


def same(a: Any, b: Any) -> bool:
    return bytes(a.byte_array) == bytes(b.byte_array)


def test_store_look_up_load_unlock(adapter: HiStateDiskAdapter, memory: Memory) -> None:
    keys, objects = [key(n) for n in range(9)], [memory.new(n) for n in range(9)]
    result = store(adapter, keys, objects)
    assert result.is_successful()
    assert result.bytes_transferred() == 9 * objects[0].get_size()
    assert lookup(adapter, [key(99), *keys]) == list(range(1, 10))
    targets = [memory.new() for _ in keys]
    assert load(adapter, keys, targets) == list(range(9))
    assert all(map(same, objects, targets))
    assert adapter.delete_keys(keys).held == keys
    adapter.submit_unlock(keys)
    report = adapter.delete_keys(keys)
    assert (report.deleted, report.freed_bytes > 9 * objects[0].get_size()) == (keys, True)
    assert lookup(adapter, keys) == []


def test_event_fds_are_distinct_and_closed_with_the_adapter(adapter: HiStateDiskAdapter) -> None:
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    adapter.close()
    adapter.close()


def test_one_bad_key_fails_alone(adapter: HiStateDiskAdapter, memory: Memory) -> None:
    good, gone = memory.new(1), memory.new(2)
    gone.ref_count_down()  # freed: its memory may be another object's already
    result = store(adapter, [key(1), key(2)], [good, gone])
    assert not result.is_successful()
    assert lookup(adapter, [key(1), key(2)]) == [0]
    store(adapter, [key(3)], [memory.new(3)])
    targets = [memory.new(), memory.new(), memory.new(shape=torch.Size([3])), memory.new()]
    assert load(adapter, [key(1), key(2), key(3), key(3)], targets) == [0, 3]


def test_a_lookup_with_another_layout_finds_nothing(adapter: HiStateDiskAdapter, memory: Memory) -> None:
    store(adapter, [key(1)], [memory.new(1)])
    assert lookup(adapter, [key(1)], {0: MemoryLayoutDesc([SHAPE], [torch.float16])}) == []
    assert lookup(adapter, [key(1)], {}) == [0]  # no layout was said: the load checks it


def test_objects_of_any_buffer_kind_can_be_stored(adapter: HiStateDiskAdapter) -> None:
    obj = BytesBufferMemoryObj(b"serialized" * 1000)
    assert adapter.put([key(1)], [obj]).result(30) == [Put.STORED]


def test_our_own_puts_and_fetches_stay_out_of_the_controllers_results(
    adapter: HiStateDiskAdapter, memory: Memory
) -> None:
    objects = [memory.new(n) for n in range(3)]
    place = Place(b"parent", 64, Kind.SNAPSHOT)
    keys = [key(n) for n in range(3)]
    assert adapter.put(keys, objects, [place] * 3).result(30) == [Put.STORED] * 3
    assert adapter.put(keys[:1], objects[:1]).result(30) == [Put.PRESENT]
    targets = [memory.new() for _ in range(4)]
    assert adapter.fetch([*keys, key(9)], targets).result(30) == [True] * 3 + [False]
    assert all(map(same, objects, targets))
    assert adapter.pop_completed_store_tasks() == {}
    readable, _, _ = select.select([adapter.get_store_event_fd(), adapter.get_load_event_fd()], [], [], 0)
    assert readable == []
    assert {k.place for k in adapter.known()} == {place}


def test_hints_say_where_what_lmcache_stores_belongs(
    adapters: Callable[..., HiStateDiskAdapter], memory: Memory
) -> None:
    adapter = adapters()
    adapter.hints.note_chunk(MODEL, key(1).chunk_hash, b"", 64)
    adapter.hints.note_kind(MODEL, 0, Kind.KV)
    store(adapter, [key(1), key(2)], [memory.new(1), memory.new(2)])
    assert adapter.set_places([(key(2), Place(key(1).chunk_hash, 128, Kind.KV)), (key(3), Place())]) == 1
    adapter.close()
    known = {k.key: k for k in adapters().known()}
    assert known[key(1)].place == Place(b"", 64, Kind.KV)
    assert known[key(2)].place == Place(key(1).chunk_hash, 128, Kind.KV)
    assert known[key(2)].payload_bytes == memory.new().get_size()


class Listener:
    def __init__(self) -> None:
        self.stored: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        for k in keys:
            del self.stored[k]


def test_listeners_and_usage_agree_with_the_disk(adapters: Callable[..., HiStateDiskAdapter], memory: Memory) -> None:
    adapter = adapters()
    store(adapter, [key(1, "a"), key(2, "b")], [memory.new(1), memory.new(2)])
    adapter.close()
    again, listener = adapters(), Listener()
    again.register_listener(listener)
    assert set(listener.stored) == {key(1, "a"), key(2, "b")}
    store(again, [key(3, "a")], [memory.new(3)])
    usage = again.get_usage()
    assert dict(usage.bytes_by_cache_salt) == {
        "a": listener.stored[key(1, "a")] + listener.stored[key(3, "a")],
        "b": listener.stored[key(2, "b")],
    }
    assert 0 < usage.usage_fraction < 1
    assert load(again, [key(1, "a")], [memory.new()]) == [0]
    assert listener.accessed == [key(1, "a")]
    again.delete([key(1, "a"), key(3, "a")])
    assert dict(again.get_usage().bytes_by_cache_salt) == {"b": listener.stored[key(2, "b")]}
    path = next((Path(again.report_status()["base_path"])).rglob("*.hsr"))
    path.write_bytes(path.read_bytes()[:-1])
    assert load(again, [key(2, "b")], [memory.new()]) == []
    assert listener.stored == {}


def test_keys_are_listed_in_pages(adapter: HiStateDiskAdapter, memory: Memory) -> None:
    keys = [key(n) for n in range(7)]
    store(adapter, keys, [memory.new(n) for n in range(7)])
    seen, cursor = [], None
    while True:
        page = adapter.list_l2_keys(MODEL, 3, cursor)
        seen += [e.key.to_object_key() for e in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            break
    assert sorted(seen, key=lambda k: k.chunk_hash) == keys
    assert adapter.list_l2_keys("other").entries == ()
    with pytest.raises(ValueError, match="page_size"):
        adapter.list_l2_keys(page_size=0)


def test_closing_waits_for_nothing_that_did_not_begin(adapter: HiStateDiskAdapter, memory: Memory) -> None:
    keys = [key(n) for n in range(200)]
    obj = memory.new(1)
    future = adapter.put(keys, [obj] * 200)
    adapter.close()
    assert len(future.result(0)) == 200
    assert adapter.put([key(1)], [obj]).result(0) == [Put.FAILED]
    assert adapter.fetch([key(1)], [obj]).result(0) == [False]


def test_a_folder_in_use_is_refused(adapter: HiStateDiskAdapter, adapters: Callable[..., HiStateDiskAdapter]) -> None:
    with pytest.raises(FolderInUseError, match="shared"):
        adapters()


def test_bad_parameters_are_named_by_lmcache_too() -> None:
    with pytest.raises(ValueError, match="unknown field"):
        load_plugin(spec(Path("/nowhere"), capacity=3))


def test_many_threads_use_one_adapter(adapter: HiStateDiskAdapter, memory: Memory) -> None:
    objects = {n: memory.new(n) for n in range(40)}
    errors: list[str] = []

    def work(part: int) -> None:
        mine = list(range(part * 10, part * 10 + 10))
        if set(adapter.put([key(n) for n in mine], [objects[n] for n in mine]).result(60)) != {Put.STORED}:
            errors.append("not stored")
        for n in mine:
            target = Memory.new(memory, None)
            if adapter.fetch([key(n)], [target]).result(60) != [True] or not same(target, objects[n]):
                errors.append(f"{n} differs")

    threads = [threading.Thread(target=work, args=(p,)) for p in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[Callable[[], StorageManager]]:
    """LMCache's storage manager with its real controllers over the disk tier."""
    opened: list[StorageManager] = []

    def close_once(sm: StorageManager) -> None:
        if sm in opened:  # LMCache's own close fails the second time
            opened.remove(sm)
            type(sm).close(sm)

    def open_one() -> StorageManager:
        l1 = ["--l1-size-gb", "0.06", "--no-l1-use-lazy", "--eviction-policy", "noop"]
        opened.append(StorageManager(parse_args([*l1, "--l2-adapter", spec(tmp_path / "store")])))
        opened[-1].close = partial(close_once, opened[-1])  # type: ignore[method-assign]
        return opened[-1]

    yield open_one
    for sm in list(opened):
        sm.close()


def fill(obj: Any, number: int) -> bytes:
    generator = torch.Generator().manual_seed(number)
    obj.raw_data.copy_(torch.randint(0, 256, obj.raw_data.shape, dtype=torch.uint8, generator=generator))
    return bytes(obj.byte_array)


def write_through(sm: StorageManager, keys: list[ObjectKey]) -> list[bytes]:
    """Write objects into CPU memory and wait until the StoreController has them on disk."""
    reserved = sm.reserve_write(keys, LAYOUT)
    contents = [fill(reserved[k], n) for n, k in enumerate(keys)]
    sm.finish_write(keys)
    adapter = sm.l2_adapters()[0][1]
    deadline = time.monotonic() + 60
    while adapter.store.usage().objects < len(keys):
        assert time.monotonic() < deadline, adapter.report_status()
        time.sleep(0.01)
    return contents


def prefetch(sm: StorageManager, keys: list[ObjectKey]) -> Any:
    return sm.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))


def test_lmcaches_controllers_store_restart_and_prefetch(managers: Callable[[], StorageManager]) -> None:
    keys = [key(n) for n in range(12)]
    sm = managers()
    contents = write_through(sm, keys)
    sm.close()
    sm = managers()
    handle = prefetch(sm, [*keys, key(99)])
    assert sm.wait_prefetch_status(handle, 60)
    result = sm.query_prefetch_status(handle)
    assert result is not None
    assert result.l2_hit_cells[0].popcount() == 12
    with sm.read_prefetched_results(keys) as objects:
        assert objects is not None
        assert [bytes(o.byte_array) for o in objects] == contents
    sm.finish_read_prefetched(keys)
    adapter = sm.l2_adapters()[0][1]
    deadline = time.monotonic() + 30
    while len(adapter.delete_keys(keys).held) and time.monotonic() < deadline:
        time.sleep(0.01)  # the controller gives its locks back on its own thread
    assert adapter.store.usage().objects == 0


def test_stopping_waits_for_a_load_that_outlives_its_request(managers: Callable[[], StorageManager]) -> None:
    keys = [key(n) for n in range(3)]
    sm = managers()
    write_through(sm, keys)
    deadline = time.monotonic() + 60
    while sm.get_l1_usage()[0]:  # the StoreController lets go of them a moment after they are on disk
        assert time.monotonic() < deadline
        sm.clear()
        time.sleep(0.01)
    core = sm.l2_adapters()[0][1].store._core
    slow = core.io = SlowIO(core.io)
    prefetch(sm, keys)
    assert slow.reading.wait(30)
    closing = threading.Thread(target=sm.close)
    closing.start()
    closing.join(1.0)
    assert closing.is_alive()  # memory that a read may still fill is not given back
    slow.go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert core.health.report()[0]["load_abandoned"] >= 1
