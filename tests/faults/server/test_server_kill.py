"""kill -9 of a server that stores, demotes, evicts and loads: what the next one serves is byte for byte what was stored."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_boxes import bytes_on_disk
from phases import NAMES, Phases

from lmcache_histate.replay.processes import ProcessScope, log_tail

ROUNDS = int(os.environ.get("HISTATE_SERVER_KILL_ROUNDS", "50"))
MOST_ROUNDS = 2 * ROUNDS
HITS_OF_EACH = 3
MIB = 1 << 20
CPU_BYTES, DISK_BYTES = 8 * MIB, 24 * MIB
DEADLINE_SECONDS = 60.0


class Servers:
    """Servers of one folder, one after another."""

    def __init__(self, scope: ProcessScope, root: Path) -> None:
        self.folder = root / "disk"
        self._log = root / "servers.log"
        self._files = {name: root / name for name in ("phases", "journal", "expected")}
        self._files["expected"].write_text("")
        self.phases = Phases(self._files["phases"])
        program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("killed_server.py"))]
        self._host = scope.start(program, self._log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._pid = 0
        self._hear("ready")

    def start(self, seed: int, **settings: Any) -> dict[str, Any]:
        """Start the next one; returns what it found."""
        order = {
            "folder": str(self.folder),
            "cpu_bytes": CPU_BYTES,
            "disk_bytes": DISK_BYTES,
            "seed": seed,
            "settings": settings,
            **{name: str(path) for name, path in self._files.items()},
        }
        self._files["phases"].write_bytes(bytes(self._files["phases"].stat().st_size))
        assert self._host.stdin is not None
        self._host.stdin.write(json.dumps(order).encode() + b"\n")
        self._host.stdin.flush()
        self._pid = int(self._hear("pid")["pid"])
        return self._hear("checked")

    def kill(self) -> set[str]:
        """Kill it; returns what it was doing."""
        os.kill(self._pid, signal.SIGKILL)
        assert self._hear("ended")["ended"] == -signal.SIGKILL
        (Path("/dev/shm") / f"lmcache_l1_pool_{self._pid}").unlink(missing_ok=True)
        self._files["expected"].write_text("\n".join(sorted(self._promised())))
        return self.phases.active()

    def _promised(self) -> set[str]:
        promised: set[str] = set()
        for line in self._files["journal"].read_text().splitlines():
            (promised.add if line[0] == "+" else promised.discard)(line[1:])
        return promised

    def _hear(self, word: str) -> dict[str, Any]:
        assert self._host.stdout is not None
        line = self._host.stdout.readline()
        said = json.loads(line) if line else {"error": "the process ended"}
        assert word in said, f"{said.get('error', said)}\n{log_tail(self._log)}"
        return dict(said)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ProcessScope(grace_s=2.0) as scope:
        yield Servers(scope, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_it_stores_demotes_evicts_or_loads(servers: Servers) -> None:
    rng, hit, kept = random.Random(11), Counter[str](), 0
    for round_ in range(MOST_ROUNDS):
        if round_ >= ROUNDS and min(hit[name] for name in NAMES) >= HITS_OF_EACH:
            break
        if round_ % 7 == 6:  # what the catalogue knew is in the headers too
            for path in servers.folder.glob("catalogue.sqlite*"):
                path.unlink()
        found = servers.start(round_, write_through=round_ % 2 == 0, eviction=rng.choice(["cost", "lru"]))
        kept = max(kept, int(found["checked"]))
        time.sleep(rng.uniform(0.0, 0.4))
        # Rounds take turns at what they wait for; the kill then comes a moment later, wherever that is.
        wanted, late = NAMES[round_ % len(NAMES)], rng.choice([0.0, 0.0, rng.uniform(0, 0.002)])
        deadline = time.monotonic() + DEADLINE_SECONDS
        while wanted not in servers.phases.active():
            assert time.monotonic() < deadline, f"no {wanted} within {DEADLINE_SECONDS:.0f} s"
        if late:
            time.sleep(late)
        hit.update(servers.kill())
        assert bytes_on_disk(servers.folder) <= DISK_BYTES
    assert min(hit[name] for name in NAMES) >= HITS_OF_EACH, f"kills hit {dict(hit)}"
    last = servers.start(MOST_ROUNDS)
    assert last["checked"] > 0
    assert last["expected"] > 0
    assert kept > 100
    servers.kill()
    print(f"kills hit {dict(hit)}; up to {kept} objects compared at a start")
