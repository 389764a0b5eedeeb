"""Probing a server at start-up must not get in the way of the clients that come after."""

from __future__ import annotations

import socket

import zmq
from lmcache.integration.vllm import mp_server_launcher

from lmcache_histate.connector.health_probe import probes_in_own_context


def nobody() -> str:
    """The address of a server that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


class CountingContext(zmq.Context):
    """A context that counts the sockets made in it."""

    made = 0

    def socket(self, *args, **kwargs):
        CountingContext.made += 1
        return super().socket(*args, **kwargs)


def test_a_probe_leaves_the_context_of_the_lasting_clients_alone() -> None:
    with CountingContext() as shared:
        shared.setsockopt(zmq.LINGER, 0)
        with probes_in_own_context():
            assert not mp_server_launcher.is_mp_server_healthy(nobody(), shared, 0.01)
        assert CountingContext.made == 0
        # What it is for: stock LMCache makes a socket and its monitor there.
        assert not mp_server_launcher.is_mp_server_healthy(nobody(), shared, 0.01)
        assert CountingContext.made == 2


def test_the_stock_probe_comes_back() -> None:
    stock = mp_server_launcher.is_mp_server_healthy
    with probes_in_own_context():
        assert mp_server_launcher.is_mp_server_healthy is not stock
    assert mp_server_launcher.is_mp_server_healthy is stock
