"""How long loads from below took, from LMCache's event bus."""

from __future__ import annotations

from lmcache.v1.mp_observability.event import Event, EventType

from lmcache_histate.backends.events import MAX_LOADS, BusSubscriber, EventQueue, Restored
from lmcache_histate.state_store.objects import Tier


def told(events: list[tuple[EventType, float, dict[str, int]]]) -> list[Restored]:
    queue = EventQueue()
    subscriptions = BusSubscriber(queue, disk_index=1).get_subscriptions()
    for kind, at, data in events:
        subscriptions[kind](Event(kind, at, data))
    return queue.take(0.0)


def submitted(adapter: int, task: int, nbytes: int, at: float) -> tuple[EventType, float, dict[str, int]]:
    data = {"adapter_index": adapter, "task_id": task, "total_bytes": nbytes}
    return EventType.L2_LOAD_TASK_SUBMITTED, at, data


def completed(adapter: int, task: int, at: float) -> tuple[EventType, float, dict[str, int]]:
    return EventType.L2_LOAD_TASK_COMPLETED, at, {"adapter_index": adapter, "task_id": task}


def test_loads_are_told_apart_by_adapter_and_task() -> None:
    events = [submitted(0, 7, 100, 1.0), submitted(1, 7, 900, 2.0), completed(1, 7, 2.5), completed(0, 7, 4.0)]
    assert told(events) == [Restored(Tier.DISK, 900, 500.0), Restored(Tier.REMOTE, 100, 3000.0)]


def test_an_event_that_the_bus_dropped_is_no_time() -> None:
    assert told([completed(1, 1, 5.0), submitted(1, 2, 10, 6.0)]) == []


def test_ends_that_never_come_are_not_waited_for_without_bound() -> None:
    events = [submitted(1, task, 10, 0.0) for task in range(MAX_LOADS + 1)]
    assert told([*events, completed(1, 0, 1.0), completed(1, 1, 1.0)]) == [Restored(Tier.DISK, 10, 1000.0)]
