"""vLLM alone and stock LMCache on a miniature agent workload: the ground that every comparison stands on."""

from pathlib import Path

import pytest

from lmcache_histate.replay.engine import EngineSettings
from lmcache_histate.replay.live import BACKENDS, Capacity, run_backend
from lmcache_histate.replay.outcome import compare_outputs
from lmcache_histate.replay.workload import MINIATURE, make_script

pytestmark = pytest.mark.engine

# A pool for hardly more than one conversation, so that the second back end has something to restore.
CAPACITY = Capacity(pool_blocks=36, memory_bytes=256 << 20, disk_bytes=256 << 20)


def test_stock_lmcache_restores_what_the_pool_lost_and_answers_alike(engine_settings: EngineSettings, tmp_path: Path):
    script = make_script(MINIATURE)
    alone = run_backend(BACKENDS["vllm"], script, engine_settings, CAPACITY, tmp_path / "vllm")
    stock = run_backend(BACKENDS["lmcache"], script, engine_settings, CAPACITY, tmp_path / "lmcache", reference=alone)

    assert [request.index for request in stock.requests] == [step.index for step in script]
    assert [request.prompt_tokens for request in stock.requests] == [step.prompt_tokens for step in script]
    assert all(request.hit_tokens <= request.known_tokens for request in (*alone.requests, *stock.requests))
    assert sum(request.hit_tokens for request in stock.requests) > sum(request.hit_tokens for request in alone.requests)
    verdict = compare_outputs(stock.requests, alone.requests)
    assert not verdict.wrong, verdict

    for run in ("vllm", "lmcache"):
        pids = _pids_of(tmp_path / run)
        assert not pids, f"left behind: {pids}"


def _pids_of(folder: Path) -> list[int]:
    """Processes whose command line or open log mentions a run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
