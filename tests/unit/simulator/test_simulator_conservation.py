"""What holds for every policy on every trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from small_traces import KV_BYTES, random_traces, settings

from lmcache_histate.replay.results import Run
from lmcache_histate.replay.simulator import POLICIES, simulate
from lmcache_histate.replay.simulator.engine import Engine
from lmcache_histate.replay.traces.model import Trace


def figures(run: Run) -> Any:
    facts = msgspec.to_builtins(run.facts)
    facts["settings"].pop("wall_seconds")
    return facts, msgspec.to_builtins(run.requests)


LIMITS = {"cpu": 40, "disk": 80, "remote": 30}
"""Blocks of KV that the tiers of `settings` hold."""


def check_room(engine: Engine, limited: bool) -> None:
    """No tier holds more than its capacity."""
    held = engine._tiers.occupancy()
    for tier, blocks in LIMITS.items():
        kv, snapshots = held.kv.get(tier, 0.0), held.snapshots.get(tier, 0.0)
        assert min(kv, snapshots) >= 0
        assert not limited or kv + snapshots <= blocks * KV_BYTES, tier
    pool = engine._pool
    assert 0 <= pool.cached[0] + pool.cached[1] * pool.state_blocks <= pool.blocks
    for memory in pool._memory:
        assert min(memory.free, memory.queued) >= 0


FAST = ("vllm", "cpu-disk", "hicache", "gdsf", "s3fifo", "histate-fixed-4k", "offline", "unlimited")
"""One of each family; the others take longer together than a quick run of tests may."""


@pytest.mark.parametrize(
    "policy", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
def test_capacities_causes_and_determinism(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Engine._schedule

    def watched(engine: Engine) -> int:
        check_room(engine, limited=policy != "unlimited")
        return schedule(engine)

    monkeypatch.setattr(Engine, "_schedule", watched)

    @given(random_traces(), st.sampled_from([0, 3]), st.booleans())
    @hypothesis_settings(max_examples=8, deadline=None)
    def check(trace: Trace, seed: int, remote: bool) -> None:
        chosen = settings(policy, seed=seed, remote_bytes=LIMITS["remote"] * KV_BYTES if remote else 0.0)
        run = simulate(trace, chosen)
        assert len(run.requests) == len(trace.requests)
        for one, asked in zip(run.requests, trace.requests, strict=True):
            assert (one.stream, one.prompt_tokens) == (asked.stream, asked.prompt_tokens)
            assert 0 <= one.hit_tokens <= one.reusable_tokens < one.prompt_tokens
            lost = one.recomputed_kv_gone + one.recomputed_snapshot_gone + one.recomputed_never_saved
            assert lost == one.reusable_tokens - one.hit_tokens
            assert one.disk_tokens + one.remote_tokens <= one.hit_tokens
            assert 0 < one.ttft_s <= one.seconds
        for count in run.facts.evictions:
            assert 0 <= count.missed_later <= count.objects
        assert figures(simulate(trace, chosen)) == figures(run)

    check()


@given(random_traces())
@hypothesis_settings(max_examples=8, deadline=None)
def test_with_one_session_at_a_time_the_unlimited_cache_hits_all_that_can_be_reused(trace: Trace) -> None:
    run = simulate(trace, settings("unlimited", sessions=1))
    # Streams of one session may overlap; here every session has one, so nothing is in flight twice.
    assert [one.hit_tokens for one in run.requests] == [one.reusable_tokens for one in run.requests]
    total = sum(one.hit_tokens for one in run.requests)
    for policy in ("vllm", "cpu-disk", "fixed-4k", "marconi", "histate-fixed-4k", "offline"):
        other = simulate(trace, settings(policy, sessions=1))
        assert sum(one.hit_tokens for one in other.requests) <= total
        assert [one.reusable_tokens for one in other.requests] == [one.reusable_tokens for one in run.requests]
