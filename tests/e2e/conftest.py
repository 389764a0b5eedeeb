"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_histate.replay.engine import EngineSettings
from lmcache_histate.replay.processes import cache_folder, unwinding_on_signals
from lmcache_histate.replay.tiny_model import ensure_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _end_in_order_on_sigterm() -> Iterator[None]:
    """A test run that is told to stop unwinds its process scopes first."""
    with unwinding_on_signals():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny hybrid model; built once and kept in the cache folder."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs the `cpu` extra")
    return ensure_tiny_model(cache_folder() / "models" / "tiny")


@pytest.fixture(scope="session")
def engine_settings(tiny_model: Path) -> EngineSettings:
    """An engine without a connector; `dataclasses.replace` and `harness.with_connector` make variants."""
    return EngineSettings(model=tiny_model, blocks=600)
