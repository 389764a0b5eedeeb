"""The name by which a connector tells whether the server it joins runs with its own settings."""

from __future__ import annotations

import json

from lmcache_histate.backends.arguments import server_module_spec, settings_digest
from lmcache_histate.config import Config


def digest(**values: object) -> str:
    settings = server_module_spec(Config(**values), 64)["config"]
    return settings_digest(json.loads(json.dumps(settings)))  # as it reaches the server, through its command line


def test_equal_settings_have_one_name() -> None:
    assert digest(max_local_cpu_size="2GiB") == digest(max_local_cpu_size=2)


def test_what_the_server_does_changes_the_name() -> None:
    assert digest(histate={"eviction": "lru"}) != digest()
    assert digest(max_local_cpu_size=3) != digest()


def test_what_only_the_connector_reads_does_not() -> None:
    assert digest(histate={"interval": 512, "autostart_timeout": 5}) == digest()
    assert digest(http_port=9999) == digest()
