"""LMCache's own server, started as a fair baseline: the same memory and the same disk that HiState gets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lmcache_histate.replay.processes import ProcessScope, free_ports, wait_until_healthy

GIB = 1 << 30


@dataclass(frozen=True)
class CacheServerSettings:
    """Capacity and layout of one `lmcache server`.

    Attributes:
        chunk_tokens: Tokens per stored chunk; must equal the engine's recurrent block size.
        memory_bytes: CPU memory (L1).
        disk_bytes: Disk (L2), 0 for none.
        eviction: LMCache eviction policy of both tiers.
        extra_arguments: More command-line arguments.
    """

    chunk_tokens: int
    memory_bytes: int
    disk_bytes: int = 0
    eviction: str = "LRU"
    extra_arguments: tuple[str, ...] = ()

    def arguments(self, port: int, http_port: int, disk: Path) -> list[str]:
        """The command line after ``lmcache server``.

        Of LMCache's disk adapters `fs` never evicts; `fs_native` does once it has both a capacity and an eviction
        block, so that is the one a limited disk needs.

        Args:
            port: Port that engines connect to.
            http_port: Port of the HTTP interface.
            disk: Folder of the disk tier.
        """
        arguments = [
            *("--host", "localhost", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)),
            *("--chunk-size", str(self.chunk_tokens), "--separate-object-groups"),
            *("--l1-size-gb", f"{self.memory_bytes / GIB:.6f}", "--no-l1-use-lazy"),
            *("--eviction-policy", self.eviction),
            *("--disable-metrics",),
        ]
        if self.disk_bytes:
            adapter = {
                "type": "fs_native",
                "base_path": str(disk),
                "max_capacity_gb": self.disk_bytes / GIB,
                "eviction": {"eviction_policy": self.eviction},
            }
            arguments += ["--l2-adapter", json.dumps(adapter)]
        return [*arguments, *self.extra_arguments]


@dataclass
class CacheServer:
    """A running server.

    Attributes:
        process: Its process.
        port: Port that engines connect to.
        http_port: Port of the HTTP interface.
        disk: Folder of the disk tier.
        log: Its log file.
    """

    process: subprocess.Popen[bytes]
    port: int
    http_port: int
    disk: Path
    log: Path

    @property
    def health_url(self) -> str:
        """Answers once engines can connect."""
        return f"http://127.0.0.1:{self.http_port}/healthcheck"

    def wait(self, timeout_s: float = 120.0) -> None:
        """Wait until it accepts engines.

        Args:
            timeout_s: Seconds before giving up.

        Raises:
            StartError: It ended, or the time is over.
        """
        wait_until_healthy(self.process, self.health_url, self.log, timeout_s)


def start_cache_server(scope: ProcessScope, folder: Path, settings: CacheServerSettings) -> CacheServer:
    """Start stock LMCache's server without waiting for it.

    Args:
        scope: Ends it.
        folder: Receives its log and its disk tier.
        settings: Its capacity.

    Returns:
        The server; call `CacheServer.wait` before using it.
    """
    port, http_port = free_ports(2)
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    program = "import sys; from lmcache.cli.main import main; sys.exit(main())"  # whatever the PATH of the caller
    argv = [sys.executable, "-c", program, "server", *settings.arguments(port, http_port, disk)]
    return CacheServer(scope.start(argv, log), port, http_port, disk, log)
