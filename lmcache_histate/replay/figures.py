"""The plots of a report. Each function draws one figure; a policy has the same colour and dash in all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_histate.replay.comparison import ALL, CAUSES, SENSITIVE, UNLIMITED, Numbers, Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 1 << 30

# Okabe and Ito's colours, which stay apart for colour-blind readers; yellow is left out (too pale on white).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D3B", "#5A5A5A")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_CAUSE_COLOURS = {"kv_gone": "#0072B2", "snapshot_gone": "#E69F00", "never_saved": "#CC79A7", "unknown": "#9A9A9A"}
_KV_COLOUR, _SNAPSHOT_COLOUR = "#56B4E9", "#E69F00"
_TIERS = {"gpu": "GPU", "cpu": "CPU memory", "disk": "disk", "remote": "remote"}
_MISSED_COLOUR, _UNUSED_COLOUR = "#D55E00", "#B8B8B8"

HEADLINE = 8
"""Lines in a plot of curves; more cannot be told apart."""

CURVE_POINTS = 600
"""Steps drawn of a distribution; more do not show."""


@dataclass(frozen=True)
class Style:
    """How a series is drawn."""

    colour: str
    dash: Any
    marker: str
    width: float


def styles(order: Sequence[Series], ours: str) -> dict[Series, Style]:
    """One style a series, fixed by the order.

    Args:
        order: Every series of the report; those that come first get the most distinct styles.
        ours: Policy that is drawn black.
    """
    found: dict[Series, Style] = {}
    number = 0
    for series in order:
        if series.policy == ours:
            found[series] = Style("#000000", _DASHES[2] if series.live else "-", "o", 2.4)
        elif series.policy == UNLIMITED:
            found[series] = Style("#7A7A7A", _DASHES[2], "", 1.6)
        else:
            colours = len(_COLOURS)
            marker = _MARKERS[(number + number // colours) % len(_MARKERS)]
            found[series] = Style(_COLOURS[number % colours], _DASHES[number // colours % len(_DASHES)], marker, 1.5)
            number += 1
    return found


def ttft_distributions(point: Point, shown: Sequence[Series], looks: Mapping[Series, Style]) -> Figure:
    """Cumulative distributions of TTFT: the body on the left, the slowest tenth on the right; a row a set of requests.

    Args:
        point: One trace at one capacity.
        shown: Series to draw.
        looks: Their styles.
    """
    rows = [which for which in (ALL, SENSITIVE) if any(point.numbers(series, which) for series in shown)]
    figure, axes = _figure(11, 3.9 * len(rows) + 0.5, len(rows), 2)
    for row, which in enumerate(rows):
        body, tail = axes[row]
        count = 0
        for series in shown:
            if point.numbers(series, which) is None:
                continue
            times = point.ttft_s(series, which)
            count = max(count, len(times))
            ranks = np.arange(1, len(times) + 1) / len(times)
            kept = np.unique(np.linspace(0, len(times) - 1, CURVE_POINTS).astype(int))
            look = looks[series]
            line = {"color": look.colour, "linestyle": look.dash, "linewidth": look.width, "label": series.label}
            body.plot(times[kept], ranks[kept], **line)
            slow = slice(max(0, int(len(times) * 0.9) - 1), None)
            tail.plot(times[slow], np.maximum(1 - ranks[slow] + 1 / len(times), 1 / len(times)), **line)
        body.set(ylim=(0, 1), ylabel="share of requests", title=f"{which} requests ({count:,})")
        tail.set(yscale="log", ylabel="share that waits at least as long", title="the slowest tenth")
        if count >= 100:
            tail.axhline(0.01, color="#999999", linewidth=0.8, linestyle=":")
            note = {"xycoords": ("axes fraction", "data"), "va": "bottom", "color": "#666666", "fontsize": 8}
            tail.annotate("p99", (0.01, 0.01), **note)
        for axis in (body, tail):
            _time_axis(axis)
    _legend(figure, axes[0][0], len(shown))
    return figure


def against_capacity(points: Sequence[Point], shown: Sequence[Series], looks: Mapping[Series, Style]) -> Figure:
    """Hit rate, mean and p99 TTFT against the capacity, of one trace.

    Args:
        points: Of one trace, by capacity.
        shown: Series to draw.
        looks: Their styles.
    """
    figure, axes = _figure(13.5, 4.6, 1, 3)
    factors = all(point.factor is not None for point in points)
    panels: tuple[tuple[str, Callable[[Numbers], float]], ...] = (
        ("hit rate (share of prompt tokens)", lambda numbers: numbers.hit_rate),
        ("mean time to first token (s)", lambda numbers: numbers.mean_s),
        ("p99 time to first token (s)", lambda numbers: numbers.p99_s),
    )
    for axis, (label, value) in zip(axes[0], panels, strict=True):
        for series in shown:
            places, values = [], []
            for point in points:
                numbers = point.numbers(series) if series in point.runs else None
                if numbers is not None and math.isfinite(value(numbers)):
                    places.append(point.factor if factors and point.factor else point.capacity_bytes / GIB)
                    values.append(value(numbers))
            look = looks[series]
            axis.plot(
                places, values, color=look.colour, linestyle=look.dash, linewidth=look.width, marker=look.marker,
                markersize=4.5, label=series.label,
            )  # fmt: skip
        axis.set(xscale="log", ylabel=label)
        axis.set_xlabel("capacity / working set" if factors else "capacity of all tiers (GiB)")
        ticks = sorted({point.factor if factors and point.factor else point.capacity_bytes / GIB for point in points})
        axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axis.minorticks_off()
    # The line that no policy can pass; it is there even where the unlimited cache was not run.
    bounds = [numbers for point in points for series in shown[:1] if (numbers := _any_numbers(point, series))]
    if bounds:
        bound = max(numbers.unlimited_hit_rate for numbers in bounds)
        axes[0][0].axhline(bound, color="#7A7A7A", linewidth=0.9, linestyle="--")
        axes[0][0].annotate(
            "unlimited, a snapshot at every block", (0.02, bound), xycoords=("axes fraction", "data"),
            va="bottom", color="#666666", fontsize=8,
        )  # fmt: skip
    _legend(figure, axes[0][0], len(shown))
    return figure


def recomputed_by_cause(point: Point, shown: Sequence[Series]) -> Figure:
    """Tokens computed again, by cause, one bar a series.

    Args:
        point: One trace at one capacity.
        shown: Series, from top to bottom.
    """
    rows = [(series, numbers) for series in shown if (numbers := point.numbers(series)) and numbers.hits_known]
    figure, axes = _figure(10, 0.32 * len(rows) + 1.5, 1, 1)
    axis = axes[0][0]
    unit, name = _unit(max((sum(numbers.recomputed.values()) for _, numbers in rows), default=0.0))
    left = np.zeros(len(rows))
    for cause, title in CAUSES.items():
        widths = np.array([numbers.recomputed[cause] / unit for _, numbers in rows])
        if widths.any():
            axis.barh(range(len(rows)), widths, 0.72, left=left, color=_CAUSE_COLOURS[cause], label=title)
            left += widths
    for place, (_, numbers) in enumerate(rows):
        share = sum(numbers.recomputed.values()) / numbers.reusable_tokens if numbers.reusable_tokens else 0.0
        axis.annotate(f" {share:.1%}", (left[place], place), va="center", fontsize=8, color="#444444")
    _rows(axis, [series.label for series, _ in rows])
    axis.set_xlabel(f"tokens computed again{name}; percent: of what an unlimited cache could reuse")
    axis.margins(x=0.08)
    _legend(figure, axis, len(CAUSES))
    return figure


def time_to_first_token(point: Point, shown: Sequence[Series], which: str) -> Figure:
    """Mean, p50, p95 and p99 TTFT of every series on one line each.

    Args:
        point: One trace at one capacity.
        shown: Series, from top to bottom.
        which: `ALL` or `SENSITIVE`.
    """
    rows = [(series, numbers) for series in shown if (numbers := point.numbers(series, which))]
    figure, axes = _figure(10, 0.32 * len(rows) + 1.5, 1, 1)
    axis = axes[0][0]
    marks = (("p50", "p50_s", "o", "#56B4E9"), ("mean", "mean_s", "D", "#000000"), ("p95", "p95_s", "s", "#E69F00"),
             ("p99", "p99_s", "^", "#D55E00"))  # fmt: skip
    places = range(len(rows))
    axis.hlines(places, [n.p50_s for _, n in rows], [n.p99_s for _, n in rows], color="#CCCCCC", linewidth=1.5)
    for label, attribute, marker, colour in marks:
        values = [getattr(numbers, attribute) for _, numbers in rows]
        axis.scatter(values, places, marker=marker, color=colour, label=label, zorder=3, s=34)
    _rows(axis, [series.label for series, _ in rows])
    _time_axis(axis)
    axis.set_title(f"{which} requests")
    _legend(figure, axis, len(marks))
    return figure


def occupancy(point: Point, shown: Sequence[Series]) -> Figure | None:
    """Bytes of KV and snapshots in every tier over time, a row a series (its first seed); None if nothing was sampled.

    Args:
        point: One trace at one capacity.
        shown: Series to draw.
    """
    rows = [(series, run) for series in shown if (run := point.runs[series][0]).facts.occupancy]
    tiers = [
        tier
        for tier in _TIERS
        if any(sample.kv.get(tier) or sample.snapshots.get(tier) for _, run in rows for sample in run.facts.occupancy)
    ]
    if not rows or not tiers:
        return None
    figure, axes = _figure(3.9 * len(tiers) + 0.8, 1.75 * len(rows) + 0.8, len(rows), len(tiers), sharex=True)
    for row, (series, run) in enumerate(rows):
        minutes = [sample.at_s / 60 for sample in run.facts.occupancy]
        for column, tier in enumerate(tiers):
            axis = axes[row][column]
            kv = [sample.kv.get(tier, 0.0) / GIB for sample in run.facts.occupancy]
            snapshots = [sample.snapshots.get(tier, 0.0) / GIB for sample in run.facts.occupancy]
            axis.stackplot(
                minutes, kv, snapshots, colors=(_KV_COLOUR, _SNAPSHOT_COLOUR), labels=("KV", "snapshots"), linewidth=0
            )
            capacity = run.facts.capacities.get(tier, math.inf) / GIB
            if not any(kv) and not any(snapshots):
                axis.annotate("not used", (0.5, 0.5), xycoords="axes fraction", ha="center", color="#888888")
            elif math.isfinite(capacity) and capacity > 0 and series.policy != UNLIMITED:
                axis.axhline(capacity, color="#D55E00", linewidth=1, linestyle="--", label="capacity")
            axis.set_ylim(bottom=0)
            axis.margins(x=0)
            if row == 0:
                axis.set_title(_TIERS[tier])
            if column == 0:
                axis.set_ylabel(f"{series.label}\nGiB", fontsize=8)
            if row == len(rows) - 1:
                axis.set_xlabel("minutes")
    _legend(figure, axes[0][0], 3)
    return figure


def evictions(point: Point, shown: Sequence[Series]) -> Figure | None:
    """What left each tier and whether a later request wanted it, all seeds together; None if nothing left.

    Args:
        point: One trace at one capacity.
        shown: Series, from top to bottom.
    """
    counts = {series: [count for run in point.runs[series] for count in run.facts.evictions] for series in shown}
    panels = [
        (tier, kind)
        for tier in _TIERS
        for kind in ("kv", "snapshot")
        if any(
            (count.tier, count.kind) == (tier, kind) and count.objects for found in counts.values() for count in found
        )
    ]
    rows = [series for series in shown if any(count.objects for count in counts[series])]
    if not panels or not rows:
        return None
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = _figure(5.8 * columns + 1, (0.26 * len(rows) + 1.3) * lines, lines, columns, sharey=True)
    for number, (tier, kind) in enumerate(panels):
        axis = axes[number // columns][number % columns]
        for place, series in enumerate(rows):
            members = [count for count in counts[series] if (count.tier, count.kind) == (tier, kind)]
            objects = sum(count.objects for count in members)
            if not objects:
                continue
            missed = sum(count.missed_later for count in members)
            size = sum(count.nbytes for count in members) / GIB
            axis.barh(place, size * missed / objects, 0.72, color=_MISSED_COLOUR)
            axis.barh(place, size * (1 - missed / objects), 0.72, left=size * missed / objects, color=_UNUSED_COLOUR)
            axis.annotate(f" {missed / objects:.0%}", (size, place), va="center", fontsize=8, color="#444444")
        what = "KV" if kind == "kv" else "snapshots"
        axis.set(title=f"{what} evicted from {_TIERS[tier]}", xlabel="GiB; percent: of the objects, missed later")
        axis.margins(x=0.12)
        _rows(axis, [series.label for series in rows])
    for spare in range(len(panels), lines * columns):
        axes[spare // columns][spare % columns].set_visible(False)
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_MISSED_COLOUR, label="a later request wanted it"),
        Patch(color=_UNUSED_COLOUR, label="nobody did"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _any_numbers(point: Point, series: Series) -> Numbers | None:
    return point.numbers(series if series in point.runs else next(iter(point.runs)))


def _figure(
    width: float, height: float, rows: int, columns: int, *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, Any]:
    """A figure with a grid of axes that needs no display; axes come as rows of columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _time_axis(axis: Axes) -> None:
    """A logarithmic axis of TTFT with plain numbers, as many as fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    decades = math.log10(high / low) if low > 0 else 1.0
    steps = tuple(range(1, 10)) if decades < 0.7 else (1, 2, 5) if decades < 3 else (1,)
    axis.xaxis.set_major_locator(LogLocator(subs=steps, numticks=15))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("time to first token (s)")


def _legend(figure: Figure, axis: Axes, entries: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, max(1, entries)), frameon=False, fontsize=9)


def _rows(axis: Axes, labels: Sequence[str]) -> None:
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.set_ylim(len(labels) - 0.4, -0.6)  # the first on top
    axis.grid(visible=False, axis="y")


def _unit(largest: float) -> tuple[float, str]:
    for size, name in ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)")):
        if largest >= 2 * size:
            return size, name
    return 1.0, ""
