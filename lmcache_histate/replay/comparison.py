"""The numbers of a report: runs of one trace at one capacity side by side, over all requests and the reuse-sensitive ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_histate.replay.results import Run, RunFacts

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

ALL = "all"
SENSITIVE = "reuse-sensitive"

SENSITIVE_POINTS = 0.05
"""A request is reuse-sensitive if its hit rate under the baseline lies this far below the unlimited cache's, or this
far from ours: only there can policies differ."""

UNLIMITED = "unlimited"
"""Name of the policy that never evicts. Where it was not run, `RequestResult.reusable_tokens` stands in for it."""

CAUSES = {
    "kv_gone": "KV gone",
    "snapshot_gone": "snapshot gone",
    "never_saved": "never saved",
    "unknown": "cause not known",
}
"""Kinds of recomputed tokens, as in `RequestResult.recomputed_*`, and words for them."""

_COLUMNS = (
    "sent_s",
    "ttft_s",
    "seconds",
    "prompt_tokens",
    "output_tokens",
    "hit_tokens",
    "reusable_tokens",
    "disk_tokens",
    "remote_tokens",
    *(f"recomputed_{cause}" for cause in CAUSES),
)

CACHED_TOKENS_REPORTED = "cached_tokens_reported"
"""Key of `RunFacts.settings`: False where a live server did not say how many tokens it had cached."""
CAPACITY_FACTOR = "capacity_factor"
"""Key of `RunFacts.settings`: the capacity of the run as a multiple of the trace's working set."""


class ComparisonError(ValueError):
    """Runs that cannot be put side by side; the message says why."""


@dataclass(frozen=True)
class RunTable:
    """One run as columns, which take a tenth of the memory of its requests.

    Attributes:
        facts: Of the run.
        keys: Per request that succeeded, its stream and its number within the stream: equal in every run of a trace.
        columns: By name of `RequestResult`'s fields, one value a request.
        failed: Requests that have no figures because the live server refused them or broke off.
    """

    facts: RunFacts
    keys: tuple[tuple[str, int], ...]
    columns: dict[str, Floats]
    failed: int

    @classmethod
    def of(cls, run: Run) -> RunTable:
        """Turn a run into columns; O(requests)."""
        numbers: Counter[str] = Counter()
        keys, good = [], []
        for request in run.requests:
            if not request.error:
                keys.append((request.stream, numbers[request.stream]))
                good.append(request)
            numbers[request.stream] += 1
        columns = {
            name: np.fromiter((getattr(request, name) for request in good), np.float64, len(good)) for name in _COLUMNS
        }
        return cls(run.facts, tuple(keys), columns, len(run.requests) - len(good))

    @property
    def hits_known(self) -> bool:
        """Whether the run says what was hit."""
        return bool(self.facts.settings.get(CACHED_TOKENS_REPORTED, True))

    @cached_property
    def hit_rates(self) -> Floats:
        """Per request, the share of its prompt that was not computed."""
        return _share(self.columns["hit_tokens"], self.columns["prompt_tokens"])

    @cached_property
    def reusable_rates(self) -> Floats:
        """Per request, the share of its prompt that an unlimited cache could hit."""
        return _share(self.columns["reusable_tokens"], self.columns["prompt_tokens"])


@dataclass(frozen=True)
class Numbers:
    """What a policy's requests cost; tokens, and seconds to the first token.

    Attributes:
        requests: How many.
        prompt_tokens: Of all prompts.
        hit_tokens: Not computed.
        reusable_tokens: What an unlimited cache could have hit.
        disk_tokens: Of the hits, read from disk.
        remote_tokens: Of the hits, fetched from a remote tier.
        recomputed: By cause (`CAUSES`), reusable tokens that were computed again.
        mean_s: Mean TTFT.
        p50_s: Median TTFT (nearest rank, as all percentiles here).
        p95_s: 95th percentile.
        p99_s: 99th percentile.
        hits_known: False where a live server did not report hits; then token counts other than of prompts mean nothing.
    """

    requests: int
    prompt_tokens: float
    hit_tokens: float
    reusable_tokens: float
    disk_tokens: float
    remote_tokens: float
    recomputed: dict[str, float]
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    hits_known: bool

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed; NaN if not known."""
        return self.hit_tokens / self.prompt_tokens if self.hits_known and self.prompt_tokens else math.nan

    @property
    def unlimited_hit_rate(self) -> float:
        """Share of the prompt tokens that an unlimited cache with a snapshot at every block would hit."""
        return self.reusable_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    @property
    def reused_share(self) -> float:
        """Share of the reusable tokens that were hit; NaN if not known."""
        return self.hit_tokens / self.reusable_tokens if self.hits_known and self.reusable_tokens else math.nan


def summarize(runs: Sequence[RunTable], chosen: Sequence[Flags] | None = None) -> Numbers | None:
    """Add up requests of several runs; None for none.

    Args:
        runs: The runs.
        chosen: Per run, which of its requests count; all if None.
    """
    flags = chosen if chosen is not None else [np.ones(len(run.keys), bool) for run in runs]
    columns = {
        name: np.concatenate([run.columns[name][flag] for run, flag in zip(runs, flags, strict=True)])
        for name in _COLUMNS
    }
    times = columns["ttft_s"]
    if not len(times):
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(times, (50, 95, 99), method="inverted_cdf"))
    totals = {name: float(values.sum()) for name, values in columns.items()}
    return Numbers(
        requests=len(times),
        prompt_tokens=totals["prompt_tokens"],
        hit_tokens=totals["hit_tokens"],
        reusable_tokens=totals["reusable_tokens"],
        disk_tokens=totals["disk_tokens"],
        remote_tokens=totals["remote_tokens"],
        recomputed={cause: totals[f"recomputed_{cause}"] for cause in CAUSES},
        mean_s=float(times.mean()),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        hits_known=all(run.hits_known for run in runs),
    )


@dataclass(frozen=True, order=True)
class Series:
    """What one line of a plot shows.

    Attributes:
        policy: Name of the policy or of the live server.
        live: Measured on a live server, not simulated.
    """

    policy: str
    live: bool = False

    @property
    def label(self) -> str:
        """For legends and tables."""
        return f"{self.policy} (live)" if self.live else self.policy


@dataclass
class Point:
    """One trace at one capacity: every policy's runs, one a seed.

    Attributes:
        trace: Name of the trace.
        capacities: Bytes per tier; empty where a live server's are not known.
        factor: The capacity in working sets, if the sweep said so.
        runs: By series.
        baselines: The disk-offload LRU baselines that are here: at most one simulated, one live.
        ours: HiState as it is judged, likewise.
    """

    trace: str
    capacities: dict[str, float]
    factor: float | None
    runs: dict[Series, list[RunTable]] = field(default_factory=dict)
    baselines: tuple[Series, ...] = ()
    ours: tuple[Series, ...] = ()

    @property
    def capacity_bytes(self) -> float:
        """Bytes of all tiers together; NaN if not known."""
        known = [nbytes for nbytes in self.capacities.values() if math.isfinite(nbytes)]
        return sum(known) if known else math.nan

    @property
    def capacity_mark(self) -> str:
        """The capacity in few characters, for tables."""
        return self.capacity_text if self.factor is None else f"{self.factor:g}x"

    @property
    def capacity_text(self) -> str:
        """Words for the capacity."""
        tiers = ", ".join(f"{tier} {_gib(nbytes)}" for tier, nbytes in self.capacities.items() if nbytes)
        if self.factor is None:
            return tiers or "capacity not known"
        return f"{self.factor:g}x the working set" + (f" ({tiers})" if tiers else "")

    @cached_property
    def sensitive(self) -> dict[tuple[bool, int], frozenset[tuple[str, int]]]:
        """Reuse-sensitive requests, by (live, seed); a key is absent where the baseline was not run.

        A request counts if its hit rate under the baseline lies `SENSITIVE_POINTS` below the unlimited cache's or away
        from ours. All runs of one trace, capacity and seed are asked the same requests.
        """
        found: dict[tuple[bool, int], frozenset[tuple[str, int]]] = {}
        for live in (False, True):
            baseline = self._by_seed(self.reference(self.baselines, live))
            ours = self._by_seed(self.reference(self.ours, live))
            unlimited = self._by_seed(Series(UNLIMITED, live))
            for seed, run in baseline.items():
                if not run.hits_known:
                    continue
                bound = run.reusable_rates
                if seed in unlimited:
                    bound = _aligned(unlimited[seed], run.keys, bound)
                chosen = bound - run.hit_rates >= SENSITIVE_POINTS - 1e-9
                if seed in ours and ours[seed].hits_known:
                    mine = _aligned(ours[seed], run.keys, run.hit_rates)
                    chosen |= np.abs(mine - run.hit_rates) >= SENSITIVE_POINTS - 1e-9
                found[live, seed] = frozenset(key for key, flag in zip(run.keys, chosen, strict=True) if flag)
        return found

    @staticmethod
    def reference(choices: Sequence[Series], live: bool) -> Series | None:
        """Of `baselines` or `ours`, the one that live (simulated) series are compared with; None if there is none."""
        return next((series for series in choices if series.live == live), None)

    def _by_seed(self, series: Series | None) -> dict[int, RunTable]:
        return {run.facts.seed: run for run in self.runs.get(series, [])} if series else {}

    def ttft_s(self, series: Series, which: str = ALL) -> Floats:
        """Seconds to the first token of a series' requests, all seeds together, sorted.

        Args:
            series: One of `runs`.
            which: `ALL` or `SENSITIVE`.
        """
        parts = [run.columns["ttft_s"][self._chosen(run, which)] for run in self.runs[series]]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0)

    def numbers(self, series: Series, which: str = ALL) -> Numbers | None:
        """Add up a series' requests over all seeds; None if none were chosen or the baseline is missing.

        Args:
            series: One of `runs`.
            which: `ALL` or `SENSITIVE`.
        """
        runs = self.runs[series]
        if which == SENSITIVE and any((series.live, run.facts.seed) not in self.sensitive for run in runs):
            return None
        return summarize(runs, [self._chosen(run, which) for run in runs])

    def _chosen(self, run: RunTable, which: str) -> Flags:
        if which == ALL:
            return np.ones(len(run.keys), bool)
        wanted = self.sensitive.get((not run.facts.simulated, run.facts.seed), frozenset())
        return np.fromiter((key in wanted for key in run.keys), bool, len(run.keys))


def compare(runs: Iterable[Run], baselines: Sequence[str], ours: str) -> list[Point]:
    """Sort runs into points, by trace and then by capacity.

    Args:
        runs: Any number, read one after another: each is turned into columns at once.
        baselines: Names of the disk-offload LRU baseline, the first one present at a point is used.
        ours: Name of the policy that is judged.

    Raises:
        ComparisonError: No runs, or two runs of one policy, trace, capacity and seed.
    """
    points: dict[Any, Point] = {}
    for run in runs:
        facts = run.facts
        factor = facts.settings.get(CAPACITY_FACTOR)
        capacities = {tier: float(nbytes) for tier, nbytes in facts.capacities.items()}
        # Policies may leave a tier unused: within a sweep the factor says what was offered, to all alike.
        where = (facts.trace, factor if factor is not None else tuple(sorted(capacities.items())))
        point = points.setdefault(where, Point(facts.trace, capacities, factor))
        if len(capacities) > len(point.capacities):
            point.capacities = capacities
        members = point.runs.setdefault(Series(facts.policy, not facts.simulated), [])
        if any(member.facts.seed == facts.seed for member in members):
            raise ComparisonError(
                f"two runs of policy {facts.policy!r} on trace {facts.trace!r} at {point.capacity_text} with seed "
                f"{facts.seed}: they differ in their settings or one is a leftover. Name one of the two files, not both."
            )
        members.append(RunTable.of(run))
    if not points:
        raise ComparisonError("no runs: name result files of `histate simulate`, `sweep` or `replay`, or their folder")
    for point in points.values():
        point.baselines = _present(point, baselines)
        point.ours = _present(point, [ours])
    return sorted(points.values(), key=_order)


def _present(point: Point, policies: Sequence[str]) -> tuple[Series, ...]:
    """The first of the policies that was simulated, and the first that ran live."""
    found = []
    for live in (False, True):
        found += [series for policy in policies if (series := Series(policy, live)) in point.runs][:1]
    return tuple(found)


def _order(point: Point) -> tuple[str, float, float]:
    size = point.capacity_bytes
    return point.trace, point.factor if point.factor is not None else math.inf, size if math.isfinite(size) else 0.0


def _aligned(run: RunTable, keys: Sequence[tuple[str, int]], default: Floats) -> Floats:
    """Hit rates of `run` in the order of `keys`; `default` for requests that it did not serve."""
    rates = dict(zip(run.keys, run.hit_rates.tolist(), strict=True))
    return np.array([rates.get(key, other) for key, other in zip(keys, default.tolist(), strict=True)], np.float64)


def _share(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _gib(nbytes: float) -> str:
    if not math.isfinite(nbytes):
        return "unlimited"
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 28 else f"{nbytes / (1 << 20):.3g} MiB"
