"""A forward pass waits for the state copies of the pass before the last, and for nobody else."""

from __future__ import annotations

import threading

import pytest

from lmcache_histate.connector.store_fence import StoreFence


class Store:
    """A store on the server that is done when the test says so."""

    def __init__(self, fails: bool = False) -> None:
        self.done = threading.Event()
        self.waited = threading.Event()
        self._fails = fails

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.set()
        if self._fails:
            raise RuntimeError("the server could not store it")
        return self.done.wait(timeout)


def fence(healthy: threading.Event | None = None) -> StoreFence:
    return StoreFence((lambda: True) if healthy is None else healthy.is_set, poll_seconds=0.01)


def one_pass(tested: StoreFence, *stores: Store) -> None:
    """A forward pass that submits `stores` at its end."""
    tested.before_forward()
    tested.submitted(stores)


def test_the_next_pass_does_not_wait_and_the_one_after_it_does() -> None:
    tested, store = fence(), Store()
    one_pass(tested, store)
    one_pass(tested)
    assert not store.waited.is_set()
    ran = threading.Event()
    thread = threading.Thread(target=lambda: (one_pass(tested), ran.set()), daemon=True)
    thread.start()
    assert store.waited.wait(10)
    assert not ran.is_set()
    store.done.set()
    assert ran.wait(10)
    thread.join(10)
    assert tested.abandoned == 0


def test_waits_for_every_store_of_that_pass_and_only_once() -> None:
    tested, stores = fence(), [Store() for _ in range(5)]
    for store in stores:
        store.done.set()
    one_pass(tested, *stores)
    one_pass(tested)
    one_pass(tested)
    assert all(store.waited.is_set() for store in stores)
    for store in stores:
        store.waited.clear()
        store.done.clear()
    one_pass(tested)
    one_pass(tested)
    assert not any(store.waited.is_set() for store in stores)


def test_stores_of_consecutive_passes_are_kept_apart() -> None:
    tested, first, second = fence(), Store(), Store()
    first.done.set()
    one_pass(tested, first)
    one_pass(tested, second)
    one_pass(tested)
    assert first.waited.is_set()
    assert not second.waited.is_set()


def test_a_server_that_stops_answering_is_not_waited_for() -> None:
    healthy = threading.Event()
    healthy.set()
    tested, store = fence(healthy), Store()
    one_pass(tested, store)
    one_pass(tested)
    thread = threading.Thread(target=lambda: one_pass(tested), daemon=True)
    thread.start()
    assert store.waited.wait(10)
    healthy.clear()
    thread.join(10)
    assert not thread.is_alive()
    assert tested.abandoned == 1


def test_a_store_that_failed_counts_as_done() -> None:
    tested = fence()
    one_pass(tested, Store(fails=True))
    one_pass(tested)
    one_pass(tested)
    assert tested.abandoned == 0


@pytest.mark.parametrize("passes", [1, 2, 50])
def test_passes_without_stores_never_wait(passes: int) -> None:
    tested = fence()
    for _ in range(passes):
        one_pass(tested)
