"""Remote tiers behind a real vLLM and a real `lmcache server`: what survives the loss of a machine, and whose it is."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import pytest
import redis
import yaml
from harness import LOGPROBS, Cache, eventually, generate

from lmcache_histate.replay.engine import Completion, EngineProcess, EngineSettings
from lmcache_histate.replay.processes import ProcessScope, StartError, free_ports, http_json, wait_until_healthy
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS

pytestmark = pytest.mark.engine

INTERVAL = 256


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port and process of a redis-server that keeps nothing on disk and ends with the test."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server")
    port = free_ports(1)[0]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    try:
        assert eventually(lambda: answers(port))
        yield port, server
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def with_settings(cache: Cache, **top: Any) -> Cache:
    """The same configuration with other settings at the top level."""
    cache.file.write_text(yaml.safe_dump({**yaml.safe_load(cache.file.read_text()), **top}))
    return cache


def settled(prompt: Sequence[int], answer: Completion | None = None) -> int:
    """Where a request ended for the cache: the last block boundary before the last token, which vLLM never computes."""
    return (len(prompt) + (len(answer.tokens) if answer else 0) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def snapshots_and_chunks(names: Sequence[str]) -> tuple[int, int]:
    """How many prefixes a remote tier holds a state of, and how many chunks of KV, from its objects' names.

    A name is ``model@rank@group@hash``; the group of KV is the one that every chunk has.
    """
    groups: dict[str, set[str]] = {}
    for name in names:
        _, _, group, chunk = name.split("@")[:4]
        groups.setdefault(chunk, set()).add(group)
    assert len(set.intersection(*groups.values())) == 1
    return sum(len(found) > 1 for found in groups.values()), len(groups)


def with_salt(engine: EngineProcess, prompt: list[int], salt: str) -> Completion:
    assert eventually(engine.reset_prefix_cache, 10.0)
    engine.submit(prompt, 8, LOGPROBS, cache_salt=salt)
    return engine.next_completion()[1]


def test_a_session_resumes_from_redis_after_its_machine_was_lost(
    redis_server: tuple[int, subprocess.Popen[bytes]],
    tmp_path: Path,
    engine_settings: EngineSettings,
    reference: Callable[..., Any],
) -> None:
    port, server = redis_server
    client = redis.Redis(port=port)
    names = lambda: [key.decode() for key in client.scan_iter(count=1000)]  # noqa: E731
    remote = {"remote_url": f"redis://127.0.0.1:{port}"}
    base = harness.tokens(1500, seed=1)
    first = with_settings(Cache(tmp_path / "first", interval=INTERVAL), **remote)
    with harness.engine(tmp_path / "first", first.engine(engine_settings)) as engine:
        turn = generate(engine, base, count=100)
        reference(base, turn)
        assert eventually(lambda: first.status()["offered_to_remote"] == 1), first.status()
        end = settled(base, turn)
        # All of the KV, and of the six states that were saved only the one at the end.
        assert snapshots_and_chunks(names()) == (1, end // BLOCK_TOKENS)
        # A second session shares the beginning: its end is copied, and so is the state where the two part.
        fork = base[:700] + harness.tokens(300, seed=2)
        forked = generate(engine, fork)
        reference(fork, forked)
        assert eventually(lambda: snapshots_and_chunks(names())[0] >= 3), first.status()
        assert (
            snapshots_and_chunks(names())[1]
            == end // BLOCK_TOKENS + settled(fork) // BLOCK_TOKENS - 700 // BLOCK_TOKENS
        )
        assert first.status()["errors"] == 0

    # The machine and its disk are gone: a new vLLM with a new server and empty folders knows only Redis.
    second = with_settings(Cache(tmp_path / "second", interval=INTERVAL), **remote)
    with harness.engine(tmp_path / "second", second.engine(engine_settings)) as engine:
        follow = [*base, *turn.tokens, *harness.tokens(200, seed=3)]
        answer = generate(engine, follow)
        assert answer.cached_tokens == end
        reference(follow, answer)
        again = generate(engine, base)
        assert again.tokens == turn.tokens[:8]
        third = base[:700] + harness.tokens(250, seed=4)
        shared = generate(engine, third)
        assert 512 <= shared.cached_tokens <= 700, "the shared prefix can be resumed from"
        reference(third, shared)
        # Redis dies: nothing fails, and what CPU memory holds goes on hitting.
        server.kill()
        server.wait()
        fresh = harness.tokens(900, seed=5)
        lonely = generate(engine, fresh)
        assert lonely.cached_tokens == 0
        reference(fresh, lonely)
        repeated = generate(engine, fresh)
        assert (repeated.cached_tokens, repeated.tokens) == (settled(fresh), lonely.tokens)
        assert second.status()["errors"] == 0


def test_tenants_share_no_cache_and_a_quota_set_over_http_holds(
    tmp_path: Path, engine_settings: EngineSettings, reference: Callable[..., Any]
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    cache = with_settings(Cache(tmp_path / "cache", interval=INTERVAL), remote_url=f"file://{folder}")
    prompt = harness.tokens(1200, seed=11)
    with harness.engine(tmp_path, cache.engine(engine_settings)) as engine:
        alone = with_salt(engine, prompt, "alice")
        reference(prompt, alone)
        assert with_salt(engine, prompt, "bob").cached_tokens == 0
        assert generate(engine, prompt).cached_tokens == 0
        for salt in ("alice", "bob"):
            hit = with_salt(engine, prompt, salt)
            assert (hit.cached_tokens, hit.tokens) == (settled(prompt), alone.tokens)
        assert eventually(lambda: cache.status()["offered_to_remote"] == 3), cache.status()
        put(f"http://localhost:{cache.http_port}/quota/alice", {"limit_gb": 0})
        assert eventually(lambda: cache.status()["evicted_for_quota"] > 0)
        # What is hers locally is gone; the shared folder has an owner of its own. Bob's was never touched.
        listed = http_json(f"http://localhost:{cache.http_port}/quota")
        assert listed["users"]["alice"]["limit_gb"] == 0
        shutil.rmtree(folder)
        assert eventually(lambda: with_salt(engine, prompt, "alice").cached_tokens == 0)
        assert with_salt(engine, prompt, "bob").cached_tokens == settled(prompt)
        assert cache.status()["errors"] == 0


def put(url: str, body: dict[str, Any]) -> None:
    import json
    import urllib.request

    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), method="PUT", headers={"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10.0) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("shared", [False, True])
def test_two_servers_on_one_disk_folder(tmp_path: Path, shared: bool) -> None:
    disk = str(tmp_path / "disk")
    caches = [
        with_settings(Cache(tmp_path / name, local_disk_shared=shared), local_disk=disk) for name in ("one", "two")
    ]
    with ProcessScope() as scope:

        def start(cache: Cache) -> None:
            command = [sys.executable, "-m", "lmcache_histate.cli.main", "server", "-c", str(cache.file)]
            log = cache.folder / "server.log"
            process = scope.start([*command, "--chunk-size", str(BLOCK_TOKENS)], log)
            wait_until_healthy(process, f"http://localhost:{cache.http_port}/healthcheck", log)

        start(caches[0])
        if shared:
            start(caches[1])
            for cache in caches:
                assert cache.status()["healthy"]
            return
        with pytest.raises(StartError):
            start(caches[1])
        log = (caches[1].folder / "server.log").read_text()
        assert f"{disk} is in use by" in log
        assert "histate.local_disk_shared: true" in log
        assert caches[0].status()["healthy"], "the first one goes on"
