"""LMCache's start-up probes, kept from breaking the start-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from lmcache.integration.vllm import mp_server_launcher


@contextmanager
def probes_in_own_context() -> Iterator[None]:
    """Let ``mp_server_launcher.is_mp_server_healthy`` open its short-lived client in a ZMQ context of its own.

    LMCache probes in the context that its lasting clients share. Each client has a monitor, named after a file
    descriptor of its socket; ZMQ closes both in the background, the name last, so the next client may get the same
    descriptor, and then fails with "Address already in use". Names of different contexts cannot meet.
    """
    stock = mp_server_launcher.is_mp_server_healthy

    def probe(server_url: str, zmq_context: zmq.Context[zmq.Socket[bytes]], *timeout: float) -> bool:
        own = zmq.Context()
        own.setsockopt(zmq.LINGER, 0)  # a probe that was never answered must not hold up the end of the context
        try:
            return bool(stock(server_url, own, *timeout))
        finally:
            own.term()

    mp_server_launcher.is_mp_server_healthy = probe
    try:
        yield
    finally:
        mp_server_launcher.is_mp_server_healthy = stock
