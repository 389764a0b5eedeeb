"""Two engines with a server each, one directory and one shared tier: a session moves, and its first home dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import yaml
from harness import eventually, generate

from lmcache_histate.backends.locate import Locator
from lmcache_histate.replay.engine import EngineProcess, EngineSettings
from lmcache_histate.replay.processes import ProcessScope, free_ports, http_json, wait_until_healthy
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS

pytestmark = pytest.mark.engine

INTERVAL = 256
LEASE = 10.0
SECONDS = 120.0
"""For what happens by itself, on a busy machine."""
HISTATE = [sys.executable, "-m", "lmcache_histate.cli.main"]


def whole(tokens: Sequence[int]) -> int:
    """Where the last whole block of a prompt ends that vLLM can restore: one token at least is computed."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Instance:
    """One server of the fleet, and the engine that uses it."""

    def __init__(self, scope: ProcessScope, folder: Path, name: str, directory: str, remote: str) -> None:
        folder.mkdir(parents=True)
        self.scope, self.folder, self.name = scope, folder, name
        self.disk = folder / "disk"
        self.port, self.http_port = free_ports(2)
        self.file = folder / "cache.yaml"
        settings = {
            "max_local_cpu_size": "400MiB",
            "local_disk": str(self.disk),
            "max_local_disk_size": "400MiB",
            "remote_url": remote,
            "server_url": f"tcp://localhost:{self.port}",
            "http_port": self.http_port,
            "histate": {
                "interval": INTERVAL,
                "autostart": False,
                "directory": directory,
                "directory_lease": LEASE,
                "instance": name,
                "instance_address": f"http://{name}.example:8000",
            },
        }
        self.file.write_text(yaml.safe_dump(settings))
        self.log = folder / "server.log"
        command = [*HISTATE, "server", "-c", str(self.file), "--chunk-size", str(BLOCK_TOKENS)]
        self.server = scope.start(command, self.log)

    def start_engine(self, settings: EngineSettings) -> EngineProcess:
        """A vLLM that uses this server, ready."""
        wait_until_healthy(self.server, f"http://localhost:{self.http_port}/healthcheck", self.log)
        settings = replace(
            settings, kv_transfer=harness.STOCK, environment={**settings.environment, "LMCACHE_CONFIG": str(self.file)}
        )
        engine = EngineProcess(self.scope, settings, self.folder / "engine.log")
        engine.connect()
        return engine

    def status(self) -> dict[str, Any]:
        return harness.find_histate(http_json(f"http://localhost:{self.http_port}/status"))

    def locate(self, model: str, prompt: list[int]) -> dict[str, int]:
        """What this server answers to a router: tokens by name."""
        body = {"model": model, "token_ids": prompt}
        answer = http_json(f"http://localhost:{self.http_port}/histate/locate", body)
        return {one["name"]: one["tokens"] for one in answer["locations"]}


def start_redis(scope: ProcessScope, folder: Path) -> int:
    """A redis-server that keeps nothing on disk; returns its port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server")
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    scope.start([*command, "--dir", str(folder)], folder / f"redis-{port}.log")
    return port


@pytest.mark.parametrize("shared", ["resp", "folder"])
def test_a_session_goes_on_elsewhere_and_nobody_counts_on_what_died(
    shared: str,
    tmp_path: Path,
    engine_settings: EngineSettings,
    reference: Callable[..., Any],
) -> None:
    small = replace(engine_settings, blocks=200, max_model_len=8192)
    model = str(engine_settings.model)
    base = harness.tokens(2000, seed=1)
    inside = base[: 3 * INTERVAL + 100]
    """Ends after the snapshot at three intervals, which is only on the disk of the first instance."""
    with ProcessScope() as scope:
        directory = f"redis://127.0.0.1:{start_redis(scope, tmp_path)}"
        if shared == "resp":
            remote = f"redis://127.0.0.1:{start_redis(scope, tmp_path)}"
        else:
            remote = f"file://{tmp_path / 'shared'}"
            (tmp_path / "shared").mkdir()
        tier = f"shared:{remote}"
        first, second = (Instance(scope, tmp_path / name, name, directory, remote) for name in ("a", "b"))
        with Locator(directory, timeout_s=10.0) as locator:

            def located(prompt: list[int]) -> dict[str, int]:
                return {one.member.name: one.tokens for one in locator.locate(model, prompt).locations}

            engine = first.start_engine(small)
            answer = generate(engine, base, 24)
            reference(base, answer)
            assert answer.cached_tokens == 0
            end = len(base) // BLOCK_TOKENS * BLOCK_TOKENS
            assert eventually(lambda: located(base) == {"a": end, tier: end}, SECONDS), located(base)
            # The snapshots inside are historical: on the first instance's own disk, and nowhere else.
            assert eventually(lambda: located(inside) == {"a": 3 * INTERVAL}, SECONDS), located(inside)

            other = second.start_engine(small)
            # Before its first request: it hears of the shared copies, and of nothing else.
            assert eventually(lambda: second.status()["chunks_known"] == end // BLOCK_TOKENS, SECONDS), second.status()
            assert eventually(lambda: second.locate(model, base) == {"a": end, "b": end, tier: end}, SECONDS)
            assert eventually(lambda: second.locate(model, inside) == {"a": 3 * INTERVAL}, SECONDS)
            follow = base + list(answer.tokens) + harness.tokens(150, seed=2)
            continued = generate(other, follow, 24)
            reference(follow, continued)
            assert continued.cached_tokens == whole(base), "it resumes from the first instance's snapshot"
            # The end of its turn is on the shared tier as well: the session could go back.
            turn = follow + list(continued.tokens)
            everywhere = dict.fromkeys(("a", "b", tier), whole(turn))
            assert eventually(lambda: located(turn) == everywhere, SECONDS), located(turn)
            assert eventually(lambda: first.status()["sessions_moved_away"] == 1, SECONDS), first.status()

            # The command, with the same prompt on its standard input.
            done = subprocess.run(
                [*HISTATE, "locate", "-c", str(second.file), "--model", model, "--json"],
                input=json.dumps(turn), capture_output=True, text=True, check=True, timeout=SECONDS,
            )  # fmt: skip
            table = {one["name"]: one for one in json.loads(done.stdout)["locations"]}
            assert table["b"]["address"] == "http://b.example:8000"
            assert {name: one["tokens"] for name, one in table.items()} == everywhere

            # The first instance dies, and its disk with it.
            for process in (engine.process, first.server):
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            shutil.rmtree(first.disk)
            assert eventually(lambda: located(inside) == {}, SECONDS), located(inside)
            assert located(turn) == {"b": whole(turn), tier: whole(turn)}
            assert eventually(lambda: second.locate(model, inside) == {}, SECONDS), second.locate(model, inside)
            assert eventually(lambda: located(base) == {"b": end, tier: end}, SECONDS), located(base)
            edited = inside + harness.tokens(100, seed=3)
            rewound = generate(other, edited, 24)
            reference(edited, rewound)
            assert rewound.cached_tokens == 0, "only the dead one had a snapshot before this place"
            again = generate(other, follow, 24)
            assert again.tokens == continued.tokens
            assert again.cached_tokens >= end
            assert second.status()["errors"] == 0
            other.stop()
