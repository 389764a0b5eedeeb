"""`histate replay` and `histate calibrate` against vLLM's own server, with HiState behind it, started as a user starts it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_histate.cli.main import app
from lmcache_histate.replay.comparison import CACHED_TOKENS_REPORTED
from lmcache_histate.replay.cost_model import read_cost_model
from lmcache_histate.replay.endpoint_client import EndpointClient
from lmcache_histate.replay.processes import ProcessScope, child_environment, free_ports, wait_until_healthy
from lmcache_histate.replay.results import Run, read_run, write_run
from lmcache_histate.replay.simulator import SimulationSettings, simulate
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS
from lmcache_histate.replay.traces.load import load_trace

pytestmark = pytest.mark.engine

MAX_MODEL_LEN = 2304
POOL_BLOCKS = 64
"""Little more than one sequence: what comes back later comes from HiState's tiers."""


@dataclass(frozen=True)
class Server:
    url: str


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's OpenAI server with stock LMCache's connector named, and HiState switched on by the environment."""
    folder = tmp_path_factory.mktemp("server")
    port, cache_port, http_port = free_ports(3)
    config = folder / "cache.yaml"
    config.write_text(
        "max_local_cpu_size: 0.5\n"
        f"local_disk: {(folder / 'disk').as_uri()}\n"
        "max_local_disk_size: 0.5\n"
        f"server_url: tcp://localhost:{cache_port}\n"
        f"http_port: {http_port}\n"
        "histate: {interval: 256}\n"
    )
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", str(BLOCK_TOKENS), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-batched-tokens", "2048", "--max-num-seqs", "8", "--enforce-eager"),
        *("--kv-transfer-config", json.dumps({"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"})),
    ]
    environment = child_environment(
        {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "TORCHDYNAMO_DISABLE": "1",
            "TMPDIR": str(folder),
            "LMCACHE_CONFIG": str(config),
        }
    )
    with ProcessScope() as scope:
        log = folder / "vllm.log"
        process = scope.start(argv, log, environment)
        wait_until_healthy(process, f"http://127.0.0.1:{port}/v1/models", log, 400)
        yield Server(f"http://127.0.0.1:{port}")


TRACE = "builtin:rewriting-10,share=0.4,sessions=3,turns=6"


def replay(server: Server, output: Path, *options: str) -> tuple[Run, str]:
    """`histate replay` of the rewriting test at 1/16 of its lengths; the result file and what was printed."""
    arguments = ["replay", TRACE, "--endpoint", server.url, "--output", str(output), "--scale", "1/16"]
    result = CliRunner().invoke(app, [*arguments, "--speedup", "1000", "--sessions", "2", *options])
    assert result.exit_code == 0, result.output
    return read_run(output), result.output


@pytest.fixture(scope="module")
def first(server: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """The trace on a server that has never seen it."""
    return replay(server, tmp_path_factory.mktemp("first") / "histate.jsonl.gz", "--name", "histate")


def test_a_trace_is_served_and_its_prefixes_hit(first: tuple[Run, str]) -> None:
    run, printed = first
    assert (run.facts.policy, run.facts.simulated) == ("histate", False)
    assert run.facts.settings[CACHED_TOKENS_REPORTED]
    assert not [result.error for result in run.requests if result.error]
    assert all(0 < result.ttft_s <= result.seconds for result in run.requests)  # a busy server sends tokens together
    assert all(result.output_tokens == 16 and result.answer for result in run.requests)
    assert all(result.hit_tokens % BLOCK_TOKENS == 0 for result in run.requests)
    # Nothing hits that was not sent before (up to a block: the trace's blocks are shorter than vLLM's).
    assert all(result.hit_tokens <= result.reusable_tokens < result.prompt_tokens for result in run.requests)
    assert sum(result.hit_tokens for result in run.requests) > 0.6 * sum(
        result.reusable_tokens for result in run.requests
    )
    assert "hit rate" in printed


def test_what_is_longer_than_the_server_takes_is_left_out_and_said(first: tuple[Run, str]) -> None:
    run, printed = first
    assert max(result.prompt_tokens + 16 for result in run.requests) <= MAX_MODEL_LEN
    assert run.facts.settings["streams_cut"] >= 1
    assert len(run.requests) + run.facts.settings["requests_left_out"] == 18
    assert "streams end early" in printed


def test_what_vllm_forgot_comes_from_histate(server: Server, first: tuple[Run, str], tmp_path: Path) -> None:
    forget(server)
    run, _ = replay(server, tmp_path / "again.jsonl.gz", "--requests", "6")
    sent = {(result.stream, result.prompt_tokens): result for result in first[0].requests}
    assert sent.keys() >= {(result.stream, result.prompt_tokens) for result in run.requests}
    starts = [result for result in run.requests if sent[result.stream, result.prompt_tokens].hit_tokens == 0]
    assert starts
    assert all(result.hit_tokens >= result.prompt_tokens - 2 * BLOCK_TOKENS for result in starts)
    # Another seed is another text.
    other, _ = replay(server, tmp_path / "other.jsonl.gz", "--seed", "1", "--requests", "1")
    assert other.requests[0].hit_tokens == 0


def test_calibration_measures_a_cost_model_that_the_simulator_takes(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "cost.yaml"
    options = ["--shortest", "128", "--longest", "1536", "--lengths", "3", "--repeats", "1"]
    result = CliRunner().invoke(app, ["calibrate", "--endpoint", server.url, "--output", str(file), *options])
    assert result.exit_code == 0, result.output
    model = read_cost_model(file)
    assert model.times.token_s > 0
    assert model.times.step(1, 0.0, 1, 128) > 0
    assert model.restore_token_s is not None  # vLLM's own cache was emptied: the hits were restored
    assert "Note: Hits came from" not in result.output
    simulated = simulate(load_trace(TRACE), SimulationSettings(policy="vllm", sessions=2, times=model.times))
    write_run(tmp_path / "simulated.jsonl.gz", simulated)
    live, _ = replay(server, tmp_path / "live.jsonl.gz", "--requests", "3", "--name", "vllm")
    report = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "report")])
    assert report.exit_code == 0, report.output
    page = (tmp_path / "report" / "index.html").read_text()
    assert "1 simulated and 1 live runs" in page
    assert live.facts.trace in page


def test_a_model_that_is_not_served_is_an_error(server: Server, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["replay", TRACE, "--endpoint", server.url, "--model", "big"])
    assert result.exit_code == 1
    assert "does not serve 'big'; it serves tiny" in result.output


def forget(server: Server) -> None:
    """Empty vLLM's own prefix cache, not HiState."""

    async def reset() -> bool:
        async with EndpointClient(server.url) as client:
            return await client.reset_prefix_cache()

    assert asyncio.run(reset())
