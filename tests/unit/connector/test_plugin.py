"""The general plugin: what it puts in the registry, and when it stays out of the way. Each case in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from lmcache_histate.connector.plugin import register
register()
imported = "vllm" in sys.modules
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
cls = KVConnectorFactory._registry["LMCacheMPConnector"]()
print(json.dumps({"connector": cls.__name__, "bases": [base.__name__ for base in cls.__mro__], "imported": imported}))
"""


def run(*environments: dict[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """Run the script once for every environment, all at the same time (importing vLLM is what takes long)."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HISTATE_", "LMCACHE_CONFIG"))}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=base | {"LMCACHE_DISABLE_BANNER": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    finished = []
    for process in started:
        output, errors = process.communicate(timeout=300)
        finished.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return finished


def registered(finished: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert finished.returncode == 0, finished.stderr
    found: dict[str, object] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_switched_on_by_the_environment_alone_and_otherwise_not_there(tmp_path: Path) -> None:
    (tmp_path / "off.yaml").write_text("histate:\n  enabled: false\n")
    on, nothing, off = run({"LMCACHE_CONFIG": "histate"}, {}, {"LMCACHE_CONFIG": str(tmp_path / "off.yaml")})
    assert registered(on)["connector"] == "HiStateConnector"
    assert "LMCacheMPConnector" in registered(on)["bases"]  # type: ignore[operator]
    assert registered(nothing) == {
        "connector": "LMCacheMPConnector",
        "bases": registered(nothing)["bases"],
        "imported": False,
    }
    assert registered(off)["connector"] == "LMCacheMPConnector"
    assert "HiStateConnector" not in registered(off)["bases"]  # type: ignore[operator]


def test_a_configuration_that_cannot_be_read_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache_histate.config import ConfigError
    from lmcache_histate.connector.plugin import register

    monkeypatch.setenv("LMCACHE_CONFIG", "/no/such/file.yaml")
    with pytest.raises(ConfigError, match=r"/no/such/file\.yaml"):
        register()


def test_lmcaches_own_file_without_our_section_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from lmcache_histate.connector.plugin import STOCK_CONNECTOR, register

    (tmp_path / "lmcache.yaml").write_text("chunk_size: 256\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "lmcache.yaml"))
    before = KVConnectorFactory._registry[STOCK_CONNECTOR]
    register()
    assert KVConnectorFactory._registry[STOCK_CONNECTOR] is before


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="histate")
    assert found.value == "lmcache_histate.connector.plugin:register"
