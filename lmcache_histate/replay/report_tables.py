"""The tables of a report: every number as flat rows for CSV and JSON, and how HiState stands at each capacity."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmcache_histate.replay.comparison import ALL, CAUSES, SENSITIVE, UNLIMITED, Numbers, Point, Series
from lmcache_histate.replay.simulator import POLICIES

Row = dict[str, Any]

OWN = "histate"
"""Beginning of the names of our own policies, the ablations among them."""

PREFERRED = ("cpu-disk", "vllm", "hicache", "marconi", "histate-paper", UNLIMITED, "offline", "fixed-4k")
"""Policies that plots of curves show first, after the one that is judged."""


def series_order(points: Sequence[Point], ours: str) -> list[Series]:
    """Every series of the points: ours, the preferred policies, the simulator's others in its order, then live servers.

    Args:
        points: Of a report.
        ours: Policy that is judged.
    """

    def rank(series: Series) -> tuple[int, str, bool]:
        first = list(dict.fromkeys((ours, *PREFERRED, *POLICIES)))
        place = first.index(series.policy) if series.policy in first else len(first)
        return place, series.policy, series.live

    return sorted({series for point in points for series in point.runs}, key=rank)


def is_online_baseline(policy: str) -> bool:
    """Whether a policy is one that somebody could run instead of HiState: not ours, and no bound that knows the future."""
    known = POLICIES.get(policy)
    return not policy.startswith(OWN) and (known is None or known.online)


def number_rows(points: Sequence[Point], ours: str) -> list[Row]:
    """One flat row for each point, series and set of requests; numbers that are not known are None.

    Args:
        points: Of a report.
        ours: Policy that is judged.
    """
    rows = []
    order = series_order(points, ours)
    for point in points:
        for which in (ALL, SENSITIVE):
            for series in order:
                numbers = point.numbers(series, which) if series in point.runs else None
                if numbers is not None:
                    rows.append(_row(point, series, which, numbers))
    return rows


def _row(point: Point, series: Series, which: str, numbers: Numbers) -> Row:
    runs = point.runs[series]
    row: Row = {
        "trace": point.trace,
        "capacity_factor": point.factor,
        "capacity_bytes": point.capacity_bytes,
        "policy": series.policy,
        "live": series.live,
        "seeds": len(runs),
        "set": which,
        "requests": numbers.requests,
        "failed": sum(run.failed for run in runs) if which == ALL else None,
        "mean_ttft_s": numbers.mean_s,
        "p50_ttft_s": numbers.p50_s,
        "p95_ttft_s": numbers.p95_s,
        "p99_ttft_s": numbers.p99_s,
        "prompt_tokens": numbers.prompt_tokens,
        "reusable_tokens": numbers.reusable_tokens,
        "unlimited_hit_rate": numbers.unlimited_hit_rate,
    }
    known = numbers.hits_known
    row |= {
        "hit_tokens": numbers.hit_tokens if known else None,
        "hit_rate": numbers.hit_rate,
        "reused_share": numbers.reused_share,
        "disk_tokens": numbers.disk_tokens if known else None,
        "remote_tokens": numbers.remote_tokens if known else None,
    }
    row |= {f"recomputed_{cause}": numbers.recomputed[cause] if known else None for cause in CAUSES}
    for name, choices in (("baseline", point.baselines), ("ours", point.ours)):
        reference = point.reference(choices, series.live)
        other = point.numbers(reference, which) if reference is not None else None
        row[name] = reference.policy if reference is not None else None
        for figure in ("mean", "p50", "p95", "p99"):
            ratio = ratio_of(getattr(numbers, f"{figure}_s"), getattr(other, f"{figure}_s")) if other else math.nan
            row[f"{figure}_over_{name}"] = ratio
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def ratio_of(value: float, reference: float) -> float:
    """`value / reference`; NaN without a reference."""
    return value / reference if reference else math.nan


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, with a heading; what is not known is empty."""
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file.getvalue()


def to_json(points: Sequence[Point], rows: Sequence[Row], standings: Sequence[Standing]) -> str:
    """The rows, the standings, and what left the tiers, as one JSON object."""
    evictions = [
        {
            "trace": point.trace,
            "capacity_factor": point.factor,
            "policy": series.policy,
            "live": series.live,
            "seed": run.facts.seed,
            "tier": count.tier,
            "kind": count.kind,
            "objects": count.objects,
            "bytes": count.nbytes,
            "missed_later": count.missed_later,
        }
        for point in points
        for series, runs in point.runs.items()
        for run in runs
        for count in run.facts.evictions
    ]
    value = {"numbers": list(rows), "standings": [_plain(standing) for standing in standings], "evictions": evictions}
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Standing:
    """How the judged policy stands at one point; ratios are its figure over the other's, below 1 is better.

    Attributes:
        trace: Name of the trace.
        capacity: In working sets if the sweep said so, else bytes per tier.
        series: What is judged.
        best_mean: Online baseline of the lowest mean TTFT.
        mean_ratio: Mean TTFT over that baseline's.
        best_p99: Online baseline of the lowest p99 TTFT.
        p99_ratio: p99 TTFT over that baseline's.
        baseline: The disk-offload LRU baseline; None if it was not run.
        p50_ratio: p50 TTFT over the baseline's.
        sensitive_mean_ratio: Mean TTFT over the baseline's, on reuse-sensitive requests.
        sensitive_p99_ratio: p99 TTFT over the baseline's, on reuse-sensitive requests.
        sensitive_reused: Share of the tokens that an unlimited cache reuses, on reuse-sensitive requests.
    """

    trace: str
    capacity: str
    series: str
    best_mean: str
    mean_ratio: float
    best_p99: str
    p99_ratio: float
    baseline: str | None
    p50_ratio: float
    sensitive_mean_ratio: float
    sensitive_p99_ratio: float
    sensitive_reused: float


def standings(points: Sequence[Point]) -> list[Standing]:
    """How HiState stands at every point that has it and at least one online baseline."""
    found = []
    for point in points:
        for ours in point.ours:
            mine = point.numbers(ours)
            others = {
                series: numbers
                for series in point.runs
                if series.live == ours.live and is_online_baseline(series.policy) and (numbers := point.numbers(series))
            }
            if mine is None or not others:
                continue
            best_mean = min(others, key=lambda series: others[series].mean_s)
            best_p99 = min(others, key=lambda series: others[series].p99_s)
            baseline = point.reference(point.baselines, ours.live)
            usual = others.get(baseline) if baseline else None
            chosen = point.numbers(ours, SENSITIVE)
            usual_chosen = point.numbers(baseline, SENSITIVE) if baseline else None
            found.append(
                Standing(
                    trace=point.trace,
                    capacity=point.capacity_mark,
                    series=ours.label,
                    best_mean=best_mean.policy,
                    mean_ratio=ratio_of(mine.mean_s, others[best_mean].mean_s),
                    best_p99=best_p99.policy,
                    p99_ratio=ratio_of(mine.p99_s, others[best_p99].p99_s),
                    baseline=baseline.policy if baseline else None,
                    p50_ratio=ratio_of(mine.p50_s, usual.p50_s) if usual else math.nan,
                    sensitive_mean_ratio=ratio_of(chosen.mean_s, usual_chosen.mean_s)
                    if chosen and usual_chosen
                    else math.nan,
                    sensitive_p99_ratio=ratio_of(chosen.p99_s, usual_chosen.p99_s)
                    if chosen and usual_chosen
                    else math.nan,
                    sensitive_reused=chosen.reused_share if chosen else math.nan,
                )
            )
    return found


def _plain(standing: Standing) -> Row:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(standing).items()
    }
