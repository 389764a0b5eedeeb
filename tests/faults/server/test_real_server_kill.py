"""kill -9 of a whole `lmcache server`, driven by the client of LMCache's own `lmcache bench server`."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_boxes import bytes_on_disk
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

from lmcache_histate.backends.arguments import server_arguments
from lmcache_histate.backends.disk.fsck import fsck
from lmcache_histate.config import Config
from lmcache_histate.replay.processes import ProcessScope, free_ports, http_json, wait_until_healthy

ROUNDS = 5
MIB = 1 << 20
GIB = 1 << 30
CPU_BYTES, DISK_BYTES = 16 * MIB, 40 * MIB
CHUNK, BLOCK, BLOCKS = 64, 16, 256
CHUNKS = 16
SEQUENCES = 60
"""As many MiB: more than both tiers hold."""


class Server:
    """A running server and a client of it."""

    def __init__(self, scope: ProcessScope, root: Path, write_through: bool) -> None:
        port, http_port = free_ports(2)
        config = Config(
            max_local_cpu_size=CPU_BYTES / GIB,
            local_disk=str(root / "disk"),
            max_local_disk_size=DISK_BYTES / GIB,
            http_port=http_port,
            histate={"write_through": write_through},
        )
        program = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        address = ["--host", "localhost", "--port", str(port), "--http-host", "127.0.0.1"]
        self._url = f"http://127.0.0.1:{http_port}"
        self.process = scope.start(
            [sys.executable, "-W", "ignore", "-c", program, "server", *address, *server_arguments(config, CHUNK)],
            root / "server.log",
        )
        wait_until_healthy(self.process, f"{self._url}/healthcheck", root / "server.log")
        self.client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://localhost:{port}",
                http_url=self._url,
                mode="cpu",
                transfer_mode="lmcache_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=CHUNKS * CHUNK - 1,
                kvcache_shape_spec=f"(2,{BLOCKS},{BLOCK},2,64):float16:2",
                num_blocks=BLOCKS,
                block_size=BLOCK,
            ),
            log=lambda line: None,
        )
        self.client.start()
        self._requests = 0

    def disk_status(self) -> dict[str, Any]:
        """What the disk tier says of itself."""
        status = http_json(f"{self._url}/status", timeout_s=30)
        return dict(status["storage_manager"]["l2_adapters"][0])

    def turn(self, sequence: int) -> int:
        """Load what is cached of a sequence, compare it with what it must be, store it all; returns chunks loaded."""
        self._requests += 1
        request = self.client.create_request(sequence, f"{sequence}-{self._requests}", "turn")
        assert request is not None
        found = self.client.lookup(request)
        if found.hit_chunks:
            self._fill(request, found.hit_chunks, lambda chunk: torch.zeros(()))
            done = self.client.retrieve(request, 0, found.hit_chunks * CHUNK)
            assert done is not None
            if done.succeeded:
                for layer, blocks in self._blocks(request):
                    for chunk in range(found.hit_chunks):
                        got = blocks[:, chunk * CHUNK // BLOCK : (chunk + 1) * CHUNK // BLOCK]
                        assert torch.equal(got, content(sequence, chunk, layer, got)), f"{sequence} {chunk} {layer}"
        if found.hit_chunks < CHUNKS and found.succeeded:
            self._fill(request, CHUNKS, lambda chunk: chunk)
            self.client.store(request, found.hit_chunks * CHUNK, (CHUNKS - found.hit_chunks) * CHUNK)
        self.client.end_session(request)
        return found.hit_chunks

    def _blocks(self, request: RequestContext) -> Iterator[tuple[int, torch.Tensor]]:
        tensors = self.client._workers[0].kv_caches.values()
        for layer, tensor in enumerate(tensors):
            yield layer, tensor[:, request.block_offset : request.block_offset + request.num_blocks]

    def _fill(self, request: RequestContext, chunks: int, what: Any) -> None:
        for layer, blocks in self._blocks(request):
            for chunk in range(chunks):
                part = blocks[:, chunk * CHUNK // BLOCK : (chunk + 1) * CHUNK // BLOCK]
                value = what(chunk)
                part.copy_(
                    value if isinstance(value, torch.Tensor) else content(request.sequence_id, chunk, layer, part)
                )

    def abandon(self) -> None:
        """Let go of the client of a server that is gone, without asking the server."""
        for worker in self.client._workers:
            worker.transfer_context.close()
        self.client._workers.clear()
        self.client.close()


def content(sequence: int, chunk: int, layer: int, like: torch.Tensor) -> torch.Tensor:
    """The values that a chunk of a sequence must have."""
    seed = (sequence * CHUNKS + chunk) * 8 + layer
    return torch.randint(1, 2000, like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


@contextmanager
def running(root: Path, write_through: bool) -> Iterator[Server]:
    """A server; whatever is left of it is ended afterwards."""
    with ProcessScope(grace_s=5.0) as scope, pytest.MonkeyPatch.context() as patch:
        server = Server(scope, root, write_through)

        def wait(future: Any, timeout_s: float = 60.0, retain_refs: tuple[object, ...] = ()) -> Any:
            # The client's own wait, but without its ten seconds where nobody is left to answer.
            deadline = time.monotonic() + timeout_s
            while server.process.poll() is None and time.monotonic() < deadline:
                if (answer := wait_once(future, 0.2, retain_refs)) is not helpers._TIMEOUT:
                    return answer
            return helpers._TIMEOUT

        wait_once = helpers._wait_for_result
        patch.setattr(helpers, "_wait_for_result", wait)
        try:
            yield server
        finally:
            server.abandon()


def work_until_it_dies(server: Server, seed: int, kill_after: float) -> list[Exception]:
    """Turns on a thread of their own, and a kill in the middle of one; returns what was wrong."""
    rng, wrong, killed = random.Random(seed), [], threading.Event()

    def work() -> None:
        try:
            while not killed.is_set():
                server.turn(rng.randrange(SEQUENCES))
        except Exception as error:
            if isinstance(error, AssertionError) or not killed.is_set():
                wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(kill_after)
    killed.set()
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(10)
    thread.join(60)
    assert not thread.is_alive()
    return wrong


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_killed_server_leaves_nothing_wrong_to_the_next(tmp_path: Path) -> None:
    rng, served, recovered = random.Random(5), 0, 0
    for round_ in range(ROUNDS):
        with running(tmp_path, write_through=round_ % 2 == 0) as server:
            before = server.disk_status()
            recovered += before["objects"]
            assert before["counters"]["bad_files_removed"] == 0
            served += sum(server.turn(number) for number in range(SEQUENCES // 4))  # compares every byte
            assert work_until_it_dies(server, round_, rng.uniform(0.5, 3.0)) == []
        assert bytes_on_disk(tmp_path / "disk") <= DISK_BYTES
    assert recovered > 0
    assert served > 0
    found = fsck(tmp_path / "disk", repair=True)
    assert sum(namespace.records for namespace in found.namespaces) > 0
    assert sum(namespace.damaged for namespace in found.namespaces) == 0
    with running(tmp_path, write_through=False) as server:
        assert sum(server.turn(number) for number in range(SEQUENCES)) > 0
        counters = server.disk_status()["counters"]
        assert counters["load_hit"] > 0
        assert not counters.keys() & {"damaged_removed", "vanished"}
