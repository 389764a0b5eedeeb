"""What HiState adds to a scheduler step and to a new request, at 64 running requests with 128K-token prompts.

    python -m benchmarks.scheduler_step

vLLM's real `Scheduler` runs with the real connectors and a server that holds nothing; no engine starts. HiState's
methods call stock LMCache's, so its share is the time of its method less the time of the one inside it: both are taken
in the same call, on the thread's own CPU clock, so that other programs on the machine do not make the tail. "Every
block" plans a stop at every block of every prompt, which no interval setting exceeds.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
# The scheduler without an engine is a fixture of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "connector"))

import numpy as np
from engine_model import (
    STOCK,
    SchedulerAdapter,
    Server,
    build_config,
    cache_groups,
    tokens,
)
from lmcache.integration.vllm import lmcache_mp_connector
from rich.console import Console
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_histate.protocol import PlacementFacts

RUNNING, PROMPT_TOKENS, BLOCK = 64, 128 * 1024, 528
BUDGET, WIDE_BUDGET = 8192, 128 * 1024
"""Tokens in a measured prefill step, and in those that only bring all requests to where the measurement starts."""
PREFILL_STEPS, DECODE_STEPS, NEW_REQUESTS, WARM_UP = 300, 1000, 500, 20
STEP_BAR_MS, REQUEST_BAR_MS = 0.2, 1.0


class Clocked:
    """Times a connector's method and the stock method that it calls inside; keeps both of every call, in ms."""

    def __init__(self, connector: Any, name: str) -> None:
        self.total: list[float] = []
        self.stock: list[float] = []
        self._inside = 0.0
        stock = getattr(lmcache_mp_connector.LMCacheMPConnector, name)

        def timed_stock(*arguments: Any) -> Any:
            begin = thread_time()
            result = stock(*arguments)
            self._inside = thread_time() - begin
            return result

        self.patches = patch.object(lmcache_mp_connector.LMCacheMPConnector, name, timed_stock)
        self.patches.start()
        whole = getattr(connector, name)

        def timed(*arguments: Any) -> Any:
            begin = thread_time()
            result = whole(*arguments)
            self.total.append((thread_time() - begin) * 1e3)
            self.stock.append(self._inside * 1e3)
            return result

        setattr(connector, name, timed)

    def cut(self) -> tuple[np.ndarray, np.ndarray]:
        """Stock's and HiState's share of the calls since the last cut, without the first few."""
        total, stock = np.array(self.total[WARM_UP:]), np.array(self.stock[WARM_UP:])
        self.total.clear()
        self.stock.clear()
        return stock, total - stock


def build(folder: Path, connector: str, interval: int | str) -> Scheduler:
    """A scheduler whose server answers every lookup with a miss."""
    os.environ["HISTATE_INTERVAL"], os.environ["HISTATE_AUTOSTART"] = str(interval), "false"
    # Qwen3.5-9B: a snapshot weighs as much as 1,572 tokens of KV.
    server = Server(BLOCK, deaf=True, facts=PlacementFacts(snapshot_tokens=1572.0))
    blocks = RUNNING * (PROMPT_TOKENS // BLOCK + 16)
    with patch.object(
        lmcache_mp_connector, "LMCacheMPSchedulerAdapter", type("Adapter", (SchedulerAdapter,), {"server": server})
    ):
        config = build_config(folder, BLOCK, WIDE_BUDGET, blocks, False, connector)
        return Scheduler(config, cache_groups(BLOCK, blocks), StructuredOutputManager(config), BLOCK)


def step(scheduler: Scheduler) -> float:
    """Schedule one step and answer it; returns the milliseconds that scheduling took."""
    begin = perf_counter()
    output = scheduler.schedule()
    took = (perf_counter() - begin) * 1e3
    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[
                [7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
            ],
        ),
    )
    return took


def measure(folder: Path, connector: str, interval: int | str) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Phase -> (stock's share, HiState's share, whole `schedule()`), in ms a call."""
    scheduler = build(folder, connector, interval)
    steps = Clocked(scheduler.connector, "build_connector_meta")
    lookups = Clocked(scheduler.connector, "get_num_new_matched_tokens")
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    body = tokens(0, PROMPT_TOKENS)

    def request(index: int, hashed: Callable[[Request], Any] | None) -> Request:
        # The first token tells the prompts apart; a few tokens in length keep their block boundaries apart.
        prompt = [index, *body[8 * index % BLOCK + 1 :]]
        return Request(
            f"r{index}", prompt, SamplingParams(max_tokens=10**5, ignore_eos=True), None, block_hasher=hashed
        )

    try:
        for index in range(RUNNING):
            scheduler.add_request(request(index, hasher))
        result = {}
        gc.disable()
        while len(scheduler.running) < RUNNING:
            step(scheduler)
        steps.cut()
        scheduler.max_num_scheduled_tokens = BUDGET
        whole = [step(scheduler) for _ in range(PREFILL_STEPS)]
        result["prefill step"] = (*steps.cut(), np.array(whole))
        scheduler.max_num_scheduled_tokens = WIDE_BUDGET
        for plan in getattr(getattr(scheduler.connector, "_planner", None), "_plans", {}).values():
            plan.stops = ()  # the rest of the prompts is not measured
        while any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.requests.values()):
            step(scheduler)
        steps.cut()
        whole = [step(scheduler) for _ in range(DECODE_STEPS)]
        result["decode step"] = (*steps.cut(), np.array(whole))
        lookups.cut()
        for index in range(RUNNING, RUNNING + NEW_REQUESTS):
            scheduler.connector.get_num_new_matched_tokens(request(index, None), 0)
        result["new request"] = (*lookups.cut(), np.array([]))
    finally:
        gc.enable()
        for clocked in (steps, lookups):
            clocked.patches.stop()
    return result


def run() -> None:
    """Print the table; exits with 1 when a bar is missed."""
    logging.disable(logging.WARNING)
    console = Console(width=140 if not sys.stdout.isatty() else None)
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            name: measure(Path(folder), connector, interval)
            for name, connector, interval in (
                ("stock LMCache", STOCK, "final-only"),
                ("HiState, adaptive", "HiStateConnector", "adaptive"),
                ("HiState, every block", "HiStateConnector", BLOCK),
            )
        }
    table = Table(
        title=f"{RUNNING} running requests, {PROMPT_TOKENS // 1024}K-token prompts, blocks of {BLOCK}; ms a call"
    )
    for column in (
        "",
        "",
        "stock p50",
        "stock p99",
        "added p50",
        "added p99",
        "added / stock",
        "whole schedule p50",
        "bar",
    ):
        table.add_column(column, justify="left" if not column else "right")
    missed = False
    for phase, bar in (("prefill step", STEP_BAR_MS), ("decode step", STEP_BAR_MS), ("new request", REQUEST_BAR_MS)):
        for name, phases in measured.items():
            stock, added, whole = phases[phase]
            own = name != "stock LMCache"
            worst = float(np.percentile(added, 99))
            missed |= own and worst > bar
            table.add_row(
                phase,
                name,
                f"{np.percentile(stock, 50):.3f}",
                f"{np.percentile(stock, 99):.3f}",
                f"{np.percentile(added, 50):.4f}" if own else "",
                f"{worst:.4f}" if own else "",
                f"{added.sum() / stock.sum():.3f}" if own else "",
                f"{np.percentile(whole, 50):.3f}" if len(whole) else "",
                f"p99 <= {bar}: {'missed' if worst > bar else 'met'}" if own else "",
            )
        table.add_section()
    console.print(table)
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    run()
