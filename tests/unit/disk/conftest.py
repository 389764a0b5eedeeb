"""Stores in a fresh folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_boxes import MIB, Box

from lmcache_histate.backends.disk.settings import StoreConfig
from lmcache_histate.backends.disk.store import DiskStore


@pytest.fixture
def open_box(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    """Opens stores in one folder, with defaults that suit a test; those still open at the end are closed."""
    opened: list[DiskStore] = []

    def open_one(**settings: object) -> Box:
        values: dict[str, object] = {
            "root": tmp_path / "store",
            "capacity_bytes": 64 * MIB,
            "min_free_bytes": 0,
            "sync": False,
            **settings,
        }
        removed: list[object] = []
        box = Box(DiskStore(StoreConfig(**values), removed.extend))  # type: ignore[arg-type]
        box.removed = removed  # type: ignore[attr-defined]
        opened.append(box.store)
        return box

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def box(open_box: Callable[..., Box]) -> Box:
    return open_box()
