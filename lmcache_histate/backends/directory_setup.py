"""The directory that a configuration asks for."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

import xxhash

from lmcache_histate.backends.directory_writer import DirectoryWriter
from lmcache_histate.config import Config
from lmcache_histate.state_store.directory.local import LocalDirectory
from lmcache_histate.state_store.directory.protocol import Directory, shared_tier_name
from lmcache_histate.state_store.directory.url import parse_directory_url

MAX_TIER_NAME = 120
"""Bytes of a shared tier's name that are kept as they are; a longer one is shown by its hash."""


def instance_name(config: Config) -> str:
    """The name of this server in the directory: ``histate.instance``, else host name and port.

    The port is that of the first endpoint of ``server_url``; a server started by hand has only its own there.
    """
    return config.histate.instance or f"{socket.gethostname()}:{config.endpoints[0].port}"


def shared_tier_of(config: Config) -> str:
    """Name of the tier that all instances with the same remote settings share; empty when there is none.

    Several remote tiers are one to the core, so then all of them must be shared: an object of ``l2_adapters`` is if it says
    ``"shared": true``, as in LMCache.
    """
    names = [shared_tier_name(config.remote_url)] if config.remote_url is not None else []
    for adapter in config.l2_adapters:
        if not adapter.get("shared"):
            return ""
        names.append(_adapter_name(adapter))
    name = "+".join(names)
    if len(name.encode()) > MAX_TIER_NAME:
        name = f"shared:{xxhash.xxh3_64_hexdigest(name.encode())}"
    return name


def _adapter_name(adapter: Mapping[str, Any]) -> str:
    """Equal for equal adapters; a hash, since they may hold passwords."""
    text = json.dumps(adapter, sort_keys=True, separators=(",", ":"))
    return f"shared:{adapter['type']}:{xxhash.xxh3_64_hexdigest(text.encode())}"


def make_directory(config: Config) -> Directory:
    """The directory of this server: in Redis, or its own when ``histate.directory`` is not set. Connects to nothing yet.

    Raises:
        ValueError: The redis package is missing.
    """
    name, settings = instance_name(config), config.histate
    if settings.directory is None:
        return LocalDirectory(name, settings.instance_address)
    try:
        from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
    except ModuleNotFoundError as error:
        raise ValueError(
            f"histate.directory needs the Python package {error.name}: pip install 'lmcache-histate[redis]', or remove the "
            "setting."
        ) from None
    return RedisDirectory(
        parse_directory_url(settings.directory),
        name,
        settings.instance_address,
        shared_tier_of(config),
        settings.directory_lease,
    )


def make_writer(config: Config) -> DirectoryWriter:
    """The thread that talks to the directory, not started yet. Raises as `make_directory` does."""
    return DirectoryWriter(make_directory(config), instance_name(config))
