"""Calls from the vLLM scheduler to HiState's server module. Only ``hello`` waits, and only at start-up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from lmcache_histate.connector.guards import StartupError
from lmcache_histate.protocol import (
    DROP_SNAPSHOTS,
    HELLO,
    PLACEMENT,
    DropSnapshots,
    PlacementFacts,
    PlacementQuery,
    PrefillTime,
    ServerFacts,
    encode,
)

logger = logging.getLogger(__name__)


class ServerLink:
    """One scheduler's line to every LMCache server it uses.

    Args:
        adapter: LMCache's ``LMCacheMPSchedulerAdapter``.
        hello_timeout: Seconds that start-up waits for a server's answer.
    """

    def __init__(self, adapter: Any, hello_timeout: float = 20.0) -> None:
        self._adapter = adapter
        self._hello_timeout = hello_timeout
        self._placement: Any = None

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return list(self._adapter.req_clients)

    def hello(self) -> Iterator[tuple[str, ServerFacts]]:
        """Ask every server what it is.

        Raises:
            StartupError: A server that does not run HiState's module.
        """
        for url, client in self._adapter.req_clients.items():
            facts = None
            try:
                reply = client.server_module_call(ServerModuleCallRequest(HELLO, b"")).result(self._hello_timeout)
                error = reply.error
                if reply.success:
                    facts = msgspec.msgpack.decode(reply.payload, type=ServerFacts)
            except Exception as exc:  # an unknown request type, a timeout, another version: no module of ours there
                error = str(exc) or type(exc).__name__
            if facts is None:
                raise StartupError(
                    f"The LMCache server at {url} runs without HiState ({error}). Start it with `histate server`, or "
                    "stop it and let vLLM start its own (histate.autostart: true)."
                )
            yield url, facts

    def poll_placement(self) -> PlacementFacts | None:
        """The answer to the last ``ask_placement``, once; None while there is none. Never waits."""
        if self._placement is None or not self._placement.query():
            return None
        future, self._placement = self._placement, None
        try:
            reply = future.result(0)
            return msgspec.msgpack.decode(reply.payload, type=PlacementFacts) if reply.success else None
        except Exception:
            logger.debug("No placement facts from the server", exc_info=True)
            return None

    def ask_placement(self, prefill: PrefillTime | None) -> bool:
        """Send one question about storage pressure to the first server, unless one is still open. Never waits.

        Args:
            prefill: What the server is told with it; lost if nothing can be sent.

        Returns:
            Whether a question was sent.
        """
        if self._placement is not None or not self._adapter.is_healthy:
            return False
        query = PlacementQuery(self._adapter.model_name, self._adapter.world_size, prefill)
        client = next(iter(self._adapter.req_clients.values()))
        self._placement = self._send(client, PLACEMENT, encode(query))
        return self._placement is not None

    def forget_placement(self) -> None:
        """Give up on an open question (its server went away)."""
        self._placement = None

    def drop_snapshots(self, request_id: str, positions: Sequence[int]) -> None:
        """Tell the servers that these snapshots of a running request were replaced. Fire and forget."""
        if not self._adapter.is_healthy:
            return
        message = encode(DropSnapshots(request_id, tuple(positions)))
        for client in self._adapter.req_clients.values():
            self._send(client, DROP_SNAPSHOTS, message)

    @staticmethod
    def _send(client: Any, method: str, payload: bytes) -> Any | None:
        """Send without waiting. A transport in trouble must not reach vLLM's scheduler: the cache is optional."""
        try:
            return client.server_module_call(ServerModuleCallRequest(method, payload))
        except Exception:
            logger.debug("%s was not sent", method, exc_info=True)
            return None
