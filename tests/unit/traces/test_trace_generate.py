"""The built-in workloads have the statistics that they promise, and are fixed by their seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmcache_histate.replay.analysis import shared_blocks
from lmcache_histate.replay.traces.generate import AgentSpec, RewritingSpec, builtin_spec, generate_trace
from lmcache_histate.replay.traces.load import load_trace
from lmcache_histate.replay.traces.model import Trace, TraceRequest
from lmcache_histate.replay.traces.source import TraceError


def turns(trace: Trace) -> list[tuple[TraceRequest, TraceRequest, int]]:
    """(prompt before, prompt, leading blocks in common) of every request that is not the first of its stream."""
    last: dict[str, TraceRequest] = {}
    found = []
    for request in trace.requests:
        if (before := last.get(request.stream)) is not None:
            found.append((before, request, shared_blocks(before, request)))
        last[request.stream] = request
    return found


@pytest.fixture(scope="module")
def agents() -> Trace:
    return generate_trace(AgentSpec(sessions=160))


def test_agents_append_rewind_and_reset_as_published(agents: Trace) -> None:
    spec = AgentSpec()
    system = spec.system_tokens // 64
    kinds = {"append": 0, "reset": 0, "rewind": 0}
    back = []
    for before, _, common in turns(agents):
        if common == len(before.hashes):
            kinds["append"] += 1
        elif common <= system:
            kinds["reset"] += 1
        else:
            kinds["rewind"] += 1
            back.append(before.prompt_tokens + before.output_tokens - common * 64)
    total = sum(kinds.values())
    assert kinds["append"] / total == pytest.approx(0.97, abs=0.008)
    assert kinds["rewind"] / total == pytest.approx(0.027, abs=0.006)
    assert 0.002 < kinds["reset"] / total < 0.009
    assert np.median(back) == pytest.approx(51_000, rel=0.12)


def test_agents_think_as_long_as_published(agents: Trace) -> None:
    # Gaps of the agents' own streams: those of sub-agents are tools' times.
    gaps = [after.think_s for _, after, _ in turns(agents) if "agent-" not in after.stream]
    assert np.median(gaps) == pytest.approx(18, rel=0.1)
    assert np.percentile(gaps, 99) == pytest.approx(2134, rel=0.25)


def test_agents_have_sizes_like_claude_code(agents: Trace) -> None:
    prompts = [request.prompt_tokens for request in agents.requests]
    assert 60_000 < np.median(prompts) < 110_000
    assert max(prompts) <= AgentSpec().context_tokens
    appends = [(before, after) for before, after, common in turns(agents) if common == len(before.hashes)]
    grown = [after.prompt_tokens - before.prompt_tokens for before, after in appends]
    assert 500 < np.median(grown) < 1_500
    assert 180 < np.median([request.output_tokens for request in agents.requests]) < 320


def test_agents_share_system_prompts_fork_and_start_sub_agents(agents: Trace) -> None:
    firsts: dict[str, TraceRequest] = {}
    for request in agents.requests:
        firsts.setdefault(request.stream, request)
    spec = AgentSpec()
    own = [request for stream, request in firsts.items() if "/" not in stream]
    systems = {int(request.hashes[spec.system_tokens // 64 - 1]) for request in own}
    assert len(systems) == spec.system_prompts < len(own)
    for kind in ("fork", "agent"):
        children = {key: stream for key, stream in agents.streams.items() if f"/{kind}-" in key}
        assert children
        for key, child in children.items():
            assert child.after is not None
            parent = agents.requests[child.after]
            assert agents.streams[parent.stream].session == child.session == key.split("/")[0]
            assert firsts[key].arrival_s >= parent.arrival_s
            common = shared_blocks(parent, firsts[key])
            assert common == 0 if kind == "agent" else common >= spec.system_tokens // 64 - 1


def test_the_rewriting_test_is_the_papers(agents: Trace) -> None:
    for percent in (0, 2.5, 5, 10):
        trace = load_trace(f"builtin:rewriting-{percent:g},sessions=120")
        assert len(trace.requests) == 120 * 16
        assert {request.prompt_tokens for request in trace.requests if request.think_s == 0} >= {8_000}
        rewritten = 0
        for before, after, common in turns(trace):
            kept = after.prompt_tokens - 8_000
            whole = before.prompt_tokens + before.output_tokens
            assert kept <= whole
            rewritten += kept < whole
            if kept < before.prompt_tokens:
                assert common == kept // 64
        assert rewritten / (120 * 15) == pytest.approx(percent / 100, abs=0.015)
        assert (rewritten == 0) == (percent == 0)


def test_a_seed_fixes_everything() -> None:
    def same(one: Trace, other: Trace) -> bool:
        return one.streams == other.streams and all(
            replace(a, hashes=b.hashes) == b and a.hashes.tolist() == b.hashes.tolist()
            for a, b in zip(one.requests, other.requests, strict=True)
        )

    for spec in (AgentSpec(sessions=3), RewritingSpec(sessions=3)):
        assert same(generate_trace(spec), generate_trace(spec))
        others = generate_trace(replace(spec, seed=1))
        own = {int(number) for request in generate_trace(spec).requests for number in request.hashes}
        new = {int(number) for request in others.requests for number in request.hashes}
        assert len(own & new) < 0.05 * len(own)  # system prompts alone


def test_more_sessions_leave_the_others_as_they_are() -> None:
    few, many = generate_trace(AgentSpec(sessions=3)), generate_trace(AgentSpec(sessions=5))
    for stream in few.streams:
        one = [request.hashes.tolist() for request in few.requests if request.stream == stream]
        assert one == [request.hashes.tolist() for request in many.requests if request.stream == stream]


def test_every_stream_starts_after_what_starts_it(agents: Trace) -> None:
    seen: set[str] = set()
    arrivals = [request.arrival_s for request in agents.requests]
    assert arrivals == sorted(arrivals)
    for index, request in enumerate(agents.requests):
        stream = agents.streams[request.stream]
        if request.stream not in seen and stream.after is not None:
            assert stream.after < index
        seen.add(request.stream)


def test_names_on_the_command_line() -> None:
    assert builtin_spec("agents,seed=3,sessions=20") == AgentSpec(seed=3, sessions=20)
    assert builtin_spec("rewriting-2.5") == RewritingSpec(share=0.025)
    assert load_trace("builtin:agents,sessions=2", limit=7).name == "builtin:agents,sessions=2"
    assert len(load_trace("builtin:agents,sessions=2", limit=7).requests) == 7
    for name, message in (
        ("builtin:agent", "there are only builtin:agents"),
        ("builtin:agents,colour=3", "'colour' cannot be set"),
        ("builtin:agents,seed=x", "not a whole number"),
        ("builtin:agents,sessions=0", "too small"),
        ("builtin:agents,rewind_share=much", "not a number"),
    ):
        with pytest.raises(TraceError, match=message):
            load_trace(name)
    with pytest.raises(TraceError, match="name it alone"):
        load_trace(["builtin:agents", "builtin:agents"])
