"""Addresses of a directory server.

    redis://[user:password@]host[:port][/database]                   one server; rediss:// with TLS
    redis+sentinel://[user:password@]host[:port],host.../service[/database]   the master that Sentinels name
    redis+cluster://[user:password@]host[:port],host...              Redis Cluster

`valkey` may stand for `redis` in each, and `rediss+sentinel`, `rediss+cluster` use TLS. Options after `?`: `ca_file`,
`cert_file`, `key_file` (PEM, for TLS), for Sentinels that want a password of their own `sentinel_user` and
`sentinel_password`, and `prefix`, with which all keys begin (`histate`): fleets with other prefixes do not see each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qsl, unquote

EXAMPLE = "redis://meta:6379/0"
_EXAMPLES = (
    f"{EXAMPLE}, rediss://user:password@meta:6380, redis+sentinel://s1,s2,s3/mymaster or redis+cluster://n1,n2,n3"
)
_OPTIONS = ("prefix", "ca_file", "cert_file", "key_file", "sentinel_user", "sentinel_password")
_DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379


class Topology(Enum):
    """How the server is reached."""

    SINGLE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class DirectoryAddress:
    """A parsed address. Its text form shows no password.

    Attributes:
        topology: one server, Sentinels or a cluster.
        nodes: (host, port) of the server, the Sentinels or some nodes of the cluster.
        database: number of the database; 0 in a cluster.
        service: name of the master that the Sentinels watch.
        tls: whether connections use TLS.
        username: ACL user; empty for the default one.
        password: empty for none.
        options: what followed `?`.
    """

    topology: Topology
    nodes: tuple[tuple[str, int], ...]
    database: int = 0
    service: str = ""
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def prefix(self) -> str:
        """What all keys begin with."""
        return self.options.get("prefix", "histate")

    def __str__(self) -> str:
        scheme = ("rediss" if self.tls else "redis") + (f"+{self.topology.value}" if self.topology.value else "")
        hosts = ",".join(f"{f'[{host}]' if ':' in host else host}:{port}" for host, port in self.nodes)
        path = "/".join(part for part in (self.service, str(self.database or "")) if part)
        return f"{scheme}://{hosts}" + (f"/{path}" if path else "")


def parse_directory_url(value: object) -> DirectoryAddress:
    """The address that a URL names.

    Raises:
        ValueError: malformed; the message says what to write instead and holds no password.
    """
    if not isinstance(value, str) or "://" not in value:
        raise ValueError(f"{value!r} is not a URL. Write it like {EXAMPLE}.")
    scheme, _, rest = value.strip().partition("://")
    if re.search(r"\s", value.strip()):
        raise ValueError(f"the URL contains a space. Write it like {EXAMPLE}.")
    base, _, kind = scheme.lower().partition("+")
    if base not in {"redis", "rediss", "valkey", "valkeys"} or kind not in {"", "sentinel", "cluster"}:
        raise ValueError(
            f"{scheme}:// is not known: only redis://, rediss:// (TLS), redis+sentinel:// and redis+cluster:// can be used "
            f"(or valkey in place of redis). Write it like {_EXAMPLES}."
        )
    topology = Topology(kind)
    rest, _, query = rest.partition("?")
    if "#" in rest or "#" in query:
        raise ValueError("a # in a user or password is written %23, and nothing else in the URL can have one.")
    authority, _, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    if at and "@" in login:
        raise ValueError("an @ in a user or password is written %40.")
    port = _SENTINEL_PORT if topology is Topology.SENTINEL else _DEFAULT_PORT
    nodes = tuple(_node(text, port) for text in hosts.split(","))
    if topology is Topology.SINGLE and len(nodes) > 1:
        raise ValueError(f"several hosts need redis+sentinel:// or redis+cluster://, for example {_EXAMPLES}.")
    service, database = _path(topology, [part for part in path.split("/") if part])
    tls = base in {"rediss", "valkeys"}
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r} in the URL: only {', '.join(_OPTIONS)} can be used.")
    if not re.fullmatch(r"[\w.:-]+", options.get("prefix", "histate")):
        raise ValueError("the prefix of keys consists of letters, digits and . : _ - only, for example ?prefix=team-a.")
    if not tls and any(name.endswith("_file") for name in options):
        raise ValueError("certificate files are for TLS: write rediss:// in place of redis://.")
    return DirectoryAddress(topology, nodes, database, service, tls, unquote(user), unquote(password), options)


def _node(text: str, default_port: int) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>\d*))?", text)
    if not found:
        what = f"{text!r} is not a host and a port" if text else "the URL names no host"
        raise ValueError(f"{what}. Write it like {_EXAMPLES}.")
    port = int(found["port"] or default_port)
    if not 0 < port < 65536:
        raise ValueError(f"port {port} is not between 1 and 65535.")
    return found["six"] or found["host"], port


def _path(topology: Topology, parts: list[str]) -> tuple[str, int]:
    """Service and database."""
    service = ""
    if topology is Topology.SENTINEL:
        if not parts:
            raise ValueError("the name of the master is missing. Write it like redis+sentinel://s1,s2,s3/mymaster.")
        service, parts = unquote(parts[0]), parts[1:]
    if not parts:
        return service, 0
    if topology is Topology.CLUSTER:
        raise ValueError("Redis Cluster has no database numbers. Remove what follows the hosts.")
    if len(parts) > 1 or not parts[0].isdigit():
        raise ValueError(f"after the port only a database number can follow, for example {EXAMPLE}.")
    return service, int(parts[0])
