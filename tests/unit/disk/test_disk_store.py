from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_boxes import MIB, MODEL, Box, SlowIO, aligned, bytes_on_disk, layout, oid
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_histate.backends.disk.catalogue import remove_catalogue
from lmcache_histate.backends.disk.core import Put
from lmcache_histate.backends.disk.index import LOCK_LEASE_SECONDS
from lmcache_histate.backends.disk.record import Kind, Place
from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.store import DiskStore

PLACE = Place(b"parent-hash", 576, Kind.SNAPSHOT)


def test_an_object_is_stored_once_and_read_back(box: Box) -> None:
    assert box.put(1) is Put.STORED
    assert box.put(1) is Put.PRESENT
    assert box.intact(1)
    assert box.get(2) is None


def test_deleting_frees_the_bytes(box: Box) -> None:
    box.ns()
    before = box.store.usage().used_bytes
    for number in range(20):
        box.put(number)
    deleted = box.store.delete([oid(n) for n in range(25)])
    assert (len(deleted.entries), len(deleted.missing)) == (20, 5)
    assert box.store.usage().used_bytes == before
    assert list(box.store.config.root.rglob("*.hsr")) == []


@pytest.mark.parametrize("lost", ["nothing", "catalogue", "manifest", "both"])
def test_a_restart_finds_everything(open_box: Callable[..., Box], lost: str) -> None:
    box = open_box()
    for number in range(50):
        box.put(number, place=PLACE._replace(position=number))
    used = box.store.usage()
    box.store.close()
    if lost in ("catalogue", "both"):
        remove_catalogue(box.store.config.root)
    if lost in ("manifest", "both"):
        for manifest in box.store.config.root.rglob("manifest.json"):
            manifest.unlink()
    again = open_box()
    assert again.store.usage().used_bytes == used.used_bytes
    assert {e.place.position for e in again.store.entries()} == set(range(50))
    assert all(again.intact(n) for n in range(50))
    assert again.put(3) is Put.PRESENT
    assert again.store.flush_catalogue()
    again.store.close()
    third = open_box()
    assert third.store.health.report()[0]["recovered_from_headers"] == 0
    assert all(e.place == PLACE._replace(position=e.place.position) for e in third.store.entries())


def test_last_access_and_corrected_places_survive_a_restart(open_box: Callable[..., Box]) -> None:
    box = open_box()
    box.put(1)
    (entry,) = box.store.entries()
    entry.stored_at = entry.last_access = 1000.0
    assert box.intact(1)
    touched = entry.last_access
    assert touched > 1e9
    assert box.store.set_place(oid(1), PLACE)
    assert not box.store.set_place(oid(2), PLACE)
    box.store.close()
    (entry,) = open_box().store.entries()
    assert (entry.last_access, entry.place) == (touched, PLACE)


def test_a_clock_that_steps_back_neither_reorders_nor_hides(
    open_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = open_box()
    box.put(1)
    (entry,) = box.store.entries()
    before = entry.last_access
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    assert box.intact(1)
    assert entry.last_access == before
    assert box.put(2) is Put.STORED
    box.store.close()
    again = open_box()
    assert all(e.last_access <= 5000.0 for e in again.store.entries())  # what lies in the future counts as now
    assert again.intact(1)
    assert again.intact(2)


def test_models_layouts_tenants_groups_and_ranks_never_meet(box: Box) -> None:
    assert box.put(1) is Put.STORED
    for other in ({"salt": "b"}, {"model": "org/other"}, {"group": 1}, {"rank": 2}):
        assert box.get(1, **other) is None
        assert box.put(1, **other) is Put.STORED
    theirs = box.store.namespace(MODEL, layout(0, "torch.float32"))
    assert box.store.lock((theirs,), [oid(1)]) == [False]
    assert len(box.store.entries()) == 5


def test_a_record_moved_to_another_key_is_not_served(box: Box) -> None:
    box.put(1)
    box.put(2)
    box.file(1).replace(box.file(2))
    assert box.get(2) is None
    assert box.get(1) is None


def test_a_record_of_another_namespace_is_not_served(open_box: Callable[..., Box]) -> None:
    box = open_box()
    box.put(1)
    other = box.store.namespace(MODEL, layout(0, "torch.float32"))
    file = box.file(1)
    box.store.close()
    remove_catalogue(box.store.config.root)
    file.rename(other.path(file.name))
    again = open_box()
    assert again.store.entries() == []
    assert again.store.health.report()[0]["bad_files_removed"] == 1


def test_a_buffer_of_another_size_is_a_miss_and_costs_nothing(box: Box) -> None:
    box.put(1)
    assert box.get(1, size=9_999) is None
    assert box.get(1, size=20_000) is None
    assert box.intact(1)


# ---- capacity


def test_the_capacity_counts_everything_on_disk(open_box: Callable[..., Box]) -> None:
    box = open_box(capacity_bytes=20 * MIB)
    outcomes = [box.put(number, 300_000) for number in range(100)]
    assert outcomes.count(Put.STORED) > 30
    assert outcomes[-1] is Put.FULL
    assert bytes_on_disk(box.store.config.root) <= 20 * MIB
    assert box.store.usage().used_bytes <= 20 * MIB
    box.store.delete([oid(0), oid(1)])
    assert box.put(100, 300_000) is Put.STORED


def test_many_threads_do_not_overrun_the_capacity(open_box: Callable[..., Box]) -> None:
    box = open_box(capacity_bytes=20 * MIB)
    stop, worst = threading.Event(), 0

    def watch() -> None:
        nonlocal worst
        while not stop.is_set():
            worst = max(worst, bytes_on_disk(box.store.config.root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda n: box.put(n, 200_000 + 4096 * (n % 7)), range(150)))
    stop.set()
    watcher.join()
    assert outcomes.count(Put.FULL) > 50
    assert worst <= 20 * MIB


def test_free_space_below_the_floor_counts_as_full(open_box: Callable[..., Box]) -> None:
    box = open_box(min_free_bytes=1 << 60)
    with pytest.raises(OSError, match="no room"):
        box.ns()


def test_a_lowered_capacity_is_met_at_start_oldest_first(open_box: Callable[..., Box]) -> None:
    box = open_box()
    for number in range(40):
        box.put(number, 500_000)
    for entry in box.store.entries():
        entry.last_access = 1e9 + int.from_bytes(entry.object_id.chunk_hash, "big")
        box.store._core.note(entry)
    box.store.close()
    again = open_box(capacity_bytes=16 * MIB)
    assert again.store.usage().used_bytes <= 16 * MIB
    kept = {int.from_bytes(e.object_id.chunk_hash, "big") for e in again.store.entries()}
    assert kept == set(range(40 - len(kept), 40))
    assert len(kept) > 10


def test_leftovers_of_a_crash_are_removed_and_cost_nothing(open_box: Callable[..., Box]) -> None:
    box = open_box()
    box.put(1)
    used = box.store.usage().used_bytes
    box.store.close()
    dead = box.store.config.root / "tmp" / "0123456789abcd"
    dead.mkdir()
    (dead / "owner").touch()
    (dead / "5").write_bytes(bytes(100_000))
    again = open_box()
    assert not dead.exists()
    assert again.store.usage().used_bytes == used


# ---- locks and loads


def test_a_locked_object_is_passed_over_until_it_is_unlocked(box: Box) -> None:
    box.put(1)
    box.put(2)
    assert box.store.lock((box.ns(),), [oid(1), oid(1), oid(3)]) == [True, True, False]
    for _ in range(2):
        deleted = box.store.delete([oid(1)])
        assert deleted.held == [oid(1)]
        box.store.unlock([oid(1), oid(3)])
    assert len(box.store.delete([oid(1), oid(2)]).entries) == 2


def test_unlocking_too_often_is_harmless(box: Box) -> None:
    box.put(1)
    box.store.unlock([oid(1)] * 5)
    box.store.lock((box.ns(),), [oid(1)])
    assert box.store.delete([oid(1)]).held == [oid(1)]


def test_a_lock_that_was_never_given_back_lapses(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put(1)
    box.store.lock((box.ns(),), [oid(1)])
    later = time.monotonic() + LOCK_LEASE_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert len(box.store.delete([oid(1)]).entries) == 1


def test_unlock_waits_for_a_load_whose_request_gave_up(box: Box) -> None:
    box.put(1)
    slow = box.store._core.io = SlowIO(box.store._core.io)
    candidates = (box.ns(),)
    box.store.lock(candidates, [oid(1)])
    load = box.store.begin_load(candidates, oid(1))
    assert load is not None
    buffer = aligned(10_000)
    results: list[bool] = []
    loader = threading.Thread(target=lambda: results.append(box.store.load(load, buffer, lambda: True)))
    loader.start()
    assert slow.reading.wait(30)
    unlocker = threading.Thread(target=box.store.unlock, args=([oid(1)],))
    unlocker.start()
    unlocker.join(0.2)
    assert unlocker.is_alive()  # the buffer may still be written to
    assert box.store.delete([oid(1)]).held == [oid(1)]
    slow.go_on.set()
    unlocker.join(30)
    loader.join(30)
    assert results == [False]
    assert bytes(buffer) == bytes(10_000)  # abandoned before it was touched
    assert len(box.store.delete([oid(1)]).entries) == 1


def test_unlock_says_nothing_about_our_own_loads(box: Box) -> None:
    box.put(1)
    candidates = (box.ns(),)
    ours = box.store.begin_load(candidates, oid(1), own=True)
    box.store.lock(candidates, [oid(1)])
    box.store.unlock([oid(1)])
    assert box.store.delete([oid(1)]).held == [oid(1)]
    assert ours is not None
    assert box.store.load(ours, aligned(10_000), lambda: True)
    assert len(box.store.delete([oid(1)]).entries) == 1


def test_unlock_waits_even_if_another_load_found_the_object_damaged(box: Box) -> None:
    box.put(1)
    candidates = (box.ns(),)
    box.store.lock(candidates, [oid(1), oid(1)])
    first, second = (box.store.begin_load(candidates, oid(1)) for _ in range(2))
    assert first is not None
    assert second is not None
    file = box.file(1)
    file.write_bytes(file.read_bytes()[:-1])
    slow = SlowIO(box.store._core.io)
    fast, box.store._core.io = box.store._core.io, slow
    loader = threading.Thread(target=box.store.load, args=(second, aligned(10_000), lambda: True))
    loader.start()
    assert slow.reading.wait(30)
    box.store._core.io = fast
    assert not box.store.load(first, aligned(10_000), lambda: True)
    assert box.store.entries() == []  # removed, while the second load still reads
    unlocker = threading.Thread(target=box.store.unlock, args=([oid(1), oid(1)],))
    unlocker.start()
    unlocker.join(0.2)
    assert unlocker.is_alive()
    slow.go_on.set()
    unlocker.join(30)
    loader.join(30)
    assert not unlocker.is_alive()
    assert box.store._core.index._lingering == []


def test_unlock_drops_a_waiting_load_at_once_and_leaves_another_requests_load_alone(box: Box) -> None:
    box.put(1)
    candidates = (box.ns(),)
    box.store.lock(candidates, [oid(1)])
    mine = box.store.begin_load(candidates, oid(1))
    box.store.unlock([oid(1)])
    assert mine is not None
    assert not box.store.load(mine, aligned(10_000), lambda: True)
    box.store.lock(candidates, [oid(1), oid(1)])
    other = box.store.begin_load(candidates, oid(1))
    box.store.unlock([oid(1)])  # one request ends, the other still loads
    assert other is not None
    assert box.store.load(other, aligned(10_000), lambda: True)


def test_a_buffer_that_was_freed_is_neither_stored_nor_filled(box: Box) -> None:
    answers = iter([True, False])  # valid before the write, gone after it
    assert box.store.put(box.ns(), oid(1), aligned(100, 1), PLACE, lambda: next(answers), None) is Put.FAILED
    assert box.get(1, 100) is None
    assert box.store.usage().reserved_bytes == 0
    box.put(2)
    load = box.store.begin_load((box.ns(),), oid(2))
    assert load is not None
    buffer = aligned(10_000)
    assert not box.store.load(load, buffer, lambda: False)
    assert bytes(buffer) == bytes(10_000)
    assert box.intact(2)


def test_one_key_written_by_many_is_written_once(box: Box) -> None:
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: box.put(1, 500_000), range(16)))
    assert sorted(o.value for o in outcomes) == ["present"] * 15 + ["stored"]
    assert box.intact(1, 500_000)
    assert box.store.usage().objects == 1


# ---- shared folders


def test_two_stores_share_a_folder(open_box: Callable[..., Box]) -> None:
    one, two = open_box(shared=True), open_box(shared=True)
    one.put(1)
    candidates = two.store.candidates(MODEL, layout(0))
    assert two.store.lock(candidates, [oid(1), oid(2)]) == [True, False]
    assert two.intact(1)
    assert two.put(1) is Put.PRESENT
    two.store.unlock([oid(1)])
    assert one.store.usage().used_bytes == two.store.usage().used_bytes
    assert len(two.store.delete([oid(1)]).entries) == 1
    assert one.get(1) is None  # a miss, not a fault
    assert one.store.entries() == []
    assert one.store.usage().used_bytes == two.store.usage().used_bytes
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: (one, two)[n % 2].put(n // 2), range(100)))
    assert all(b.intact(n) for b in (one, two) for n in range(50))
    used = one.store.usage().used_bytes
    one.store.close()
    assert open_box(shared=True).store.usage().used_bytes == used


def test_the_capacity_of_a_shared_folder_binds_both(open_box: Callable[..., Box]) -> None:
    boxes = [open_box(shared=True, capacity_bytes=20 * MIB) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda n: boxes[n % 2].put(n, 300_000), range(100)))
    assert Put.FULL in outcomes
    assert bytes_on_disk(boxes[0].store.config.root) <= 20 * MIB


# ---- anything at all


class AnyOrder(RuleBasedStateMachine):
    """Whatever is done in whatever order: what is read is what was stored, and the limit holds."""

    CAPACITY = 16 * MIB

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.sizes: dict[int, int] = {}
        self.locked: list[int] = []
        self.open()

    def open(self) -> None:
        config = StoreConfig(Path(self.folder.name), self.CAPACITY, 0, sync=False)
        self.box = Box(DiskStore(config))
        self.locked = []

    @rule(number=st.integers(0, 30), size=st.sampled_from([0, 1, 4096, 70_000, 900_000, 3 * MIB]))
    def put(self, number: int, size: int) -> None:
        if number not in self.sizes:
            outcome = self.box.put(number, size)
            assert outcome in (Put.STORED, Put.FULL)
            if outcome is Put.STORED:
                self.sizes[number] = size
        else:
            assert self.box.put(number, self.sizes[number]) is Put.PRESENT

    @rule(number=st.integers(0, 30))
    def get(self, number: int) -> None:
        if number in self.sizes:
            assert self.box.intact(number, self.sizes[number])
        else:
            assert self.box.get(number) is None

    @rule(number=st.integers(0, 30))
    def delete(self, number: int) -> None:
        deleted = self.box.store.delete([oid(number)])
        assert bool(deleted.held) == (number in self.locked)
        assert bool(deleted.missing) == (number not in self.sizes)
        if deleted.entries:
            del self.sizes[number]

    @rule(number=st.integers(0, 30))
    def lock(self, number: int) -> None:
        if self.box.store.lock((self.box.ns(),), [oid(number)])[0]:
            self.locked.append(number)

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        number = self.locked.pop(which % len(self.locked))
        self.box.store.unlock([oid(number)])

    @rule(forget=st.booleans())
    def restart(self, forget: bool) -> None:
        used = self.box.store.usage().used_bytes
        self.box.store.close()
        if forget:
            remove_catalogue(self.box.store.config.root)
        self.open()
        assert self.box.store.usage().used_bytes == used

    @rule(number=st.integers(0, 30), at=st.floats(0, 0.999))
    def corrupt(self, number: int, at: float) -> None:
        if number in self.sizes and number not in self.locked:
            path = self.box.file(number)
            data = bytearray(path.read_bytes())
            within = int(at * (min(len(data), 4096 + self.sizes[number])))
            data[within] ^= 0x40
            path.write_bytes(data)
            assert self.box.get(number, self.sizes[number]) is None
            del self.sizes[number]

    @invariant()
    def within_the_limit(self) -> None:
        usage = self.box.store.usage()
        assert bytes_on_disk(self.box.store.config.root) <= usage.used_bytes <= self.CAPACITY
        assert usage.objects == len(self.sizes)
        assert usage.reserved_bytes == 0

    def teardown(self) -> None:
        self.box.store.close()
        self.folder.cleanup()


AnyOrder.TestCase.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
