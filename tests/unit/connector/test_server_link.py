"""What the connector asks the server, and what becomes of silence, errors and answers of another version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest, ServerModuleCallResponse

from lmcache_histate.connector.guards import StartupError
from lmcache_histate.connector.server_link import ServerLink
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

FACTS = ServerFacts("0.1.0", "0.5.6", 64, True, 0)


class Client:
    """One server: keeps what it was asked; the test decides when and what it answers."""

    def __init__(self, *, answer: bytes | Exception | None = None) -> None:
        self.calls: list[ServerModuleCallRequest] = []
        self.futures: list[MessagingFuture[ServerModuleCallResponse]] = []
        self._answer = answer

    def server_module_call(self, request: ServerModuleCallRequest) -> MessagingFuture[ServerModuleCallResponse]:
        self.calls.append(request)
        future: MessagingFuture[ServerModuleCallResponse] = MessagingFuture()
        self.futures.append(future)
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer is not None:
            future.set_result(ServerModuleCallResponse(True, self._answer, ""))
        return future


def link(*clients: Client, healthy: bool = True) -> ServerLink:
    adapter: Any = SimpleNamespace(
        req_clients={f"tcp://cache{index}:5555": client for index, client in enumerate(clients)},
        is_healthy=healthy,
        model_name="model",
        world_size=2,
    )
    return ServerLink(adapter, hello_timeout=0.01)


def answer(client: Client, payload: bytes, success: bool = True) -> None:
    client.futures[-1].set_result(ServerModuleCallResponse(success, payload, "" if success else "no such method"))


def test_hello_asks_every_server() -> None:
    clients = Client(answer=encode(FACTS)), Client(answer=encode(FACTS))
    tested = link(*clients)
    assert list(tested.hello()) == [("tcp://cache0:5555", FACTS), ("tcp://cache1:5555", FACTS)]
    assert tested.urls == ["tcp://cache0:5555", "tcp://cache1:5555"]
    assert [client.calls[0].method for client in clients] == [HELLO, HELLO]


@pytest.mark.parametrize(
    "reply",
    [None, RuntimeError("unknown request type"), b"\xc1", msgspec.msgpack.encode({"histate_version": "0.1.0"})],
    ids=["silence", "error", "not msgpack", "another version"],
)
def test_a_server_without_our_module_stops_the_engine_with_the_remedy(reply: bytes | Exception | None) -> None:
    with pytest.raises(StartupError, match="histate server") as refused:
        list(link(Client(answer=reply)).hello())
    assert "tcp://cache0:5555" in str(refused.value)
    assert "histate.autostart" in str(refused.value)


def test_a_module_that_refuses_stops_the_engine_with_its_reason() -> None:
    client = Client()
    call = client.server_module_call

    def refusing(request: ServerModuleCallRequest) -> MessagingFuture[ServerModuleCallResponse]:
        future = call(request)
        answer(client, b"", success=False)
        return future

    client.server_module_call = refusing  # type: ignore[method-assign]
    with pytest.raises(StartupError, match="no such method"):
        list(link(client).hello())


def test_a_placement_answer_is_given_once() -> None:
    client = Client()
    tested = link(client)
    assert tested.poll_placement() is None
    assert tested.ask_placement(None)
    assert tested.poll_placement() is None
    facts = PlacementFacts(2.0, 192.0, 0.1)
    answer(client, encode(facts))
    assert tested.poll_placement() == facts
    assert tested.poll_placement() is None
    query = msgspec.msgpack.decode(client.calls[0].payload, type=PlacementQuery)
    assert (client.calls[0].method, query) == (PLACEMENT, PlacementQuery("model", 2))


def test_a_question_tells_what_prefill_costs() -> None:
    client = Client()
    assert link(client).ask_placement(PrefillTime(1024, 3072, 250.0))
    query = msgspec.msgpack.decode(client.calls[0].payload, type=PlacementQuery)
    assert query.prefill == PrefillTime(1024, 3072, 250.0)


def test_one_question_at_a_time_until_it_is_answered_or_given_up() -> None:
    client = Client()
    tested = link(client)
    assert tested.ask_placement(None)
    assert not tested.ask_placement(None)
    tested.forget_placement()
    assert tested.ask_placement(None)
    answer(client, encode(PlacementFacts()))
    assert tested.poll_placement() == PlacementFacts()
    assert tested.ask_placement(None)
    assert len(client.calls) == 3


def test_only_the_first_server_is_asked_and_none_while_unhealthy() -> None:
    first, second = Client(), Client()
    assert link(first, second).ask_placement(None)
    assert (len(first.calls), len(second.calls)) == (1, 0)
    assert not link(first, healthy=False).ask_placement(None)
    assert len(first.calls) == 1


@pytest.mark.parametrize("kind", ["refused", "failed", "garbage"])
def test_a_useless_answer_is_dropped_and_the_next_question_possible(kind: str) -> None:
    client = Client()
    tested = link(client)
    tested.ask_placement(None)
    if kind == "failed":
        client.futures[-1].set_exception(RuntimeError("gone"))
    else:
        answer(client, b"\xc1", success=kind == "garbage")
    assert tested.poll_placement() is None
    assert tested.ask_placement(None)


def test_replaced_snapshots_are_reported_to_every_server() -> None:
    clients = Client(), Client()
    link(*clients).drop_snapshots("r", [128, 192])
    for client in clients:
        assert client.calls[0].method == DROP_SNAPSHOTS
        message = msgspec.msgpack.decode(client.calls[0].payload, type=DropSnapshots)
        assert message == DropSnapshots("r", (128, 192))
    link(*clients, healthy=False).drop_snapshots("r", [256])
    assert len(clients[0].calls) == 1
