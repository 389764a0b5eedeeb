"""Log lines, and links that can be cut."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from redis_box import RedisServer, free_port

Record = Callable[..., None]


class Lines(logging.Handler):
    """What the directory writers of this process logged, from a level on that a person reads."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def with_words(self, *words: str) -> list[str]:
        return [text for text in self.texts if any(word in text for word in words)]


class Link:
    """A network between instances and a server that can be cut: a namespace of its own where root may make one, else a
    process that forwards, and stops."""

    def __init__(self, server: RedisServer) -> None:
        self.prefix: list[str] = []
        self._name = f"hs{os.getpid() % 100_000}"
        self._proxy: subprocess.Popen[bytes] | None = None
        self.kind = "network namespace"
        if self._namespace():
            self.url = f"redis://10.213.7.1:{server.port}"
            with server.client() as client:
                client.config_set("bind", "127.0.0.1 10.213.7.1")
                client.config_set("protected-mode", "no")
            return
        self.kind = "stopped proxy"
        port = free_port()
        script = Path(__file__).parent / "forward.py"
        self._proxy = subprocess.Popen([sys.executable, str(script), str(port), str(server.port)])
        time.sleep(1.0)
        self.url = f"redis://127.0.0.1:{port}"

    def _namespace(self) -> bool:
        name, near, far = self._name, f"{self._name}a", f"{self._name}b"
        commands = (
            f"ip netns add {name}",
            f"ip link add {near} type veth peer name {far}",
            f"ip link set {far} netns {name}",
            f"ip addr add 10.213.7.1/24 dev {near}",
            f"ip link set {near} up",
            f"ip netns exec {name} ip addr add 10.213.7.2/24 dev {far}",
            f"ip netns exec {name} ip link set {far} up",
        )
        try:
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self._remove()
            return False
        self.prefix = ["ip", "netns", "exec", name]
        return True

    def _remove(self) -> None:
        for command in (f"ip link del {self._name}a", f"ip netns del {self._name}"):
            if shutil.which("ip"):
                subprocess.run(command.split(), check=False, capture_output=True)

    def cut(self) -> None:
        if self._proxy is not None:
            self._proxy.send_signal(signal.SIGSTOP)
        else:
            subprocess.run(["ip", "link", "set", f"{self._name}a", "down"], check=True)

    def mend(self) -> None:
        if self._proxy is not None:
            self._proxy.send_signal(signal.SIGCONT)
        else:
            subprocess.run(["ip", "link", "set", f"{self._name}a", "up"], check=True)

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
        else:
            self._remove()
