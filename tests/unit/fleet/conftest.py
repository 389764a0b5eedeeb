"""Fixtures of the fleet's tests: real redis-servers on loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_histate.replay.processes import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

START_SECONDS = 20.0


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """Port of a redis-server that keeps nothing on disk and ends with the test."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server")
    port = free_ports(1)[0]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "redis.log").read_text()
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)
        yield port
    finally:
        server.kill()
        server.wait()
