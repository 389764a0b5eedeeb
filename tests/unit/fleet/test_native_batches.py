"""LMCache's own Redis client, whose batches must be of one size, serves the unlike objects of a hybrid model."""

from __future__ import annotations

import time
from typing import Any

import pytest
from lmcache.lmcache_redis import LMCacheRedisClient

from lmcache_histate.backends.native_batches import Completion, OneSizeBatches

SECONDS = 20.0
SIZES = {"kv-1": 1000, "snapshot-1": 5000, "kv-2": 1000, "kv-3": 1000, "snapshot-3": 5000, "aux": 10}


def completion(client: Any, future: int) -> Completion:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for done in client.drain_completions():
            assert done[0] == future
            return done
        time.sleep(0.005)
    raise AssertionError("the batch never completed")


def contents(name: str, size: int) -> bytearray:
    return bytearray((ord(name[-1]) + index) % 256 for index in range(size))


def views(buffers: dict[str, bytearray]) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers.values()]


def test_objects_of_unlike_sizes_come_back_as_they_were_stored(redis_port: int) -> None:
    native = LMCacheRedisClient("127.0.0.1", redis_port, 2, "", "")
    client = OneSizeBatches(native)
    stored = {name: contents(name, size) for name, size in SIZES.items()}
    future, succeeded, error, _ = completion(client, client.submit_batch_set(list(stored), views(stored)))
    assert (future < 0, succeeded, error) == (True, True, "")
    assert completion(client, client.submit_batch_exists([*SIZES, "none"]))[3] == [True] * len(SIZES) + [False]
    wanted = {name: bytearray(size) for name, size in SIZES.items()}
    _, succeeded, _, flags = completion(client, client.submit_batch_get(list(wanted), views(wanted)))
    assert (succeeded, flags) == (True, [True] * len(SIZES))
    assert wanted == stored
    client.close()


def test_batches_of_one_size_are_the_clients_own(redis_port: int) -> None:
    client = OneSizeBatches(LMCacheRedisClient("127.0.0.1", redis_port, 2, "", ""))
    stored = {name: contents(name, 100) for name in ("a", "b", "c")}
    future, succeeded, _, _ = completion(client, client.submit_batch_set(list(stored), views(stored)))
    assert future > 0
    assert succeeded
    client.close()


def test_the_native_client_still_needs_it(redis_port: int) -> None:
    client = LMCacheRedisClient("127.0.0.1", redis_port, 2, "", "")
    stored = {name: contents(name, size) for name, size in SIZES.items()}
    _, succeeded, error, _ = completion(client, client.submit_batch_set(list(stored), views(stored)))
    assert (succeeded, error) == (False, "buffer size mismatch"), (
        "a client that takes it all makes OneSizeBatches needless"
    )
    client.close()


class Refusing:
    """Accepts one part and refuses the next."""

    def __init__(self) -> None:
        self.accepted = 0

    def submit_batch_set(self, keys: list[str], views: list[memoryview]) -> int:
        if self.accepted:
            raise RuntimeError("closed")
        self.accepted += 1
        return self.accepted

    def drain_completions(self) -> list[Completion]:
        return [(1, True, "", None)]


def test_a_refused_part_is_the_callers_error_and_leaves_nothing_behind() -> None:
    client = OneSizeBatches(Refusing())
    with pytest.raises(RuntimeError, match="closed"):
        client.submit_batch_set(["a", "b"], [memoryview(bytes(1)), memoryview(bytes(2))])
    assert client.drain_completions() == []
