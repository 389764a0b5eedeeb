"""A remote tier is used again when its server comes back: LMCache's Redis client never connects a second time."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping

from lmcache.logging import init_logger
from lmcache.v1.distributed.config import unwrap_l2_adapter_config
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.storage_controllers.utils import L2AdapterDescriptor
from lmcache.v1.distributed.storage_manager import StorageManager

from lmcache_histate.backends import compat

logger = init_logger(__name__)

CHECK_SECONDS = 5.0
"""Pause between two looks at the remote tiers."""
ANSWER_SECONDS = 2.0
"""How long a server may take to accept a connection."""


class Reconnector:
    """Replaces adapters whose client lost its server by new ones, once the server answers.

    In a thread of its own, since LMCache's calls for that wait for what is on its way.

    Args:
        manager: LMCache's storage manager.
        attach: Called with every new adapter.
        secrets: Environment variables that a client reads when it is made, gone from the environment since.
    """

    def __init__(
        self, manager: StorageManager, attach: Callable[[L2AdapterInterface], None], secrets: Mapping[str, str]
    ) -> None:
        self._manager = manager
        self._attach = attach
        self._secrets = dict(secrets)
        self._lost: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="histate-reconnect", daemon=True)

    def start(self) -> None:
        """Start the thread, if any adapter can lose its server."""
        if any(compat.connection_is_lost(adapter) is not None for _, adapter in self._manager.l2_adapters()):
            self._thread.start()

    def stop(self) -> None:
        """Stop it after the adapter in hand."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60.0)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_SECONDS):
            for descriptor, adapter in self._manager.l2_adapters():
                if compat.connection_is_lost(adapter):
                    try:
                        self._mend(descriptor)
                    except Exception:
                        # Requests go on without the tier; the next look may find it in a better state.
                        logger.exception("HiState could not replace the adapter of a remote tier")

    def _mend(self, descriptor: L2AdapterDescriptor) -> None:
        config = unwrap_l2_adapter_config(descriptor.config)
        host, port = getattr(config, "host", ""), getattr(config, "port", 0)
        if not host or not port:
            return
        if descriptor.index not in self._lost:
            self._lost.add(descriptor.index)
            logger.warning("The remote tier at %s:%d does not answer; requests go on without it", host, port)
        try:
            socket.create_connection((host, port), ANSWER_SECONDS).close()
        except OSError:
            return
        os.environ.update(self._secrets)
        try:
            index = self._manager.add_l2_adapter(descriptor.config)
        finally:
            for name in self._secrets:
                os.environ.pop(name, None)
        self._attach({each.index: adapter for each, adapter in self._manager.l2_adapters()}[index])
        self._manager.delete_l2_adapter(descriptor.index)
        logger.info("The remote tier at %s:%d answers again and is used again", host, port)
