"""Hit-rate bounds against a slow oracle, and against published numbers where the real trace is at hand.

`TEST_TRACES` names a folder with `weka/` (and others) in it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import make_trace

from lmcache_histate.replay.bounds import measure_reuse
from lmcache_histate.replay.traces.load import load_trace

BLOCK = 100
PROMPTS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=12)), min_size=1, max_size=25)


def common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@settings(deadline=None, max_examples=60)
@given(PROMPTS)
def test_bounds_agree_with_a_search_of_all_earlier_prompts(prompts: list[tuple[str, list[int]]]) -> None:
    reuse = measure_reuse(make_trace(prompts, BLOCK), grids_tokens=(300,))
    snapshots: list[tuple[list[int], bool]] = []  # a prefix that has a snapshot, and whether it is a junction
    for index, (_, path) in enumerate(prompts):
        earlier = [other for _, other in prompts[:index]]
        kv = max((common(path, other) for other in earlier), default=0)
        usable = [(len(prefix), junction) for prefix, junction in snapshots if path[: len(prefix)] == prefix]
        ends = max((length for length, junction in usable if not junction), default=0)
        assert reuse.kv[index] == kv
        assert reuse.ends[index] == ends
        assert reuse.junctions[index] == max((length for length, _ in usable), default=0)
        assert reuse.grids[300][index] == max(kv // 3 * 3, ends)
        snapshots += [(path, False)] if path else []
        snapshots += [(path[:kv], True)] if kv else []
    total = sum(len(path) for _, path in prompts)
    assert reuse.bounds["every block"] == pytest.approx(reuse.kv.sum() / total if total else 0.0)
    assert reuse.bounds["ends"] <= reuse.bounds["ends and junctions"] <= reuse.bounds["every block"]


def test_no_prompts_and_prompts_without_blocks() -> None:
    assert set(measure_reuse(make_trace([])).bounds.values()) == {0.0}
    assert set(measure_reuse(make_trace([("a", []), ("a", [])])).bounds.values()) == {0.0}


@pytest.mark.skipif(not os.environ.get("TEST_TRACES"), reason="TEST_TRACES names no folder of traces")
def test_bounds_of_the_weka_trace_are_the_published_ones() -> None:
    trace = load_trace(Path(os.environ["TEST_TRACES"]) / "weka")
    assert len(trace.requests) == 9185
    bounds = measure_reuse(trace).bounds
    expected = {
        "every block": 0.966,
        "ends": 0.9594,
        "ends and junctions": 0.9609,
        "ends and every 1,024": 0.9654,
        "ends and every 4,096": 0.9650,
        "ends and every 8,192": 0.9645,
    }
    assert bounds == pytest.approx(expected, abs=0.002)
