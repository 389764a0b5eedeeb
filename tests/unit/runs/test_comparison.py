import io
import json
import math
from csv import DictReader

import pytest

from lmcache_histate.replay import report_tables
from lmcache_histate.replay.comparison import (
    ALL,
    CACHED_TOKENS_REPORTED,
    CAPACITY_FACTOR,
    SENSITIVE,
    ComparisonError,
    Series,
    compare,
)
from lmcache_histate.replay.results import EvictionCount, RequestResult, Run, RunFacts

GIB = 1 << 30
BASELINES = ("cpu-disk",)


def request(stream, ttft, hit, reusable=80, prompt=100, error="", **causes):
    return RequestResult(stream, stream, 0.0, ttft, ttft + 1, prompt, 10, hit, reusable, error=error, **causes)


def run(policy, rows, seed=0, factor=1.0, trace="t", live=False, **settings):
    """`rows`: (stream, TTFT, hit) of every request."""
    facts = RunFacts(
        policy,
        trace,
        not live,
        seed,
        {"cpu": GIB, "disk": 3 * GIB},
        settings | ({CAPACITY_FACTOR: factor} if factor else {}),
    )
    return Run(facts, [request(*row) if isinstance(row, tuple) else row for row in rows])


def point(*runs):
    (only,) = compare(runs, BASELINES, "histate")
    return only


# Under cpu-disk the requests hit 80, 60, 78 and 76 of 100 tokens where 80 can be hit.
BASE = [("a", 1.0, 80), ("a", 2.0, 60), ("b", 3.0, 78), ("b", 4.0, 76)]


def test_reuse_sensitive_requests_are_those_where_the_baseline_falls_short_or_differs_from_ours():
    ours = run("histate", [("a", 1.0, 80), ("a", 1.0, 80), ("b", 1.0, 78), ("b", 1.0, 70)])
    found = point(run("cpu-disk", BASE), ours)
    # (a, 1): 20 points below unlimited. (b, 1): ours is 6 points lower. (b, 0): 2 points, (a, 0): none.
    assert found.sensitive == {(False, 0): frozenset({("a", 1), ("b", 1)})}
    numbers = found.numbers(Series("cpu-disk"), SENSITIVE)
    assert (numbers.requests, numbers.mean_s, numbers.hit_tokens) == (2, 3.0, 136)


def test_five_points_count_and_less_does_not():
    rows = [("a", 1.0, 75), ("b", 1.0, 76)]
    assert point(run("cpu-disk", rows)).sensitive[False, 0] == {("a", 0)}


def test_the_unlimited_run_is_the_bound_where_it_was_made():
    # It hits no more than the baseline: with its own step ends nothing better is possible.
    unlimited = run("unlimited", [("a", 1.0, 80), ("a", 1.0, 62), ("b", 1.0, 78), ("b", 1.0, 76)])
    assert point(run("cpu-disk", BASE), unlimited).sensitive[False, 0] == frozenset()


def test_requests_are_matched_by_stream_and_number_whatever_their_order():
    shuffled = [BASE[2], BASE[0], BASE[3], BASE[1]]
    ours = run("histate", [("b", 9.0, 80), ("a", 5.0, 80), ("b", 9.0, 80), ("a", 7.0, 80)])
    found = point(run("cpu-disk", shuffled), ours)
    assert found.sensitive[False, 0] == {("a", 1)}
    assert found.numbers(Series("histate"), SENSITIVE).mean_s == 7.0


def test_without_the_baseline_nothing_is_called_reuse_sensitive():
    found = point(run("histate", BASE))
    assert found.numbers(Series("histate"), SENSITIVE) is None
    assert found.numbers(Series("histate"), ALL).requests == 4


def test_live_runs_have_a_baseline_of_their_own():
    runs = [
        run("cpu-disk", BASE),
        run("lmcache", [("a", 1.0, 0), ("a", 1.0, 80)], live=True),
        run("histate", BASE[:2], live=True),
    ]
    (found,) = compare(runs, ("cpu-disk", "lmcache"), "histate")
    assert found.baselines == (Series("cpu-disk"), Series("lmcache", True))
    assert found.sensitive[True, 0] == {("a", 0), ("a", 1)}
    assert Series("histate", True).label == "histate (live)"


def test_numbers_add_up_over_seeds():
    first = run("cpu-disk", [request("a", 1.0, 60, recomputed_kv_gone=15, recomputed_never_saved=5)])
    second = run("cpu-disk", [("a", 3.0, 80), ("a", 5.0, 70)], seed=1)
    numbers = point(first, second).numbers(Series("cpu-disk"))
    assert (numbers.requests, numbers.mean_s, numbers.p50_s, numbers.p99_s) == (3, 3.0, 3.0, 5.0)
    assert numbers.hit_rate == pytest.approx(210 / 300)
    assert numbers.unlimited_hit_rate == pytest.approx(240 / 300)
    assert numbers.reused_share == pytest.approx(210 / 240)
    assert numbers.recomputed == {"kv_gone": 15, "snapshot_gone": 0, "never_saved": 5, "unknown": 0}


def test_percentiles_are_nearest_rank():
    numbers = point(run("vllm", [("a", float(value), 0) for value in range(1, 101)])).numbers(Series("vllm"))
    assert (numbers.p50_s, numbers.p95_s, numbers.p99_s) == (50, 95, 99)


def test_failed_requests_are_left_out_and_keep_their_number():
    rows = [request("a", 0.0, 0, error="status 500"), ("a", 2.0, 80)]
    found = point(run("cpu-disk", BASE), run("histate", rows))
    assert found.numbers(Series("histate")).requests == 1
    assert found.runs[Series("histate")][0].keys == (("a", 1),)
    assert found.runs[Series("histate")][0].failed == 1


def test_points_are_sorted_by_trace_and_capacity():
    runs = [run("vllm", BASE, factor=factor, trace=trace) for trace in ("y", "x") for factor in (2.0, 0.5)]
    assert [(p.trace, p.factor) for p in compare(runs, BASELINES, "histate")] == [
        ("x", 0.5),
        ("x", 2.0),
        ("y", 0.5),
        ("y", 2.0),
    ]


def test_runs_without_a_factor_are_told_apart_by_their_bytes():
    found = point(run("vllm", BASE, factor=None), run("cpu-disk", BASE, factor=None))
    assert found.capacity_text == "cpu 1 GiB, disk 3 GiB"
    assert found.capacity_bytes == 4 * GIB


def test_two_runs_of_the_same_point_are_refused():
    with pytest.raises(ComparisonError, match=r"two runs of policy 'vllm' on trace 't' at 1x the working set"):
        point(run("vllm", BASE), run("vllm", BASE))
    with pytest.raises(ComparisonError, match="no runs"):
        compare([], BASELINES, "histate")


def test_unknown_hits_are_not_zero_hits():
    silent = run("live", BASE, live=True, **{CACHED_TOKENS_REPORTED: False})
    (found,) = compare([silent], ("live",), "histate")
    numbers = found.numbers(Series("live", True))
    assert math.isnan(numbers.hit_rate)
    assert math.isnan(numbers.reused_share)
    assert found.sensitive == {}
    (row,) = report_tables.number_rows([found], "histate")
    assert row["hit_tokens"] is None
    assert row["hit_rate"] is None


def test_rows_hold_ratios_to_the_baseline_and_to_ours():
    ours = run("histate", [("a", 0.5, 80), ("a", 1.0, 80), ("b", 1.5, 80), ("b", 2.0, 80)])
    rows = report_tables.number_rows([point(run("cpu-disk", BASE), ours)], "histate")
    everything = {row["policy"]: row for row in rows if row["set"] == ALL}
    assert everything["cpu-disk"]["mean_over_ours"] == pytest.approx(2.0)
    assert everything["cpu-disk"]["p99_over_baseline"] == pytest.approx(1.0)
    assert everything["histate"]["mean_over_baseline"] == pytest.approx(0.5)
    chosen = {row["policy"]: row for row in rows if row["set"] == SENSITIVE}
    assert chosen["histate"]["requests"] == 1
    assert chosen["histate"]["reused_share"] == pytest.approx(1.0)


def test_standings_take_the_best_online_baseline_for_each_figure():
    def flat(policy, times):
        return run(policy, [("a", time, 60) for time in times])

    found = point(
        flat("histate", [1.0, 9.0]),
        flat("cpu-disk", [4.0, 4.0]),
        flat("vllm", [1.0, 6.0]),
        flat("histate-paper", [0.1, 0.1]),
        flat("unlimited", [0.1, 0.1]),
        flat("offline", [0.1, 0.1]),
    )
    (standing,) = report_tables.standings([found])
    assert (standing.best_mean, standing.mean_ratio) == ("vllm", pytest.approx(5.0 / 3.5))
    assert (standing.best_p99, standing.p99_ratio) == ("cpu-disk", pytest.approx(9.0 / 4.0))
    assert standing.p50_ratio == pytest.approx(0.25)


def test_csv_and_json_hold_the_same_rows():
    evicted = EvictionCount("disk", "kv", 10, 5.0 * GIB, 3)
    base = run("cpu-disk", BASE)
    base = Run(RunFacts("cpu-disk", "t", True, evictions=[evicted]), base.requests)
    found = point(base)
    rows = report_tables.number_rows([found], "histate")
    lines = list(DictReader(io.StringIO(report_tables.to_csv(rows))))
    assert [line["policy"] for line in lines] == [row["policy"] for row in rows]
    assert float(lines[0]["mean_ttft_s"]) == 2.5
    assert lines[0]["mean_over_ours"] == ""
    value = json.loads(report_tables.to_json([found], rows, []))
    assert value["numbers"] == rows
    assert value["evictions"][0]["missed_later"] == 3
