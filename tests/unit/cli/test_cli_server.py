"""``histate server``: what it refuses, what it becomes, and the real thing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_histate.backends.arguments import server_arguments
from lmcache_histate.cli import server_command
from lmcache_histate.cli.main import app
from lmcache_histate.config import Config

CLEAN = {name: None for name in os.environ if name.startswith(("HISTATE_", "LMCACHE_"))}


def run(*arguments: str, **environ: str):
    return CliRunner().invoke(app, ["server", *arguments], env={**CLEAN, **environ})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TestRefusals:
    def test_an_unknown_block_size_says_how_to_find_it(self) -> None:
        done = run("-c", "histate")
        assert done.exit_code == 2
        assert "default: chunk_size: auto works only where vLLM starts the server" in done.stderr
        assert "'Setting attention block size to N tokens'" in done.stderr

    def test_several_servers_need_to_know_which_they_are(self) -> None:
        done = run("-c", "histate", "--chunk-size", "64", HISTATE_SERVER_URL="a:1,b:2")
        assert done.exit_code == 2
        assert "names 2 servers. Say which one this is with --host and --port" in done.stderr

    def test_switched_off(self) -> None:
        done = run("-c", "histate", "--chunk-size", "64", HISTATE_ENABLED="no")
        assert done.exit_code == 2
        assert "switched off" in done.stderr

    def test_nothing_configured(self) -> None:
        assert "HiState is not configured" in run().stderr

    def test_more_memory_than_there_is(self) -> None:
        done = run("-c", "histate", "--chunk-size", "64", HISTATE_MAX_LOCAL_CPU_SIZE="900TiB")
        assert done.exit_code == 2
        assert "more than the" in done.stderr


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The command that the process would become. Only the exec is replaced: it would end the test run."""
    seen: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(server_command, "_replace_process", lambda command, environ: seen.append((command, environ)))
    return seen


class TestCommand:
    def test_defaults_come_from_server_url(self, replaced) -> None:
        assert run("-c", "histate", "--chunk-size", "528", HISTATE_SERVER_URL="localhost:6000").exit_code == 0
        ((command, environ),) = replaced
        assert command[:3] == [sys.executable, "-m", "lmcache.v1.multiprocess.http_server"]
        assert command[3:9] == ["--host", "localhost", "--port", "6000", "--http-host", "127.0.0.1"]
        assert command[9:] == server_arguments(Config(server_url="localhost:6000", chunk_size=528), 528)
        assert environ == {}

    def test_the_command_line_wins(self, replaced) -> None:
        options = ["--host", "0.0.0.0", "--port", "7000", "--http-host", "10.0.0.1", "--http-port", "7001"]
        assert run("-c", "histate", "--chunk-size", "64", *options, HISTATE_SERVER_URL="a:1,b:2").exit_code == 0
        ((command, _),) = replaced
        assert command[3:9] == ["--host", "0.0.0.0", "--port", "7000", "--http-host", "10.0.0.1"]
        assert command[command.index("--http-port") + 1] == "7001"
        module = json.loads(command[command.index("--server-module") + 1])
        assert module["config"]["server_url"] == "tcp://0.0.0.0:7000"
        assert module["config"]["http_port"] == 7001

    def test_passwords_travel_in_the_environment(self, replaced) -> None:
        run("-c", "histate", "--chunk-size", "64", HISTATE_REMOTE_URL="redis://:hunter2@cache")
        ((command, environ),) = replaced
        assert "hunter2" not in " ".join(command)
        assert environ == {"LMCACHE_RESP_PASSWORD": "hunter2"}


@pytest.mark.engine
def test_the_real_server_answers_and_stops_on_sigterm(tmp_path: Path) -> None:
    port, http_port = free_port(), free_port()
    file = tmp_path / "cache.yaml"
    file.write_text(
        "chunk_size: 64\nmax_local_cpu_size: 64MiB\nmax_local_disk_size: 64MiB\n"
        f"local_disk: {tmp_path}/disk with space\n"
        f"server_url: tcp://127.0.0.1:{port}\nhttp_port: {http_port}\nhistate:\n  interval: 256\n"
    )
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [Path(sys.executable).with_name("histate"), "server", "-c", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in CLEAN},
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/healthcheck", timeout=5) as answer:
                    assert answer.status == 200
                break
            except OSError:
                time.sleep(0.3)
        import zmq
        from lmcache.integration.vllm.mp_server_launcher import is_mp_server_healthy

        assert is_mp_server_healthy(f"tcp://127.0.0.1:{port}", zmq.Context.instance(), timeout=30)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) in (0, -signal.SIGTERM), log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
