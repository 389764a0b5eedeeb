"""Fixtures of the storage tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage import MIB, Storage, hybrid_config


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """Start storages; all are closed afterwards."""
    running: list[Storage] = []

    def begin(cpu_gib: float = 64 * MIB, disk: bool = True, **options: Any) -> Storage:
        world_size = options.pop("world_size", 1)
        registered = options.pop("registered", True)
        hybrid = options.pop("hybrid", True)
        disk_gib = options.pop("disk_gib", 0.25)
        folder = options.pop("folder", tmp_path / "disk")
        config = hybrid_config(folder if disk else None, cpu_gib, disk_gib, **options)
        running.append(Storage(config, world_size, registered, hybrid))
        return running[-1]

    yield begin
    for storage in running:
        storage.close()
