"""Tables, a plot and a JSON file from the runs of one workload."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lmcache_histate.replay.outcome import RequestOutcome, RunOutcome, Verdict
from lmcache_histate.replay.workload import Kind


@dataclass(frozen=True)
class Summary:
    """What one run cost, over all its requests or those of one kind.

    Attributes:
        requests: How many.
        prompt_tokens: Tokens of their prompts.
        hit_tokens: Prompt tokens that were not computed.
        recomputed_tokens: Prompt tokens that were computed although they had been sent or received before.
        mean_ttft_s: Mean seconds to the first token.
        p50_ttft_s: Median of the same.
        p99_ttft_s: 99th percentile of the same.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank); NaN for none.

    Args:
        values: Any order.
        percent: Above 0, at most 100.
    """
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarize(requests: Sequence[RequestOutcome]) -> Summary:
    """Add up requests.

    Args:
        requests: Of one run.
    """
    times = [request.ttft_s for request in requests]
    return Summary(
        requests=len(requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        hit_tokens=sum(request.hit_tokens for request in requests),
        recomputed_tokens=sum(request.recomputed_tokens for request in requests),
        mean_ttft_s=sum(times) / len(times) if times else math.nan,
        p50_ttft_s=percentile(times, 50),
        p99_ttft_s=percentile(times, 99),
    )


def by_kind(requests: Sequence[RequestOutcome]) -> dict[Kind, list[RequestOutcome]]:
    """Sort requests by kind, leaving out kinds that do not occur.

    Args:
        requests: Of one run.
    """
    kinds = {kind: [request for request in requests if request.kind == kind.value] for kind in Kind}
    return {kind: members for kind, members in kinds.items() if members}


def main_table(runs: Sequence[RunOutcome], titles: Mapping[str, str], verdicts: Mapping[str, Verdict]) -> Table:
    """One row a back end.

    Args:
        runs: The runs.
        titles: Words for each back end.
        verdicts: Of every run but the reference.
    """
    table = Table(
        title="Prompt tokens (recomputed: sent before, computed again); time to first token in ms",
        box=SIMPLE_HEAD,
        padding=(0, 0),  # nine columns in a terminal of 80; the box itself separates them
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    headings = ("requests", "tokens", "hit", "recomputed", "TTFT", "p50", "p99", "wrong")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        summary = summarize(run.requests)
        verdict = verdicts.get(run.backend)
        table.add_row(
            titles.get(run.backend, run.backend),
            f"{summary.requests:,}",
            f"{summary.prompt_tokens:,}",
            f"{summary.hit_tokens:,}",
            f"{summary.recomputed_tokens:,}",
            *(_milliseconds(time) for time in (summary.mean_ttft_s, summary.p50_ttft_s, summary.p99_ttft_s)),
            "ref." if verdict is None else f"{len(verdict.wrong):,}",
        )
    return table


def kind_table(runs: Sequence[RunOutcome], titles: Mapping[str, str]) -> Table:
    """Tokens recomputed and mean time to first token, one row a kind of request, two columns a back end.

    Args:
        runs: The runs.
        titles: Words for each back end.
    """
    table = Table(title="By kind of request: tokens recomputed, mean TTFT in ms", box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("requests", justify="right")
    for run in runs:
        table.add_column(titles.get(run.backend, run.backend), justify="right")
    for kind in Kind:
        members = [by_kind(run.requests).get(kind, []) for run in runs]
        if not any(members):
            continue
        cells = []
        for requests in members:
            summary = summarize(requests)
            cells.append(f"{summary.recomputed_tokens:,} {_milliseconds(summary.mean_ttft_s):>6}")
        table.add_row(kind.value, f"{len(members[0]):,}", *cells)
    return table


def to_json(runs: Sequence[RunOutcome], verdicts: Mapping[str, Verdict], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as one JSON object.

    Args:
        runs: The runs.
        verdicts: Of every run but the reference.
        settings: What the runs were made with.
    """
    return {
        "settings": dict(settings),
        "runs": [
            {
                **run.to_json(),
                "summary": _summary_json(run.requests),
                "by_kind": {kind.value: _summary_json(members) for kind, members in by_kind(run.requests).items()},
                "outputs": _verdict_json(verdicts.get(run.backend)),
            }
            for run in runs
        ],
    }


def save_json(value: Mapping[str, Any], path: Path) -> None:
    """Write a JSON file.

    Args:
        value: What `to_json` made.
        path: Where.
    """
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def save_plot(runs: Sequence[RunOutcome], titles: Mapping[str, str], path: Path) -> None:
    """Draw tokens recomputed by kind of request, and the distribution of times to first token.

    Args:
        runs: The runs.
        titles: Words for each back end.
        path: Where; the ending decides the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    bars, curves = figure.subplots(1, 2)
    kinds = [kind for kind in Kind if any(kind in by_kind(run.requests) for run in runs)]
    width = 0.8 / max(1, len(runs))
    for number, run in enumerate(runs):
        members = by_kind(run.requests)
        heights = [summarize(members.get(kind, [])).recomputed_tokens for kind in kinds]
        label = titles.get(run.backend, run.backend)
        positions = [place + (number - (len(runs) - 1) / 2) * width for place in range(len(kinds))]
        bars.bar(positions, heights, width, label=label)
        times = sorted(request.ttft_s * 1000 for request in run.requests)
        curves.step(times, [(rank + 1) / len(times) for rank in range(len(times))], where="post", label=label)
    bars.set_xticks(range(len(kinds)), [kind.value for kind in kinds])
    bars.set_ylabel("tokens sent before and computed again")
    bars.legend()
    curves.set_xscale("log")
    curves.set_xlabel("time to first token (ms)")
    curves.set_ylabel("share of requests")
    curves.set_ylim(0, 1)
    curves.grid(alpha=0.3)
    curves.legend(loc="lower right")
    figure.savefig(path, dpi=130)


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:,.0f}"


def _summary_json(requests: Sequence[RequestOutcome]) -> dict[str, float]:
    summary = summarize(requests)
    return {
        "requests": summary.requests,
        "prompt_tokens": summary.prompt_tokens,
        "hit_tokens": summary.hit_tokens,
        "recomputed_tokens": summary.recomputed_tokens,
        "hit_rate": summary.hit_rate,
        "mean_ttft_s": summary.mean_ttft_s,
        "p50_ttft_s": summary.p50_ttft_s,
        "p99_ttft_s": summary.p99_ttft_s,
    }


def _verdict_json(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "equal": verdict.equal,
        "rounding": list(verdict.rounding),
        "wrong": list(verdict.wrong),
        # An output beyond all comparison has no finite difference, and JSON has no infinity.
        "largest_difference_nats": verdict.largest_difference if math.isfinite(verdict.largest_difference) else None,
    }
