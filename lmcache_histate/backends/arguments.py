"""From a configuration to the command lines and connector settings that it becomes. Imports no lmcache.

Everything here is a pure function of the configuration, so that ``histate config`` can show exactly what
``histate server`` and the connector will do.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, MutableMapping
from typing import Any

import xxhash

from lmcache_histate.config import Config
from lmcache_histate.config.remote import remote_adapter
from lmcache_histate.config.values import strip_credentials
from lmcache_histate.state_store.directory.url import parse_directory_url

CONNECTOR_NAME = "HiStateConnector"
CONNECTOR_MODULE = "lmcache_histate.connector.histate_connector"
SERVER_MODULE = "lmcache_histate.backends.server_module"
SERVER_FACTORY = "build_server_module"
SERVER_SETTINGS = ("local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size", "remote_url")
CLIENT_SETTINGS = (
    "enabled",
    "interval",
    "save_answers",
    "autostart",
    "autostart_timeout",
    "allow_untested_versions",
)
"""Settings of the ``histate:`` section that only the connector reads."""

REMOTE_CREDENTIALS = ("LMCACHE_RESP_USERNAME", "LMCACHE_RESP_PASSWORD")
"""Environment variables that LMCache's Redis client reads when it is made."""

SECRET_VARIABLES = (
    *REMOTE_CREDENTIALS,
    "HISTATE_DIRECTORY",
    "HISTATE_REMOTE_URL",
    "HISTATE_L2_ADAPTERS",
)
"""Environment variables that may hold passwords."""


def server_arguments(config: Config, chunk_size: int) -> list[str]:
    """The flags of ``lmcache server`` for `config`, except host, port and HTTP host, which autostart forbids.

    `chunk_size` is the model's block size in tokens. Passwords of ``remote_url`` and ``histate.directory`` are not
    among the flags (any user of the machine can read command lines): give the server's process
    :func:`server_environment` as well. Raises ``ValueError`` when `chunk_size` is not positive.
    """
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be a positive number of tokens, not {chunk_size}")
    arguments = [
        "--chunk-size",
        str(chunk_size),
        # Without it a chunk that has no snapshot is stored as if it had one, and a hit returns wrong tokens.
        "--separate-object-groups",
        "--l1-size-gb",
        _decimal(config.max_local_cpu_size),
        # HiState runs its own eviction: LMCache's looks at single objects and would tear a prefix apart.
        "--eviction-policy",
        "noop",
        # LMCache's idle loop would otherwise log once a second that it is about to evict.
        "--eviction-trigger-watermark",
        "1.0",
        "--http-port",
        str(config.http_port),
    ]
    if not config.local_cpu:
        arguments += ["--l2-store-policy", "skip_l1"]
    for spec in adapter_specs(config):
        arguments += ["--l2-adapter", _json(spec)]
    arguments += ["--server-module", _json(server_module_spec(config, chunk_size))]
    return arguments + list(config.server_args)


def adapter_specs(config: Config) -> list[dict[str, Any]]:
    """The L2 adapters in LMCache's order of preference: local disk, ``remote_url``, ``l2_adapters``."""
    specs = []
    if config.local_disk is not None:
        specs.append(disk_adapter_spec(config))
    if config.remote_url is not None:
        spec = remote_adapter(config.remote_url)
        if spec["type"] == "valkey":
            # Unlike LMCache's Redis client, its Valkey client reads no credentials from the environment.
            user, password = config.remote_credentials()
            spec |= {name: text for name, text in (("username", user), ("password", password)) if text}
        specs.append(spec)
    return specs + list(config.l2_adapters)


def disk_adapter_spec(config: Config) -> dict[str, Any]:
    """The L2 adapter that serves ``local_disk``, as an ``--l2-adapter`` object.

    Raises ``ValueError`` when `config` has no local disk.
    """
    if config.local_disk is None:
        raise ValueError("this configuration has no local_disk")
    return {
        "type": "plugin",
        "module_path": "lmcache_histate.backends.disk.adapter",
        "class_name": "HiStateDiskAdapter",
        "config_class_name": "HiStateDiskConfig",
        "adapter_params": {
            "base_path": config.local_disk,
            "max_capacity_gb": config.max_local_disk_size,
            **({"shared": True} if config.histate.local_disk_shared else {}),
        },
    }


def server_module_spec(config: Config, chunk_size: int) -> dict[str, Any]:
    """The ``--server-module`` object: HiState's factory and the resolved configuration as plain JSON.

    ``config`` in it is what ``Config.from_json`` reads back, with `chunk_size` in tokens in place of ``auto``, and
    without the passwords of ``remote_url`` and ``histate.directory``.
    """
    settings = config.to_json()
    settings["chunk_size"] = chunk_size
    # Flags and adapters have reached LMCache on their own; repeating them would only lengthen the command line.
    del settings["server_args"]
    settings["l2_adapters"] = [{"type": spec["type"]} for spec in config.l2_adapters]
    if config.remote_url is not None:
        settings["remote_url"] = strip_credentials(config.remote_url)
    if config.histate.directory is not None:
        settings["histate"]["directory"] = _public_directory(config.histate.directory)
    return {"module_path": SERVER_MODULE, "factory_name": SERVER_FACTORY, "config": settings}


def settings_digest(settings: Mapping[str, Any]) -> str:
    """A short name for the settings that a server's behaviour depends on, to tell two servers apart.

    `settings` is ``config`` of :func:`server_module_spec`: the connector compares its own with that of the server it joins.
    """
    server_side = {name: settings.get(name) for name in SERVER_SETTINGS}
    server_side["histate"] = {
        name: value for name, value in settings.get("histate", {}).items() if name not in CLIENT_SETTINGS
    }
    return xxhash.xxh3_64_hexdigest(_json(server_side).encode())


def server_environment(config: Config) -> dict[str, str]:
    """Environment variables for the server's process: the passwords that do not belong on a command line.

    A connector that lets LMCache start the server puts them into its own environment first (the child inherits it).
    """
    environment = {}
    user, password = config.remote_credentials()
    if config.remote_url is not None and remote_adapter(config.remote_url)["type"] == "resp":
        if user:
            environment["LMCACHE_RESP_USERNAME"] = user
        if password:
            environment["LMCACHE_RESP_PASSWORD"] = password
    directory = config.histate.directory
    if directory is not None and _public_directory(directory) != directory:
        environment["HISTATE_DIRECTORY"] = directory
    return environment


def _public_directory(directory: str) -> str:
    """``histate.directory`` as it may be shown: itself, or only where the server is when it holds a user or password."""
    address = parse_directory_url(directory)
    secret = address.username or address.password or any(name.startswith("sentinel_") for name in address.options)
    return str(address) if secret else directory


def forget_secrets(environ: MutableMapping[str, str]) -> None:
    """Remove from `environ` the variables in which passwords travel.

    For the server's process, once its tiers are connected and its configuration is read: LMCache's HTTP interface
    shows the environment to anyone who can reach the port.
    """
    for name in SECRET_VARIABLES:
        environ.pop(name, None)


def connector_extra_config(config: Config, chunk_size: int) -> dict[str, Any]:
    """The ``lmcache.mp.*`` keys of vLLM's ``kv_connector_extra_config`` for `config`.

    `chunk_size` is the model's block size in tokens. When the result asks for autostart, the caller's environment must
    hold :func:`server_environment`. Raises ``ValueError`` when `chunk_size` is not positive.
    """
    endpoints = config.endpoints
    extra: dict[str, Any] = {}
    if len(endpoints) == 1:
        extra["lmcache.mp.host"] = endpoints[0].url.rpartition(":")[0]
        extra["lmcache.mp.port"] = endpoints[0].port
    else:
        extra["lmcache.mp.server_urls"] = [endpoint.url for endpoint in endpoints]
    extra["lmcache.mp.save_decode_cache"] = config.histate.save_answers
    extra["lmcache.mp.autostart"] = config.starts_server
    if config.starts_server:
        extra["lmcache.mp.autostart.server_args"] = shlex.join(server_arguments(config, chunk_size))
        extra["lmcache.mp.autostart.wait_timeout"] = config.histate.autostart_timeout
    return extra


def vllm_arguments(config: Config) -> list[str]:
    """The flags that a vLLM command needs for HiState, beside the model's own.

    Empty when `config` switches HiState off.
    """
    if not config.histate.enabled:
        return []
    transfer = {
        "kv_connector": CONNECTOR_NAME,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
    }
    # vLLM leaves prefix caching off for hybrid models unless it is asked for.
    return ["--enable-prefix-caching", "--kv-transfer-config", _json(transfer)]


def _json(value: Any) -> str:
    """JSON in one line; ASCII only, so that no locale can damage it on its way through a process's arguments."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _decimal(number: float) -> str:
    """A float without exponent and without a needless ``.0``."""
    return f"{number:.9f}".rstrip("0").rstrip(".")
