"""Servers that the directory's unit tests share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from redis_box import RedisServer, redis_server


@pytest.fixture(scope="session")
def one_server() -> Iterator[RedisServer]:
    """One redis-server for all tests that do not hurt it."""
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        pytest.skip("redis-server is not installed")
    with redis_server() as server:
        yield server


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    """The shared server, emptied."""
    with one_server.client() as client:
        client.flushall()
    return one_server
