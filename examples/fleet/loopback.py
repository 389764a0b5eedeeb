"""A fleet on this machine, without a GPU: two vLLM engines with a server each, a directory, and a shared tier.

    make setup && .venv/bin/python examples/fleet/loopback.py

A session begins on instance a and goes on on instance b, which resumes it from the shared tier. Then a is killed and its
disk is gone. `histate locate` shows before and after each step who could restore how much of the session. Takes a minute
or two; ends everything that it started, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lmcache_histate.backends.locate import Locator
from lmcache_histate.replay.engine import EngineDied, EngineProcess, EngineSettings
from lmcache_histate.replay.processes import (
    ProcessScope,
    StartError,
    cache_folder,
    free_ports,
    unwinding_on_signals,
    wait_until_healthy,
)
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS, ensure_tiny_model

HISTATE = [sys.executable, "-m", "lmcache_histate.cli.main"]
LEASE = 5.0
"""Seconds after which a dead instance counts as gone."""
WAIT = 120.0
"""Seconds for what the servers do by themselves, on a slow machine."""


@dataclass
class Instance:
    """One LMCache server with HiState, and its vLLM."""

    name: str
    config: Path
    disk: Path
    server: subprocess.Popen[bytes]
    engine: EngineProcess


class Fleet:
    """Everything that is started, inside one scope that ends it."""

    def __init__(self, scope: ProcessScope, folder: Path, shared: str) -> None:
        self._scope, self._folder = scope, folder
        self.model = ensure_tiny_model(cache_folder() / "models" / "tiny")
        self.directory = f"redis://127.0.0.1:{self._redis('directory')}"
        if shared == "redis":
            self.shared = f"redis://127.0.0.1:{self._redis('shared')}"
        else:
            (folder / "shared").mkdir()
            self.shared = f"file://{folder / 'shared'}"

    def _redis(self, name: str) -> int:
        (port,) = free_ports(1)
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._scope.start([*command, "--dir", str(self._folder)], self._folder / f"{name}.log")
        return port

    def start(self, name: str) -> Instance:
        """An instance that is ready for requests."""
        say(f"instance {name} starts: an LMCache server with HiState, then vLLM")
        folder = self._folder / name
        folder.mkdir()
        port, http_port = free_ports(2)
        config = folder / "cache.yaml"
        settings = {
            "max_local_cpu_size": "400MiB",
            "local_disk": str(folder / "disk"),
            "max_local_disk_size": "400MiB",
            "remote_url": self.shared,
            "server_url": f"tcp://localhost:{port}",
            "http_port": http_port,
            "histate": {
                "autostart": False,
                "directory": self.directory,
                "directory_lease": LEASE,
                "instance": name,
                "instance_address": f"http://{name}:8000",
            },
        }
        config.write_text(yaml.safe_dump(settings))
        log = folder / "server.log"
        server = self._scope.start([*HISTATE, "server", "-c", str(config), "--chunk-size", str(BLOCK_TOKENS)], log)
        wait_until_healthy(server, f"http://localhost:{http_port}/healthcheck", log)
        engine = EngineProcess(
            self._scope,
            EngineSettings(
                model=self.model,
                blocks=200,
                max_model_len=8192,
                kv_transfer={"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"},
                environment={"LMCACHE_CONFIG": str(config)},
            ),
            folder / "engine.log",
        )
        engine.connect()
        return Instance(name, config, folder / "disk", server, engine)

    def serve(self, instance: Instance, prompt: list[int]) -> list[int]:
        """Send one turn to an instance; returns the whole turn."""
        (answer,) = instance.engine.generate([prompt], 24)
        say(
            f"{instance.name} serves a prompt of {len(prompt):,} tokens: {answer.cached_tokens:,} come from the cache, "
            f"{len(prompt) - answer.cached_tokens:,} are computed"
        )
        return prompt + list(answer.tokens)

    def locate(self, prompt: Sequence[int]) -> None:
        """What a router would ask, as a person sees it."""
        print(f"$ histate locate --directory {self.directory} --model {self.model.name}")
        sys.stdout.flush()
        arguments = ["locate", "--directory", self.directory, "--model", str(self.model)]
        subprocess.run([*HISTATE, *arguments], input=json.dumps(list(prompt)), text=True, check=True, timeout=WAIT)

    def wait_for(self, prompt: Sequence[int], present: set[str], absent: set[str]) -> bool:
        """Wait until the instances ``present`` can restore something of a prompt, and ``absent`` nothing."""
        deadline = time.monotonic() + WAIT
        with Locator(self.directory, timeout_s=10.0) as locator:
            while time.monotonic() < deadline:
                try:
                    found = locator.locate(str(self.model), prompt).locations
                except ValueError:
                    found = ()  # nothing was served yet
                names = {"shared" if one.member.is_tier else one.member.name for one in found}
                if present <= names and not absent & names:
                    return True
                time.sleep(0.2)
        return False


def say(text: str) -> None:
    """One line about what happens."""
    print(f"\n--- {text}", flush=True)


def run(scope: ProcessScope, folder: Path, shared: str) -> bool:
    """The whole story; whether it went as it should."""
    fleet = Fleet(scope, folder, shared)
    source = random.Random(1)
    first = fleet.start("a")
    turn = fleet.serve(first, [source.randint(2, 257) for _ in range(2000)])
    good = fleet.wait_for(turn, {"a", "shared"}, set())
    fleet.locate(turn)
    second = fleet.start("b")
    say("the session goes on on b")
    prompt = turn + [source.randint(2, 257) for _ in range(150)]
    longer = fleet.serve(second, prompt)
    good &= fleet.wait_for(longer, {"a", "b", "shared"}, set())
    fleet.locate(longer)
    say(f"a is killed, and its disk is gone; {LEASE:g} seconds later its lease is over")
    for process in (first.engine.process, first.server):
        process.send_signal(signal.SIGKILL)
        process.wait()
    shutil.rmtree(first.disk)
    good &= fleet.wait_for(longer, {"b", "shared"}, {"a"})
    fleet.locate(longer)
    say("everything is stopped")
    second.engine.stop()
    return good


def main() -> int:
    """Exit code: 0 if all went well, 1 if not, 2 if something is missing here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", choices=("redis", "folder"), default="redis", help="the shared tier")
    shared = parser.parse_args().shared
    if shutil.which("redis-server") is None:
        print(
            "This example needs redis-server, which is not installed: apt install redis-server (or dnf, brew install redis).",
            file=sys.stderr,
        )
        return 2
    if importlib.util.find_spec("vllm") is None:
        print("This example runs vLLM on the CPU: run `make setup` and use .venv/bin/python.", file=sys.stderr)
        return 2
    # Left behind when something fails, since the logs are in it.
    folder = Path(tempfile.mkdtemp(prefix="histate-fleet-"))
    try:
        with unwinding_on_signals(), ProcessScope() as scope:
            good = run(scope, folder, shared)
    except (StartError, EngineDied, subprocess.SubprocessError) as error:
        print(f"The example stopped: {error}\nLogs: {folder}", file=sys.stderr)
        return 1
    if not good:
        print(f"The directory did not say what it should. Logs: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
