"""Two tensor-parallel ranks in a real vLLM: each rank's half is saved, moved to disk and restored with the other's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import LOGPROBS, Cache, eventually, generate
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_histate.backends.disk.record import HEADER_BYTES, SUFFIX, decode_header
from lmcache_histate.replay.engine import EngineSettings
from lmcache_histate.replay.processes import ProcessScope
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS, TinyModelSpec, ensure_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # three engines of three processes each

RANKS = 2
INTERVAL = 256


@pytest.fixture(scope="module")
def engine_settings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """An engine of two worker processes. Its heads divide by two, unlike the default model's."""
    spec = TinyModelSpec(attention_heads=12, kv_heads=6)
    return EngineSettings(
        model=ensure_tiny_model(tiny_model.parent / "tiny-even-heads", spec),
        blocks=600,
        arguments={"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"},
        environment={
            # vLLM binds each rank to a NUMA node of its own, and refuses to start where there are fewer.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The path of a local socket must be short; the folder of a test's logs is not.
            "VLLM_RPC_BASE_PATH": str(tmp_path_factory.mktemp("ipc")),
        },
    )


def processes(scope: ProcessScope, name: str) -> list[int]:
    """Living processes of a scope whose command line holds `name`."""
    found = []
    for pid in scope.pids():
        with suppress(OSError):  # it has ended since
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def end_server(scope: ProcessScope) -> None:
    """End the server in order, as its administrator would."""
    (server,) = processes(scope, "lmcache.v1.multiprocess")
    os.kill(server, signal.SIGTERM)
    assert eventually(lambda: server not in scope.pids())


def records(disk: Path) -> dict[bytes, dict[int, dict[int, Path]]]:
    """Everything on disk: chunk hash -> object group -> rank as LMCache writes it -> file."""
    found: dict[bytes, dict[int, dict[int, Path]]] = {}
    for path in disk.rglob(f"*{SUFFIX}"):
        with path.open("rb") as file:
            name = decode_header(file.read(HEADER_BYTES)).object_id
        found.setdefault(name.chunk_hash, {}).setdefault(name.group, {})[name.kv_rank] = path
    return found


def whole(disk: Path, prompt: list[int], snapshots: set[int]) -> bool:
    """Whether the disk has both ranks' KV of every chunk of a prompt, and their snapshots at these positions alone."""
    stored = records(disk)
    chunk_hashes = TokenHasher(BLOCK_TOKENS).compute_chunk_hashes(prompt)
    groups = [stored.get(chunk_hash, {}) for chunk_hash in chunk_hashes]
    return all(
        len(groups[index]) == (2 if (index + 1) * BLOCK_TOKENS in snapshots else 1)
        and all(len(halves) == RANKS for halves in groups[index].values())
        for index in range(len(groups))
    )


def damage(path: Path) -> None:
    """Change one byte in the middle of a record's payload."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + (path.stat().st_size - HEADER_BYTES) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_both_ranks_are_saved_moved_and_restored_together(
    tmp_path: Path, engine_settings: EngineSettings, reference: Callable[..., Any]
) -> None:
    cache = Cache(tmp_path / "cache", interval=INTERVAL, write_through=True)
    base = harness.tokens(2500, seed=1)
    disk = cache.folder / "disk"
    final = (len(base) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with ProcessScope() as scope:
        with harness.engine(tmp_path / "first", cache.engine(engine_settings), scope=scope) as engine:
            assert len(processes(scope, "VLLM::Worker_TP")) == RANKS
            first = generate(engine, base)
            assert first.cached_tokens == 0
            reference(base, first)
            again = generate(engine, base)
            assert (again.cached_tokens, again.tokens) == (final, first.tokens)
            # Historical snapshots move to disk and leave CPU memory, both halves of each; the hits below come from there.
            stops = range(INTERVAL, final, INTERVAL)
            assert eventually(lambda: cache.status()["demoted_snapshots"] >= len(stops)), cache.status()
            for position in (2400, 2304, 2303, 700, 255):
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
            assert eventually(lambda: whole(disk, base, {*stops, final})), "both halves of everything reach the disk"
            assert cache.status()["errors"] == 0
        # vLLM is gone with its workers; the server that rank 0 had started goes on, until it is told to end.
        assert eventually(lambda: not processes(scope, "VLLM::Worker_TP"))
        end_server(scope)
        # A snapshot of which one rank's half is damaged is none.
        broken = 2048
        before, at = TokenHasher(BLOCK_TOKENS).compute_chunk_hashes(base[:broken])[-2:]
        stored = records(disk)
        (snapshot,) = stored[at].keys() - stored[before].keys()
        damage(stored[at][snapshot][max(stored[at][snapshot])])
        # vLLM comes back, to a server that has nothing but its disk, and with a pool too small for what is asked at once.
        tight = replace(cache.engine(engine_settings), blocks=90, max_step_tokens=512, max_model_len=4096)
        with harness.engine(tmp_path / "second", tight, scope=scope) as engine:
            warm = generate(engine, base)
            assert (warm.cached_tokens, warm.tokens) == (final, first.tokens)
            edited = base[: broken + 100] + harness.tokens(100, seed=3)
            answer = generate(engine, edited)
            assert answer.cached_tokens < broken
            reference(edited, answer)
            assert generate(engine, edited).cached_tokens > broken, "what was computed again is kept again"
            prompts = [harness.tokens(1100 + 64 * number, seed=10 + number) for number in range(4)]
            completions = engine.generate(prompts, 150, logprobs=LOGPROBS)
            assert "<preempted>" in (tmp_path / "second" / "engine.log").read_text()
            for prompt, completion in zip(prompts, completions, strict=True):
                reference(prompt, completion)
                assert generate(engine, prompt).cached_tokens == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert cache.status()["errors"] == 0
