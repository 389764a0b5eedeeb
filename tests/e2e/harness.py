"""What the end-to-end tests share: a tiny hybrid model, one engine at a time, stock LMCache servers, and comparisons.

Everything starts inside a `ProcessScope`, so a failing or interrupted test leaves no process and no shared memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmcache_histate.replay.cache_server import CacheServer, CacheServerSettings, start_cache_server
from lmcache_histate.replay.engine import EngineProcess, EngineSettings
from lmcache_histate.replay.processes import ProcessScope
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS

FIRST_TEXT_TOKEN = 2
LAST_TEXT_TOKEN = 257


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
