"""Addresses, and the servers behind them: ACL users, TLS, Sentinels, a cluster."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from directory_boxes import FACTS, SPACE, catch_up, chain, hashes_of, instance
from redis_box import RedisServer, free_port, redis_server

from lmcache_histate.state_store.directory.protocol import AccessDenied, NamespaceFacts, Unreachable, Unusable
from lmcache_histate.state_store.directory.reader import DirectoryReader
from lmcache_histate.state_store.directory.redis_directory import RedisDirectory
from lmcache_histate.state_store.directory.url import DirectoryAddress, Topology, parse_directory_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://meta", DirectoryAddress(Topology.SINGLE, (("meta", 6379),))),
        (" redis://meta:6380/3 ", DirectoryAddress(Topology.SINGLE, (("meta", 6380),), 3)),
        ("valkey://meta/", DirectoryAddress(Topology.SINGLE, (("meta", 6379),))),
        ("rediss://[::1]:6380", DirectoryAddress(Topology.SINGLE, (("::1", 6380),), tls=True)),
        (
            "REDIS://us%40er:p%2Fw%3A@meta",
            DirectoryAddress(Topology.SINGLE, (("meta", 6379),), username="us@er", password="p/w:"),
        ),
        ("redis://:pw@meta", DirectoryAddress(Topology.SINGLE, (("meta", 6379),), password="pw")),
        (
            "redis+sentinel://u:p@s1,s2:26380/mymaster/2?sentinel_password=x",
            DirectoryAddress(
                Topology.SENTINEL,
                (("s1", 26379), ("s2", 26380)),
                2,
                "mymaster",
                username="u",
                password="p",
                options={"sentinel_password": "x"},
            ),
        ),
        ("valkeys+cluster://n1,n2:7001", DirectoryAddress(Topology.CLUSTER, (("n1", 6379), ("n2", 7001)), tls=True)),
        (
            "rediss://meta?ca_file=/etc/ca.pem",
            DirectoryAddress(Topology.SINGLE, (("meta", 6379),), tls=True, options={"ca_file": "/etc/ca.pem"}),
        ),
    ],
)
def test_urls(url: str, expected: DirectoryAddress) -> None:
    assert parse_directory_url(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (7, "not a URL"),
        ("meta:6379", "not a URL"),
        ("http://meta", "http:// is not known"),
        ("redis+file://meta", "is not known"),
        ("redis://", "names no host"),
        ("redis://user:hunter2@", "names no host"),
        ("redis://user:hunter2@me ta", "contains a space"),
        ("redis://user:hunter2@meta:x", "not a host and a port"),
        ("redis://user:hunter2@meta:70000", "port 70000"),
        ("redis://user:hunter2@meta:0", "port 0"),
        ("redis://user:hunter2@meta/db", "database number"),
        ("redis://user:hunter2@meta/1/2", "database number"),
        ("redis://user:hunter2#@meta", "%23"),
        ("redis://user:hunter2@@meta", "%40"),
        ("redis://user:hunter2@m1,m2", "several hosts"),
        ("redis+sentinel://user:hunter2@s1,s2", "name of the master"),
        ("redis+sentinel://s1/mymaster/x", "database number"),
        ("redis+cluster://user:hunter2@n1/1", "no database numbers"),
        ("redis://user:hunter2@meta?ssl=1", "unknown option 'ssl'"),
        ("redis://user:hunter2@meta?ca_file=x", "rediss://"),
        ("redis://user:hunter2@meta?prefix=a{b}", "letters, digits"),
        ("redis://user:hunter2@meta?prefix=", "letters, digits"),
    ],
)
def test_malformed_urls_say_what_to_write_and_show_no_password(url: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_directory_url(url)
    assert "hunter2" not in str(caught.value)


def test_the_text_of_an_address_shows_no_password() -> None:
    address = parse_directory_url("rediss+sentinel://user:hunter2@s1,[::1]:7/main/2?sentinel_password=hunter2")
    assert str(address) == "rediss+sentinel://s1:26379,[::1]:7/main/2"
    assert "hunter2" not in repr(address)


def works(url: str) -> None:
    """Two instances and a reader at an address."""
    a, b = instance(url, "a"), instance(url, "b")
    a.register("other", NamespaceFacts(16, 1, 1), 0.0)
    a.publish(SPACE, chain(40), 0.0)
    catch_up(b, 0.0)
    assert [at.tokens for at in b.locate(SPACE, hashes_of(chain(40)), 0.0)] == [40 * 64]
    reader = DirectoryReader(parse_directory_url(url))
    assert set(reader.namespaces()) == {SPACE, "other"}
    assert reader.locate(SPACE, FACTS, hashes_of(chain(40))) == b.locate(SPACE, hashes_of(chain(40)), 0.0)
    for directory in (a, b):
        directory.close()
    reader.close()


def test_a_database_of_its_own(server: RedisServer) -> None:
    works(f"{server.url}/5")
    with server.client() as client:
        assert client.dbsize() == 0


def test_acl_users(server: RedisServer) -> None:
    with server.client() as client:
        # What docs/directory.md says that the user needs.
        rights = [
            "resetkeys",
            "~histate:*",
            "resetchannels",
            "-@all",
            "+@read",
            "+@write",
            "+@scripting",
            "+@connection",
            "+time",
        ]
        client.execute_command("ACL", "SETUSER", "histate", "on", ">secret", *rights)
        client.execute_command("ACL", "SETUSER", "weak", "on", ">secret", "~other:*", "+@all")
    works(f"redis://histate:secret@127.0.0.1:{server.port}")
    for url in (f"redis://histate:hunter2@127.0.0.1:{server.port}", f"redis://weak:secret@127.0.0.1:{server.port}"):
        with pytest.raises(AccessDenied, match="refuses the user or password") as caught:
            instance(url, "a")
        assert "hunter2" not in str(caught.value)
        assert "secret" not in str(caught.value)


def test_a_server_with_a_password_that_was_not_given(server: RedisServer) -> None:
    with redis_server("--requirepass", "secret") as locked:
        with pytest.raises(AccessDenied):
            instance(locked.url, "a")
        works(f"redis://:secret@127.0.0.1:{locked.port}")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return tmp_path


def test_tls(certificates: Path) -> None:
    port = free_port()
    certificate, key = f"{certificates}/cert.pem", f"{certificates}/key.pem"
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    with redis_server("--tls-port", str(port), "--tls-auth-clients", "no", *files):
        works(f"rediss://127.0.0.1:{port}?ca_file={certificate}")
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            instance(f"rediss://127.0.0.1:{port}", "a")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisServer]:
    """Two nodes that share the slots."""
    nodes, buses = [], {"one": free_port(), "two": free_port()}
    try:
        for name in buses:
            nodes.append(
                RedisServer(
                    *("--cluster-enabled", "yes", "--cluster-config-file", f"{name}.conf", "--dir", str(tmp_path)),
                    # By default the port plus 10,000, which need not be one.
                    *("--cluster-port", str(buses[name])),
                )
            )
        first, second = (node.client() for node in nodes)
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, buses["two"])
        deadline = time.monotonic() + 60
        while not all({"cluster_state:ok", "cluster_size:2"} <= _info(node) for node in (first, second)):
            assert time.monotonic() < deadline, "the cluster does not form"
            time.sleep(0.1)
        yield nodes[0]
    finally:
        for node in nodes:
            node.kill()


def _info(client: redis.Redis) -> set[str]:
    answer = client.execute_command("CLUSTER", "INFO")
    return (
        {f"{name}:{value}" for name, value in answer.items()}
        if isinstance(answer, dict)
        else set(answer.decode().split())
    )


@pytest.mark.slow
def test_a_cluster(cluster: RedisServer) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    works(url)
    # Namespaces spread over the nodes.
    directory = instance(url, "c")
    for index in range(20):
        directory.register(f"model-{index}", FACTS, 0.0)
        directory.publish(f"model-{index}", chain(3), 0.0)
    directory.poll(0.0)
    assert all(directory.locate(f"model-{index}", hashes_of(chain(3)), 0.0) for index in range(20))
    with cluster.client() as client:
        assert 0 < sum(1 for _ in client.scan_iter("histate:*:m", count=1000)) < 22
    directory.close()

    def register_on_one_node() -> None:
        for index in range(20):  # some of these slots are on the other
            RedisDirectory(parse_directory_url(cluster.url), "a").register(f"model-{index}", FACTS, 0.0)

    with pytest.raises(Unusable, match=r"redis\+cluster://"):
        register_on_one_node()


@pytest.mark.slow
def test_sentinels(tmp_path: Path) -> None:
    with redis_server() as master:
        port = free_port()
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {master.port} 1\n"
        )
        watcher = subprocess.Popen(["redis-server", str(config), "--sentinel"], stdout=subprocess.DEVNULL)
        try:
            url = f"redis+sentinel://127.0.0.1:{port}/main"
            deadline = time.monotonic() + 60
            while True:
                try:
                    instance(url, "probe").close()
                    break
                except Unreachable:
                    assert time.monotonic() < deadline, "the Sentinel does not answer"
                    time.sleep(0.1)
            with master.client() as client:
                client.flushall()
            works(url)
            with pytest.raises(Unreachable, match="name no master"):
                RedisDirectory(parse_directory_url(url.replace("main", "wrong")), "a").register(SPACE, FACTS, 0.0)
        finally:
            watcher.kill()
            watcher.wait()
