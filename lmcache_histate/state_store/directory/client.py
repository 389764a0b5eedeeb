"""The connection to the server: one call that runs a script, and errors in our words."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from lmcache_histate.state_store.directory.protocol import (
    AccessDenied,
    DirectoryError,
    OutOfMemory,
    Unreachable,
    Unusable,
)
from lmcache_histate.state_store.directory.url import DirectoryAddress, Topology

T = TypeVar("T")
Argument = bytes | str | int

_PASSING = ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED")
"""Error codes of a server that may answer a moment later."""
_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM")


class Script:
    """A script and the name that the server knows it by."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Client:
    """A connection that is made at the first call and again after it broke. One thread at a time.

    Args:
        address: of the server.
        timeout_s: seconds to wait for a connection, and for an answer.
    """

    def __init__(self, address: DirectoryAddress, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._redis: Any = None
        self.round_trips = 0
        """Requests sent and waited for."""

    def run(self, script: Script, key: str, *arguments: Argument) -> Any:
        """Run a script on the slot of `key`: one round trip, two the first time after the server started.

        Raises:
            DirectoryError: one of its subclasses.
        """

        def call(server: Any) -> Any:
            self.round_trips += 1
            try:
                return server.evalsha(script.sha, 1, key, *arguments)
            except NoScriptError:
                self.round_trips += 1
                return server.eval(script.text, 1, key, *arguments)

        return self._guarded(call)

    def pipeline(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Answers of some commands, which need not be atomic: one round trip for each node concerned.

        Raises:
            DirectoryError: one of its subclasses.
        """

        def call(server: Any) -> list[Any]:
            self.round_trips += 1
            pipe: Any = server.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = pipe.execute()
            return answers

        return self._guarded(call)

    def close(self) -> None:
        """Disconnect."""
        server, self._redis = self._redis, None
        if server is not None:
            with contextlib.suppress(RedisError, OSError):  # it is gone already
                server.close()

    def _guarded(self, call: Callable[[Any], T]) -> T:
        where = str(self._address)
        try:
            if self._redis is None:
                self._redis = self._connect()
            return call(self._redis)
        except (RedisError, OSError) as error:
            translated = translate(error, where)
            if isinstance(translated, Unreachable | AccessDenied):
                self.close()
            raise translated from error

    def _connect(self) -> Any:
        address = self._address
        common: dict[str, Any] = {
            "username": address.username or None,
            "password": address.password or None,
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "client_name": "histate-directory",
        }
        if address.tls:
            named = {"ssl_ca_certs": "ca_file", "ssl_certfile": "cert_file", "ssl_keyfile": "key_file"}
            files = {key: address.options[option] for key, option in named.items() if option in address.options}
            common |= {"ssl": True, **files}
        if address.topology is Topology.CLUSTER:
            node: Any = ClusterNode
            return RedisCluster(startup_nodes=[node(host, port) for host, port in address.nodes], **common)
        if address.topology is Topology.SENTINEL:
            own = {"username": "sentinel_user", "password": "sentinel_password"}
            for_sentinels = {key: value for key, value in common.items() if key not in own}
            for_sentinels |= {key: address.options[option] for key, option in own.items() if option in address.options}
            watch: Any = Sentinel
            sentinel = watch(list(address.nodes), sentinel_kwargs=for_sentinels, **common)
            return sentinel.master_for(address.service, db=address.database)
        host, port = address.nodes[0]
        return redis.Redis(host, port, address.database, **common)


def translate(error: Exception, where: str) -> DirectoryError:
    """An error of the client library in the directory's words; `where` names the server without a password."""
    text = str(error).replace("\n", " ")
    code = text.split(" ", 1)[0]
    refused = isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError) or code in _DENIED
    if refused or "The user executing the script can't" in text:
        return AccessDenied(f"{where} refuses the user or password, or that user's rights: {text}")
    if isinstance(error, MasterNotFoundError):
        return Unreachable(f"{where}: the Sentinels name no master: {text}")
    if isinstance(error, TimeoutError):
        return Unreachable(f"{where} does not answer: {text}")
    if isinstance(error, ConnectionError | OSError) or code in _PASSING:
        return Unreachable(f"{where} cannot be reached: {text}")
    if isinstance(error, OutOfMemoryError) or "OOM " in text:
        return OutOfMemory(f"{where} is out of memory: {text}")
    if isinstance(error, ReadOnlyError):
        return Unreachable(f"{where} is a replica at the moment, which takes no data: {text}")
    if isinstance(error, MovedError):
        return Unusable(
            f"{where} is a node of a cluster: write redis+cluster:// (rediss+cluster:// with TLS) in the URL"
        )
    if isinstance(error, ResponseError | InvalidResponse):
        return Unusable(f"{where} answers, but cannot serve as a directory: {text}")
    return Unreachable(f"{where}: {type(error).__name__}: {text}")
