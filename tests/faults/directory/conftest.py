"""What the directory's fault tests share: a server each, logs, links that can be cut, and a record for the table."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "directory"))  # redis_box, directory_boxes
sys.path.insert(0, str(Path(__file__).parent))

from fault_boxes import Lines, Link, Record
from redis_box import RedisServer, redis_server

from lmcache_histate.backends import directory_writer

RESULTS = "HISTATE_FAULT_RESULTS"
"""Environment variable: a file that gets one JSON line for each measured fault."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A redis-server to hurt."""
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        pytest.skip("redis-server is not installed")
    with redis_server("--maxmemory-policy", "noeviction") as running:
        yield running


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    directory_writer.logger.addHandler(handler)
    yield handler
    directory_writer.logger.removeHandler(handler)
    assert not any("secret" in text or "hunter2" in text for text in handler.texts), "a password in the log"


@pytest.fixture
def record() -> Record:
    """Writes one measured fault where `table.py` finds it."""

    def write(**measured: object) -> None:
        path = os.environ.get(RESULTS)
        if path:
            with Path(path).open("a") as sink:
                sink.write(json.dumps(measured) + "\n")

    return write


@pytest.fixture
def link(server: RedisServer) -> Iterator[Link]:
    made = Link(server)
    yield made
    made.close()
