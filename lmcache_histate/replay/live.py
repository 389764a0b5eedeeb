"""Runs a workload on a real engine in one of several configurations, all given the same pool, memory and disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmcache_histate.replay.cache_server import GIB, CacheServer, CacheServerSettings, start_cache_server
from lmcache_histate.replay.engine import EngineProcess, EngineSettings
from lmcache_histate.replay.outcome import RequestOutcome, RunOutcome
from lmcache_histate.replay.processes import ProcessScope, free_ports
from lmcache_histate.replay.workload import Step, Transcripts, ready_steps

CPU_TRANSFER: Mapping[str, Any] = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
"""The only transfer of LMCache that serves several KV groups on CPU."""

_WARM_UP_TOKEN = 300  # outside the text tokens, so that the warm-up shares no prefix with the workload
_WARM_UP_TOKENS = 256


@dataclass(frozen=True)
class Capacity:
    """Space for cached state, the same for every back end that has the tier.

    Attributes:
        pool_blocks: Blocks of vLLM's own pool (the GPU's memory in a real deployment).
        memory_bytes: CPU memory.
        disk_bytes: Disk.
    """

    pool_blocks: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Prepared:
    """A back end about to be used.

    Attributes:
        engine: The engine with its connector.
        server: A server that must answer before the engine is built.
        disk: Folder of the disk tier.
    """

    engine: EngineSettings
    server: CacheServer | None = None
    disk: Path | None = None


@dataclass(frozen=True)
class Backend:
    """One configuration under comparison.

    Attributes:
        name: Word for command lines and files.
        title: Words for tables.
        prepare: Starts what it needs beside the engine, in the scope and the folder given.
    """

    name: str
    title: str
    prepare: Callable[[ProcessScope, Path, EngineSettings, Capacity], Prepared]


def _connector(
    engine: EngineSettings,
    name: str,
    module: str,
    extra: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> EngineSettings:
    transfer = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra),
    }
    return replace(engine, kv_transfer=transfer, environment={**engine.environment, **(environment or {})})


def _vllm(scope: ProcessScope, folder: Path, engine: EngineSettings, capacity: Capacity) -> Prepared:
    return Prepared(engine)


def _stock_lmcache(scope: ProcessScope, folder: Path, engine: EngineSettings, capacity: Capacity) -> Prepared:
    server = start_cache_server(
        scope, folder, CacheServerSettings(engine.block_tokens, capacity.memory_bytes, capacity.disk_bytes)
    )
    extra = {
        **CPU_TRANSFER,
        "lmcache.mp.host": "tcp://localhost",
        "lmcache.mp.port": server.port,
        # Off by default; an agent's next prompt contains the answer, so a fair baseline has it on.
        "lmcache.mp.save_decode_cache": True,
    }
    connector = _connector(engine, "CpuHybridConnector", "lmcache_histate.connector.cpu", extra)
    return Prepared(connector, server, server.disk)


def _histate(scope: ProcessScope, folder: Path, engine: EngineSettings, capacity: Capacity) -> Prepared:
    """HiState as a user switches it on: one file named by ``LMCACHE_CONFIG``; vLLM starts the server."""
    port, http_port = free_ports(2)
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    config = folder / "histate.yaml"
    settings = {
        "max_local_cpu_size": capacity.memory_bytes / GIB,
        "local_disk": disk.resolve().as_uri(),
        "max_local_disk_size": capacity.disk_bytes / GIB,
        "server_url": f"tcp://localhost:{port}",
        "http_port": http_port,
        "server_args": ["--disable-metrics", "--no-l1-use-lazy"],
    }
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()))
    environment = {"LMCACHE_CONFIG": str(config)}
    connector = _connector(engine, "HiStateConnector", "lmcache_histate.connector.histate_connector", {}, environment)
    return Prepared(connector, disk=disk)


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("vllm", "vLLM alone", _vllm),
        Backend("lmcache", "LMCache (LRU)", _stock_lmcache),
        Backend("histate", "HiState", _histate),
    )
}
"""The configurations that can be compared, by name."""


def run_backend(
    backend: Backend,
    script: Sequence[Step],
    engine: EngineSettings,
    capacity: Capacity,
    folder: Path,
    reference: RunOutcome | None = None,
    logprobs: int = 5,
    in_flight: int = 1,
    on_start: Callable[[], object] | None = None,
    on_request: Callable[[RequestOutcome], object] | None = None,
) -> RunOutcome:
    """Start a back end from nothing, run the workload, and stop everything again.

    Args:
        backend: Which one.
        script: The workload.
        engine: The engine without a connector.
        capacity: Space for cached state.
        folder: Receives logs and the disk tier; what an earlier run left there is deleted.
        reference: A run whose answers the conversations continue with, so that both serve the same prompts even where
            rounding made an answer differ; this run's own answers if None.
        logprobs: Most likely tokens to record for each output token.
        in_flight: Requests at the same time.
        on_start: Called when the engine is ready.
        on_request: Called after each request.

    Returns:
        One outcome per step.

    Raises:
        StartError: Something did not start.
        EngineDied: The engine's process ended.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # vLLM refuses a pool that could not hold one request of the longest length allowed.
    longest = max(_WARM_UP_TOKENS, *(step.prompt_tokens + step.answer_tokens for step in script))
    engine = replace(engine, blocks=capacity.pool_blocks, max_model_len=min(engine.max_model_len, longest + 1))
    started = time.monotonic()
    with ProcessScope() as scope:
        prepared = backend.prepare(scope, folder, engine, capacity)
        process = EngineProcess(scope, prepared.engine, folder / "engine.log")
        facts = process.connect(prepared.server.wait if prepared.server is not None else None)
        # The first step of an engine sets up its kernels.
        process.generate([[_WARM_UP_TOKEN] * _WARM_UP_TOKENS], max_tokens=4, logprobs=logprobs)
        ready = time.monotonic()
        if on_start is not None:
            on_start()
        answers = {request.index: request.tokens for request in reference.requests} if reference is not None else None
        outcomes = run_script(process, script, answers, logprobs, in_flight, on_request)
        finished = time.monotonic()
        if prepared.disk is not None:
            facts["disk_bytes_at_end"] = sum(
                entry.stat().st_size for entry in prepared.disk.rglob("*") if entry.is_file()
            )
        process.stop()
    return RunOutcome(backend.name, tuple(outcomes), ready - started, finished - ready, facts)


def run_script(
    engine: EngineProcess,
    script: Sequence[Step],
    answers: Mapping[int, Sequence[int]] | None = None,
    logprobs: int = 5,
    in_flight: int = 1,
    on_request: Callable[[RequestOutcome], object] | None = None,
) -> list[RequestOutcome]:
    """Send a script to an engine that is ready.

    Args:
        engine: The engine.
        script: The workload.
        answers: By step, what conversations continue with instead of what the engine answers.
        logprobs: Most likely tokens to record for each output token.
        in_flight: Requests at the same time; sessions wait for their own answers in any case.
        on_request: Called after each request.

    Returns:
        One outcome per step, in the order of the script.
    """
    transcripts = Transcripts()
    waiting = list(script)
    running: dict[str, tuple[Step, list[int]]] = {}
    outcomes = []
    while waiting or running:
        busy = {step.session for step, _ in running.values()}
        if len(running) < in_flight and (step := ready_steps(waiting, busy)) is not None:
            waiting.remove(step)
            prompt = transcripts.prompt(step)
            running[engine.submit(prompt, step.answer_tokens, logprobs)] = (step, prompt)
            continue
        name, completion = engine.next_completion()
        step, prompt = running.pop(name)
        answer = completion.tokens if answers is None else answers[step.index]
        transcripts.answered(step, prompt, answer)
        outcome = RequestOutcome(
            index=step.index,
            session=step.session,
            kind=step.kind.value,
            prompt_tokens=len(prompt),
            known_tokens=step.known,
            hit_tokens=completion.cached_tokens,
            ttft_s=completion.ttft_s,
            seconds=completion.seconds,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
        )
        outcomes.append(outcome)
        if on_request is not None:
            on_request(outcome)
    return sorted(outcomes, key=lambda outcome: outcome.index)
