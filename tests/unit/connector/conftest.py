"""Settings that every test here shares: no environment of the developer's, no server, no banner."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop whatever configures HiState outside the test, and never start a server."""
    for name in list(os.environ):
        if name.startswith("HISTATE_") or name in ("LMCACHE_CONFIG", "LMCACHE_CONFIG_FILE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HISTATE_AUTOSTART", "false")
