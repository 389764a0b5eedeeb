"""A real redis-server on loopback for tests and benchmarks, and quick ways to hurt it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import redis

START_SECONDS = 30.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server without persistence: what it holds is gone when it stops.

    Args:
        arguments: more of its command line, for example `("--maxmemory", "2mb")`.
    """

    def __init__(self, *arguments: str) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        assert program is not None, "redis-server is not installed (Debian and Ubuntu: apt install redis-server)"
        self._command = [program, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1", *arguments]
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *arguments: str) -> None:
        """Start it, empty, on its port, and wait until it answers."""
        self.process = subprocess.Popen(
            [*self._command, "--port", str(self.port), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                    return
            except OSError:
                assert self.process.poll() is None, f"redis-server ended with {self.process.returncode}"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(port=self.port, **options)  # type: ignore[arg-type]

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def redis_server(*arguments: str) -> Iterator[RedisServer]:
    """A server for the length of a block."""
    server = RedisServer(*arguments)
    try:
        yield server
    finally:
        server.kill()
