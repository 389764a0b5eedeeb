"""Time, hits and causes on traces that can be followed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from small_traces import BLOCK, KV_BYTES, STATE_BYTES, TIMES, hashes, request, settings, trace

from lmcache_histate.replay.results import RequestResult, Run, read_run, write_run
from lmcache_histate.replay.simulator import SimulationSettings, StuckError, simulate
from lmcache_histate.replay.simulator.hardware import GPUS, MODELS, Link, StepTimes
from lmcache_histate.replay.simulator.prompts import PreparedTrace
from lmcache_histate.replay.traces.model import Stream, Trace, TraceRequest


def run(policy: str, *requests: TraceRequest, **changes: object) -> list[RequestResult]:
    return simulate(trace(requests), settings(policy, times=TIMES, **changes)).requests


# -- time ---------------------------------------------------------------------------------------------------------------


def test_one_request_takes_its_steps():
    # 20 blocks and a token, steps of 8,192: 14 whole blocks, then 6 up to the boundary, then the last token.
    (one,) = run("vllm", request("a", hashes(("a", 20)), output=11))
    steps = [8064, 3456, 1]
    assert one.ttft_s == pytest.approx(sum(0.01 + 1e-5 * tokens for tokens in steps))
    # Ten more tokens, one a step.
    assert one.seconds == pytest.approx(one.ttft_s + 10 * (0.01 + 1e-5))


def test_a_stop_costs_a_step():
    (one,) = run("fixed-4k", request("a", hashes(("a", 20))))
    # Every 8 blocks (4,608 tokens), and the prompt's last boundary.
    assert one.ttft_s == pytest.approx(sum(0.01 + 1e-5 * tokens for tokens in (4608, 4608, 2304, 1)))


def test_a_hit_computes_only_the_rest_and_waits_for_the_load():
    first = hashes(("a", 10))
    longer = hashes(("a", 10), ("b", 2))
    # A pool of 17 blocks: the other session pushes the first one out of the GPU, CPU memory keeps it.
    one, _, again = run(
        "cpu",
        request("a", first, output=1),
        request("x", hashes(("x", 9)), output=1),
        request("a", longer, output=1, think_s=60.0),
        gpu_bytes=17.5 * KV_BYTES,
        sessions=2,
    )
    assert (one.hit_tokens, one.reusable_tokens) == (0, 0)
    assert (again.hit_tokens, again.reusable_tokens) == (10 * BLOCK, 10 * BLOCK)
    load = (10 * KV_BYTES + STATE_BYTES) / 64e9
    assert again.ttft_s == pytest.approx(load + 0.01 + 2 * BLOCK * 1e-5 + 0.01 + 1e-5)


def test_what_the_disk_has_comes_at_the_disk_s_pace():
    first = hashes(("a", 10))
    *_, again = run(
        "cpu-disk",
        request("a", first, output=1),
        request("x", hashes(("x", 11)), output=1),
        request("a", first, output=1, think_s=60.0),
        gpu_bytes=15.5 * KV_BYTES,
        cpu_bytes=14 * KV_BYTES,
        sessions=2,
    )
    assert (again.hit_tokens, again.disk_tokens) == (10 * BLOCK, 10 * BLOCK)
    assert again.ttft_s == pytest.approx((10 * KV_BYTES + STATE_BYTES) / 5e9 + 0.01 + 1e-5, rel=0.02)


def test_decoding_in_closed_form_is_decoding_step_by_step():
    times = StepTimes.of(MODELS["qwen3.5-9b"], GPUS["h100"])
    contexts, decoding = 250_000.0, 3
    slow, now = [], 0.0
    for step in range(400):
        now += times.step(decoding, 0.0, decoding, contexts + decoding * step)
        slow.append(now)
    assert times.decode_steps(decoding, contexts, 400) == pytest.approx(slow[-1])
    for seconds in (0.0, 1e-6, slow[0], slow[57] - 1e-9, slow[57] + 1e-9):
        steps = times.steps_within(decoding, contexts, seconds)
        assert steps == max(1, int(np.searchsorted(slow, seconds)) + 1)


def test_a_link_serves_one_after_the_other():
    link = Link(100.0)
    assert link.transfer(200, 1.0) == 3.0
    assert link.transfer(100, 1.5) == 4.0
    assert link.transfer(100, 9.0) == 10.0
    assert link.transfer(0, 9.5) == 9.5
    assert link.nbytes == 400


def test_requests_wait_for_blocks_and_go_in_order():
    big = request("a", hashes(("a", 30)), output=1000)
    results = run("vllm", big, request("b", hashes(("b", 30)), output=1), gpu_bytes=40 * KV_BYTES, sessions=2)
    assert results[1].sent_s + results[1].ttft_s > results[0].sent_s + results[0].seconds


def test_a_prompt_that_never_fits_is_an_error():
    with pytest.raises(StuckError, match=r"stream a needs 21 blocks .* the pool has 20"):
        run("vllm", request("a", hashes(("a", 20))), gpu_bytes=20 * KV_BYTES)


# -- sessions ---------------------------------------------------------------------------------------------------------------


def test_think_times_sub_agents_and_sessions_at_once():
    requests = [
        request("main", hashes(("a", 2)), output=1),
        request("sub", hashes(("s", 2)), output=1, think_s=3.0),
        request("main", hashes(("a", 4)), output=1, think_s=7.0),
        request("other", hashes(("o", 2)), output=1),
    ]
    told = trace(requests)
    streams = {"main": Stream("main"), "sub": Stream("main", after=0), "other": Stream("other", start_s=500.0)}
    results = simulate(
        Trace(told.name, BLOCK, told.requests, streams), settings("vllm", times=TIMES, sessions=1)
    ).requests
    first, sub, second, other = results
    assert sub.sent_s == pytest.approx(first.sent_s + first.seconds + 3.0)
    assert second.sent_s == pytest.approx(first.sent_s + first.seconds + 7.0)
    assert other.sent_s == pytest.approx(second.sent_s + second.seconds), "a session begins when one has ended"
    assert {sub.session, first.session} == {"main"}


def test_the_seed_deals_the_sessions_anew():
    requests = [request(f"s{number}", hashes((f"s{number}", 2))) for number in range(8)]
    orders = set()
    for seed in range(4):
        results = run("vllm", *requests, seed=seed, sessions=1)
        orders.add(tuple(sorted(range(8), key=lambda index: results[index].sent_s)))
    assert len(orders) == 4
    assert tuple(range(8)) in orders


# -- answers ----------------------------------------------------------------------------------------------------------------


def test_the_next_prompt_tells_the_answer():
    first = request("a", hashes(("a", 3)), output=BLOCK * 2)
    same = request("a", hashes(("a", 3), ("answer", 2), ("b", 1)))
    prepared = PreparedTrace(trace([first, same]))
    assert prepared.prompts[0].nodes.tolist() == prepared.prompts[1].nodes.tolist()[:5]
    _, again = run("vllm", first, same)
    assert again.hit_tokens == 5 * BLOCK, "the answer's last boundary has a snapshot"
    rewound = request("a", hashes(("a", 2), ("c", 6)))
    prepared = PreparedTrace(trace([first, rewound]))
    assert not set(prepared.prompts[0].nodes[3:].tolist()) & set(prepared.prompts[1].nodes.tolist())


# -- hits and causes --------------------------------------------------------------------------------------------------------


def rewind(policy: str, **changes: object) -> RequestResult:
    """A session of 20 blocks goes back behind its eleventh."""
    *_, last = run(
        policy,
        request("a", hashes(("a", 20)), output=1),
        request("a", hashes(("a", 11), ("b", 3)), output=1),
        **changes,
    )
    assert last.reusable_tokens == 11 * BLOCK
    return last


def test_a_rewind_needs_a_snapshot():
    turn_ends = rewind("vllm")
    assert (turn_ends.hit_tokens, turn_ends.recomputed_never_saved) == (0, 11 * BLOCK)
    grid = rewind("fixed-4k")
    assert (grid.hit_tokens, grid.recomputed_never_saved) == (8 * BLOCK, 3 * BLOCK)
    assert rewind("dense").hit_tokens == 11 * BLOCK
    assert rewind("unlimited").hit_tokens == 11 * BLOCK
    assert rewind("offline").hit_tokens == 11 * BLOCK
    assert rewind("align-step-end").hit_tokens == 0, "the first step ends after 14 blocks"


def test_a_junction_serves_the_second_rewind():
    *_, first, second = run(
        "vllm",
        request("a", hashes(("a", 20)), output=1),
        request("a", hashes(("a", 11), ("b", 3)), output=1),
        request("a", hashes(("a", 11), ("c", 3)), output=1),
    )
    assert (first.hit_tokens, second.hit_tokens) == (0, 11 * BLOCK)


def test_causes_tell_kv_from_snapshots():
    # Of 13 blocks the second session takes 9 and a state's 3: of the first one the state goes, then KV but for one block.
    first = request("a", hashes(("a", 6)), output=1)
    other = request("x", hashes(("x", 8)), output=1)
    again = request("a", hashes(("a", 6), ("b", 1)), output=1, think_s=60.0)
    *_, last = run("vllm", first, other, again, gpu_bytes=13 * KV_BYTES, sessions=2)
    assert last.hit_tokens == 0
    assert last.recomputed_kv_gone == 5 * BLOCK
    assert last.recomputed_never_saved == BLOCK, "its KV is there, and no snapshot was ever closer"


# -- HiState ------------------------------------------------------------------------------------------------------------------


def occupancy(policy: str, *requests: TraceRequest, **changes: object) -> Run:
    return simulate(trace(requests), settings(policy, times=TIMES, **changes))


def test_historical_snapshots_move_to_disk_and_the_last_stays():
    told = occupancy(
        "histate-fixed-4k",
        request("a", hashes(("a", 25)), output=1),
        request("x", hashes(("x", 1)), output=1, think_s=0.0),
        request("x", hashes(("x", 2)), output=1, think_s=30.0),
    )
    last = told.facts.occupancy[-1]
    snapshot = int(STATE_BYTES)
    # Of a: 8, 16 and 24 are historical, 25 stays; of x: 1 will be in half a second, 2 stays.
    assert last.snapshots["disk"] == 3 * snapshot
    assert last.snapshots["cpu"] + last.snapshots["disk"] == 6 * snapshot
    assert last.kv["disk"] == 0
    one = request("a", hashes(("a", 25)), output=1)
    later = request("a", hashes(("a", 26)), output=1, think_s=9.0)
    roomy = {"cpu_bytes": 200 * KV_BYTES, "gpu_bytes": 84 * KV_BYTES}
    kept = occupancy("histate-no-disk-snapshots", one, later, **roomy).facts.occupancy[-1]
    moved = occupancy("histate", one, later, **roomy).facts.occupancy[-1]
    assert kept.snapshots["disk"] == 0 < moved.snapshots["disk"]


def test_a_rewind_loads_one_snapshot_from_disk():
    first, other = request("a", hashes(("a", 25)), output=1), request("x", hashes(("x", 30)), output=1)
    back = request("a", hashes(("a", 17), ("b", 1)), output=1, think_s=60.0)
    *_, last = run("histate-fixed-4k", first, other, back, sessions=2, gpu_bytes=36 * KV_BYTES, cpu_bytes=70 * KV_BYTES)
    assert last.hit_tokens == 16 * BLOCK
    assert last.disk_tokens == 0, "KV stays in CPU memory"
    assert last.ttft_s > STATE_BYTES / 5e9, "the snapshot comes from disk"


def test_what_was_stored_remotely_comes_back():
    first = request("a", hashes(("a", 10)), output=1)
    others = [request("x", hashes((f"x{number}", 20)), output=1, think_s=5.0) for number in range(4)]
    again = request("a", hashes(("a", 10), ("b", 1)), output=1, think_s=120.0)
    for policy in ("histate", "cpu-disk"):
        *_, last = run(
            policy,
            first,
            *others,
            again,
            sessions=2,
            gpu_bytes=26 * KV_BYTES,
            cpu_bytes=26 * KV_BYTES,
            disk_bytes=0.0,
            remote_bytes=500 * KV_BYTES,
        )
        assert last.hit_tokens == 10 * BLOCK, policy
        assert last.remote_tokens == 10 * BLOCK, policy


def test_the_offline_bound_keeps_what_comes_back():
    # Room for one session below the GPU: a never comes back, b does.
    a, b = request("a", hashes(("a", 12)), output=1), request("b", hashes(("b", 12)), output=1, think_s=1.0)
    later = request("c", hashes(("c", 12)), output=1)
    back = request("b", hashes(("b", 12), ("d", 1)), output=1, think_s=300.0)
    tiers = {"gpu_bytes": 18 * KV_BYTES, "cpu_bytes": 19 * KV_BYTES, "disk_bytes": 0.0, "sessions": 3}
    assert run("offline", a, b, later, back, **tiers)[-1].hit_tokens == 12 * BLOCK
    assert run("cpu", a, b, later, back, **tiers)[-1].hit_tokens == 0


# -- results and settings ---------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_was_and_survives_its_file(tmp_path):
    told = occupancy("histate", request("a", hashes(("a", 5))), seed=3)
    assert told.facts.policy == "histate"
    assert told.facts.seed == 3
    assert told.facts.capacities["cpu"] == 40 * KV_BYTES
    assert told.facts.settings["block_tokens"] == BLOCK
    assert told.facts.seconds > 0
    write_run(tmp_path / "run.jsonl.gz", told)
    assert read_run(tmp_path / "run.jsonl.gz").requests == told.requests


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="no policy 'best'; there are vllm"):
        SimulationSettings(policy="best")
    with pytest.raises(ValueError, match="sessions must be at least 1"):
        SimulationSettings(sessions=0)
    with pytest.raises(ValueError, match="no multiple of 576"):
        simulate(trace([request("a", hashes(("a", 1)))]), SimulationSettings(block_tokens=528))
