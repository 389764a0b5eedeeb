"""What the end-to-end tests share: a tiny hybrid model, one engine at a time, stock LMCache servers, and comparisons.

Everything starts inside a `ProcessScope`, so a failing or interrupted test leaves no process and no shared memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from lmcache_histate.replay.cache_server import CacheServer, CacheServerSettings, start_cache_server
from lmcache_histate.replay.engine import Completion, EngineProcess, EngineSettings
from lmcache_histate.replay.processes import ProcessScope, free_ports, http_json
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS

FIRST_TEXT_TOKEN = 2
LAST_TEXT_TOKEN = 257

STOCK = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
"""What an existing deployment has; LMCACHE_CONFIG alone makes it HiState."""

LOGPROBS = 5
"""Most likely tokens compared at each position."""


def tokens(count: int, seed: int) -> list[int]:
    """`count` random text tokens of the tiny model; the same for the same seed."""
    source = random.Random(seed)
    return [source.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN) for _ in range(count)]


@contextmanager
def engine(
    folder: Path, settings: EngineSettings, cache_server: CacheServer | None = None, scope: ProcessScope | None = None
) -> Iterator[EngineProcess]:
    """An engine that is ready; stopped in order afterwards.

    Args:
        folder: Receives its log.
        settings: The engine.
        cache_server: Server to wait for before the engine is built.
        scope: Where to start it; a scope of its own if None.
    """
    with ProcessScope() as own:
        process = EngineProcess(scope or own, settings, folder / "engine.log")
        process.connect(cache_server.wait if cache_server is not None else None)
        try:
            yield process
        finally:
            process.stop()


@contextmanager
def cache_server(folder: Path, settings: CacheServerSettings | None = None) -> Iterator[CacheServer]:
    """A stock LMCache server, not waited for; one GiB of memory and no disk unless told otherwise."""
    with ProcessScope() as scope:
        yield start_cache_server(
            scope, folder, settings or CacheServerSettings(chunk_tokens=BLOCK_TOKENS, memory_bytes=1 << 30)
        )


def with_connector(
    settings: EngineSettings, name: str, module: str, extra: Mapping[str, Any] | None = None
) -> EngineSettings:
    """The same engine with a KV connector.

    Args:
        settings: The engine.
        name: Class of the connector.
        module: Module of the connector.
        extra: Its `kv_connector_extra_config`.
    """
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra or {}),
    }
    return replace(settings, kv_transfer=transfer)


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait for what the server does on its own."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


class Cache:
    """One HiState configuration: its file, its server's HTTP port."""

    def __init__(self, folder: Path, **histate: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port, self.http_port = free_ports(2)
        self.file = folder / "cache.yaml"
        self.file.write_text(
            yaml.safe_dump(
                {
                    "max_local_cpu_size": "1GiB",
                    "local_disk": str(folder / "disk"),
                    "max_local_disk_size": "1GiB",
                    "server_url": f"tcp://localhost:{self.port}",
                    "http_port": self.http_port,
                    "histate": histate,
                }
            )
        )

    def engine(self, settings: EngineSettings) -> EngineSettings:
        """An engine that names stock LMCache's connector and gets HiState by environment alone."""
        return replace(
            settings, kv_transfer=STOCK, environment={**settings.environment, "LMCACHE_CONFIG": str(self.file)}
        )

    def status(self) -> dict[str, Any]:
        """HiState's part of the server's status."""
        return find_histate(http_json(f"http://localhost:{self.http_port}/status"))

    def clear(self) -> None:
        """Empty every tier."""
        http_json(f"http://localhost:{self.http_port}/cache/clear", body={})


def find_histate(value: Any) -> dict[str, Any]:
    """The ``histate`` object anywhere in LMCache's nested status."""
    if isinstance(value, dict):
        if isinstance(value.get("histate"), dict):
            return value["histate"]
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        if found := find_histate(item):
            return found
    return {}


def generate(engine: EngineProcess, prompt: list[int], count: int = 8) -> Completion:
    """One request alone; vLLM's own prefix cache is emptied first, so that hits are the connector's."""
    assert eventually(engine.reset_prefix_cache)
    return engine.generate([prompt], count, logprobs=LOGPROBS)[0]
