"""HiState's module inside ``lmcache server``: takes over eviction and placement, and answers the connector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from lmcache.logging import init_logger
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.mp_observability.otel_init import register_gauge
from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext, server_module_handler
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_histate import __version__
from lmcache_histate.backends import compat
from lmcache_histate.backends.arguments import REMOTE_CREDENTIALS, forget_secrets, settings_digest
from lmcache_histate.backends.directory_setup import make_writer, shared_tier_of
from lmcache_histate.backends.events import BusSubscriber, CpuListener, EventQueue, LowerTierListener
from lmcache_histate.backends.fleet import Fleet
from lmcache_histate.backends.http_api import add_routes
from lmcache_histate.backends.keeper import Keeper
from lmcache_histate.backends.layout import Layouts, Namespace, namespace_of
from lmcache_histate.backends.offers import RemoteOffers
from lmcache_histate.backends.policies import HiStatePrefetchPolicy, HiStateStorePolicy
from lmcache_histate.backends.reconnect import Reconnector
from lmcache_histate.config import Config
from lmcache_histate.protocol import (
    DROP_SNAPSHOTS,
    HELLO,
    PLACEMENT,
    DropSnapshots,
    PlacementQuery,
    ServerFacts,
    encode,
)
from lmcache_histate.state_store.objects import Kind, Tier

logger = init_logger(__name__)


def build_server_module(build: ExtServerModuleBuildContext) -> HiStateServerModule:
    """Factory named by ``--server-module``.

    Args:
        build: LMCache's build context; ``build.config`` is the resolved configuration as JSON (``Config.to_json``).

    Returns:
        The running module.

    Raises:
        compat.CompatError: Another LMCache than the tested one.
        ValueError: Server flags under which LMCache would serve wrong states.
    """
    config = Config.from_json(build.config, os.environ) if build.config else Config()
    secrets = {name: os.environ[name] for name in REMOTE_CREDENTIALS if name in os.environ}
    # LMCache's HTTP port shows the whole environment to anyone who asks.
    forget_secrets(os.environ)
    compat.check_signatures()
    context = build.server_context
    if not context.separate_object_groups:
        raise ValueError(
            "lmcache server must run with --separate-object-groups: with one object group a chunk without a snapshot "
            "is stored as if it had one, and hits return wrong tokens."
        )
    return HiStateServerModule(context, config, settings_digest(build.config), secrets)


class HiStateServerModule:
    """Ties LMCache's storage manager to the core, and serves the ``histate.*`` calls.

    Args:
        context: LMCache's ``MPCacheServerContext``.
        config: The resolved configuration.
        digest: Name of the settings, told to connectors that join.
        secrets: Environment variables that clients of remote tiers read when they are made.
    """

    def __init__(
        self, context: Any, config: Config, digest: str = "", secrets: Mapping[str, str] | None = None
    ) -> None:
        self._context = context
        self._digest = digest
        parts = compat.StorageParts.of(context.storage_manager)
        self._layouts = Layouts(context.layout_desc_registry)
        self._queue = EventQueue()
        adapters = parts.manager.l2_adapters()
        disk = adapters[0] if config.local_disk is not None and adapters else None
        disk_index = disk[0].index if disk is not None else None
        has_remote = any(descriptor.index != disk_index for descriptor, _ in adapters)
        offer = config.histate.offer_to_remote
        store_policy = HiStateStorePolicy(
            disk_index,
            config.histate.write_through,
            config.local_cpu,
            # What is only passing through CPU memory is gone by the end of a turn.
            everything_to_remote=offer == "all" or (offer != "none" and not config.local_cpu),
        )
        self._directory_writer = make_writer(config)
        shared_tier = shared_tier_of(config) if config.histate.directory is not None else ""
        self._keeper = Keeper(
            config,
            parts,
            self._layouts,
            self._queue,
            disk[1] if disk else None,
            context.chunk_size,
            partial(Fleet, writer=self._directory_writer, shared_tier=shared_tier),
            partial(
                RemoteOffers,
                parts=parts,
                layouts=self._layouts,
                disk_index=disk_index,
                announce=store_policy.announce,
                turn_ends=offer == "turn-ends",
            )
            if has_remote and config.local_cpu and offer in ("turn-ends", "shared")
            else None,
        )
        parts.take_over_policies(
            store_policy,
            HiStatePrefetchPolicy(
                self._queue.put, self._keeper.make_room_for, self._kind_of, config.local_cpu, disk_index
            ),
        )
        parts.l1_manager.register_listener(CpuListener(self._queue))
        for descriptor, adapter in adapters:
            self._attach(adapter, Tier.DISK if descriptor.index == disk_index else Tier.REMOTE)
        context.event_bus.register_subscriber(BusSubscriber(self._queue, disk_index))
        for name, value in self._keeper.status().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                register_gauge(
                    "histate", f"histate.{name}", f"HiState: {name.replace('_', ' ')}.", partial(self._figure, name)
                )
        app = compat.http_app()
        if app is not None:
            add_routes(app, self._directory_writer.directory, self._keeper.served)
        self._directory_writer.register_metrics()
        self._directory_writer.start()
        self._keeper.start()
        self._reconnector = Reconnector(parts.manager, partial(self._attach, tier=Tier.REMOTE), secrets or {})
        self._reconnector.start()
        logger.info(
            "HiState %s: interval %s, eviction %s, disk %s",
            __version__,
            config.histate.interval,
            config.histate.eviction,
            config.local_disk or "none",
        )

    @property
    def context(self) -> Any:
        """LMCache's shared server context."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """What LMCache's ``/status`` shows of this module."""
        status = {**self._keeper.status(), **self._directory_writer.status()}
        return {"histate": {"version": __version__, "instance": self._directory_writer.instance, **status}}

    def _attach(self, adapter: L2AdapterInterface, tier: Tier) -> None:
        compat.split_batches_by_size(adapter)
        adapter.register_listener(LowerTierListener(self._queue, tier))

    def _figure(self, name: str) -> float:
        return float(self._keeper.status()[name])

    def close(self) -> None:
        """Stop the controller's thread and give up the lease in the directory."""
        self._reconnector.stop()
        self._keeper.stop()
        self._directory_writer.close()

    def _kind_of(self, key: Any) -> Kind | None:
        layout = self._layouts.of(namespace_of(key))
        return None if layout is None else layout.group_kinds[key.object_group_id]

    # Calls from the connector. Each returns at once: nothing here waits for the controller, a disk, or a lock of L1.

    @server_module_handler(HELLO)
    def hello(self, payload: bytes) -> bytes:
        """``ServerFacts`` of this server."""
        return encode(
            ServerFacts(
                histate_version=__version__,
                lmcache_version=version("lmcache"),
                chunk_size=self._context.chunk_size,
                separate_object_groups=self._context.separate_object_groups,
                null_block_id=self._context.null_block_id,
                settings_digest=self._digest,
            )
        )

    @server_module_handler(PLACEMENT)
    def placement(self, payload: bytes) -> bytes:
        """``PlacementFacts`` for one model."""
        query = msgspec.msgpack.decode(payload, type=PlacementQuery)
        if query.prefill is not None:
            self._keeper.prefilled(query.prefill)
        return encode(self._keeper.placement_facts(query.model_name, query.world_size))

    @server_module_handler(DROP_SNAPSHOTS)
    def drop_snapshots(self, payload: bytes) -> bytes:
        """Remove snapshots that a later one of the same answer replaced."""
        message = msgspec.msgpack.decode(payload, type=DropSnapshots)
        session = self._context.session_manager.get(message.request_id)
        key = session.lookup_ipc_key if session is not None else None
        if session is None or key is None:
            return b""
        chunk = self._context.chunk_size
        hashes = []
        for position in message.positions:
            try:
                hashes.extend(session.get_hashes(position - chunk, position))
            except ValueError:  # the session was recreated with fewer tokens: nothing of ours is left to drop
                continue
        namespace = Namespace(key.model_name, key.world_size, key.cache_salt)
        self._keeper.drop_snapshots(namespace, [TokenHasher.hash_to_bytes(value) for value in hashes])
        return b""


__all__ = ["HiStateServerModule", "build_server_module"]
