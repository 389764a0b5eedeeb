"""HiState inside a real vLLM, with the real LMCache server that it starts: hits, outputs, restarts, faults."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import LOGPROBS, STOCK, Cache, eventually, generate

from lmcache_histate.replay.engine import EngineSettings
from lmcache_histate.replay.outcome import LOGPROB_TOLERANCE, output_difference
from lmcache_histate.replay.processes import ProcessScope, StartError, free_ports, wait_until_healthy
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS

pytestmark = pytest.mark.engine

INTERVAL = 256


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """A cache with a snapshot every 256 tokens."""
    return Cache(tmp_path_factory.mktemp("fixed"), interval=INTERVAL)


def test_rewinds_hit_the_nearest_stop_and_appends_resume_after_the_answer(
    fixed: Cache, engine_settings: EngineSettings, reference: Callable[..., Any]
) -> None:
    base = harness.tokens(3000, seed=1)
    final = (len(base) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with harness.engine(fixed.folder / "first", fixed.engine(engine_settings)) as engine:
        first = generate(engine, base)
        assert first.cached_tokens == 0
        reference(base, first)
        again = generate(engine, base)
        assert again.cached_tokens == final
        assert again.tokens == first.tokens
        # Historical snapshots move to disk and leave CPU memory; the hits below come from there.
        stops = len(range(INTERVAL, final, INTERVAL))
        assert eventually(lambda: fixed.status()["demoted_snapshots"] >= stops), fixed.status()
        for position in (2900, 2560, 2559, 1500, 700, 255):
            edited = base[:position] + harness.tokens(200, seed=position)
            answer = generate(engine, edited)
            assert answer.cached_tokens == position // INTERVAL * INTERVAL, position
            reference(edited, answer)
        # An answer is part of its turn: the next prompt resumes after its last whole block.
        long = generate(engine, base, count=3 * BLOCK_TOKENS)
        append = base + list(long.tokens) + harness.tokens(30, seed=2)
        follow = generate(engine, append)
        assert follow.cached_tokens == (len(base) + 3 * BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        reference(append, follow)
        assert eventually(lambda: fixed.status()["dropped_snapshots"] >= 1), "decode states in between are not kept"
        # Two requests that share a prefix, in one step.
        assert engine.reset_prefix_cache()
        shared = harness.tokens(1000, seed=3)
        pair = [shared + harness.tokens(150, seed=4), shared + harness.tokens(150, seed=5)]
        for prompt, completion in zip(pair, engine.generate(pair, 8, logprobs=LOGPROBS), strict=True):
            reference(prompt, completion)
        for prompt in pair:
            assert generate(engine, prompt).cached_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert fixed.status()["errors"] == 0


def test_preemption_in_the_middle_of_a_plan_changes_no_output(
    tmp_path: Path, engine_settings: EngineSettings, reference: Callable[..., Any]
) -> None:
    cache = Cache(tmp_path / "cache", interval=192)
    # Four requests want about 20 blocks of KV each, and some for their states: one of them must give way.
    tight = replace(engine_settings, blocks=90, max_step_tokens=512, max_model_len=4096)
    prompts = [harness.tokens(1100 + 64 * number, seed=10 + number) for number in range(4)]
    with harness.engine(tmp_path, cache.engine(tight)) as engine:
        completions = engine.generate(prompts, 150, logprobs=LOGPROBS)
        assert "<preempted>" in (tmp_path / "engine.log").read_text()
        for prompt, completion in zip(prompts, completions, strict=True):
            reference(prompt, completion)
            replay = generate(engine, prompt, 150)
            assert output_difference(replay, completion) <= LOGPROB_TOLERANCE
            assert replay.cached_tokens > 0
        assert cache.status()["errors"] == 0


def test_requests_go_on_while_the_server_dies_and_the_disk_serves_whoever_comes_back(
    tmp_path: Path, engine_settings: EngineSettings, reference: Callable[..., Any]
) -> None:
    cache = Cache(tmp_path / "cache", interval=INTERVAL, autostart=False, write_through=True)
    command = [sys.executable, "-m", "lmcache_histate.cli.main", "server", "-c", str(cache.file)]
    command += ["--chunk-size", str(BLOCK_TOKENS)]
    address = f"http://localhost:{cache.http_port}/healthcheck"
    settings = cache.engine(engine_settings)
    settings = replace(
        settings,
        kv_transfer={
            **STOCK,
            "kv_connector_extra_config": {"lmcache.mp.heartbeat_interval": 0.5, "lmcache.mp.mq_timeout": 5.0},
        },
    )
    prompts = [harness.tokens(1500, seed=20 + number) for number in range(3)]
    with ProcessScope() as scope:
        log = tmp_path / "server.log"
        server = scope.start(command, log)
        wait_until_healthy(server, address, log)
        with harness.engine(tmp_path / "engine", settings) as engine:
            before = [generate(engine, prompt) for prompt in prompts]
            for prompt, completion in zip(prompts, before, strict=True):
                reference(prompt, completion)
            assert generate(engine, prompts[0]).cached_tokens > 0
            assert eventually(lambda: cache.status()["disk_bytes"] > 0)
            time.sleep(2.0)  # write-through is behind by what the disk has in hand
            names = [engine.submit(prompt, 60) for prompt in prompts]
            time.sleep(0.3)
            server.send_signal(signal.SIGKILL)
            server.wait()
            done = dict(engine.next_completion() for _ in names)
            assert [done[name].tokens[:8] for name in names] == [completion.tokens for completion in before]
            without = generate(engine, prompts[1])
            assert (without.cached_tokens, without.tokens) == (0, before[1].tokens)
            server = scope.start(command, log)
            wait_until_healthy(server, address, log)

            def hits_again() -> bool:
                time.sleep(1.0)
                answer = generate(engine, prompts[2])
                assert answer.tokens == before[2].tokens
                return answer.cached_tokens > 0

            assert eventually(hits_again, 60.0), "the new server serves what the disk held"
            rewind = prompts[2][:900] + harness.tokens(100, seed=30)
            answer = generate(engine, rewind)
            assert answer.cached_tokens == 900 // INTERVAL * INTERVAL
            reference(rewind, answer)
        # vLLM comes back as well, to a server that has nothing but its disk.
        server.send_signal(signal.SIGTERM)
        server.wait()
        server = scope.start(command, log)
        wait_until_healthy(server, address, log)
        with harness.engine(tmp_path / "second", settings) as engine:
            for prompt, completion in zip(prompts, before, strict=True):
                answer = generate(engine, prompt)
                assert answer.cached_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                assert answer.tokens == completion.tokens


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"arguments": {"enable_prefix_caching": False}}, "prefix caching"),
        ({"environment": {"HISTATE_INTERVALL": "256"}}, "HISTATE_INTERVAL"),
    ],
)
def test_a_set_up_that_cannot_work_is_refused_with_the_remedy(
    tmp_path: Path, engine_settings: EngineSettings, change: dict[str, Any], remedy: str
) -> None:
    cache = Cache(tmp_path / "cache")
    settings = cache.engine(engine_settings)
    environment = {**settings.environment, **change.get("environment", {})}
    settings = replace(settings, arguments=change.get("arguments", {}), environment=environment)
    with pytest.raises(StartError) as refused, harness.engine(tmp_path, settings):
        pass
    assert remedy in str(refused.value)


def test_without_the_variable_the_stock_connector_stays(tmp_path: Path, engine_settings: EngineSettings) -> None:
    nobody = {"lmcache.mp.port": free_ports(1)[0], "lmcache.mp.mq_timeout": 2.0}
    settings = replace(engine_settings, kv_transfer={**STOCK, "kv_connector_extra_config": nobody})
    with pytest.raises(StartError) as refused, harness.engine(tmp_path, settings):
        pass
    log = (tmp_path / "engine.log").read_text()
    assert "LMCacheMPConnector" in log
    assert "HiStateConnector" not in log
    assert "reach" in str(refused.value)
