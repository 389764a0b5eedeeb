"""``histate report``: one self-contained HTML page, its plots as PNG, and its numbers as CSV and JSON."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_histate.replay import figures, report_tables
from lmcache_histate.replay.comparison import ALL, SENSITIVE, Numbers, Point, Series
from lmcache_histate.replay.report_tables import Standing
from lmcache_histate.replay.simulator import POLICIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 120

TOLERANCE = 1.01
"""Ratios up to this count as no worse."""

_TEMPLATE = Path(__file__).with_name("report_page.html.j2")


@dataclass(frozen=True)
class Picture:
    """A plot in the page: its file's name, its caption, and the PNG as base64."""

    name: str
    caption: str
    data: str


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: The HTML file.
        csv: The numbers.
        json: The numbers, standings and evictions.
        pictures: The plots.
        standings: How HiState stands, for a summary on the terminal.
    """

    page: Path
    csv: Path
    json: Path
    pictures: list[Path]
    standings: list[Standing]


def write_report(
    points: Sequence[Point],
    folder: Path,
    ours: str,
    shown: Sequence[str] = (),
    notes: Sequence[str] = (),
    on_picture: Callable[[int, int], object] | None = None,
) -> Report:
    """Write a report; files of an earlier one in the folder are replaced.

    Args:
        points: What `comparison.compare` made.
        folder: Made if it is not there.
        ours: Policy that is judged.
        shown: Policies that plots of curves show; a choice of the most telling ones if empty.
        notes: Sentences for the top of the page.
        on_picture: Called after each plot with the number done and the number of all.
    """
    writer = _Writer(points, folder, ours, shown, on_picture)
    return writer.write(notes)


class _Writer:
    def __init__(
        self,
        points: Sequence[Point],
        folder: Path,
        ours: str,
        shown: Sequence[str],
        on_picture: Callable[[int, int], object] | None,
    ) -> None:
        self._points = points
        self._folder = folder
        self._ours = ours
        self._order = report_tables.series_order(points, ours)
        self._styles = figures.styles(self._order, ours)
        self._curves = [series for series in self._order if not shown or series.policy in shown]
        if not shown:
            self._curves = self._curves[: figures.HEADLINE]
        self._on_picture = on_picture
        self._pictures: list[Path] = []
        self._expected = sum(6 for _ in points)
        baselines = [series.policy for point in points for series in point.baselines]
        self._baseline = baselines[0] if baselines else "the disk-offload LRU baseline"

    def write(self, notes: Sequence[str]) -> Report:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

        (self._folder / "figures").mkdir(parents=True, exist_ok=True)
        for stale in (self._folder / "figures").glob("*.png"):
            stale.unlink()
        rows = report_tables.number_rows(self._points, self._ours)
        standings = report_tables.standings(self._points)
        csv_text = report_tables.to_csv(rows)
        json_text = report_tables.to_json(self._points, rows, standings)
        traces = [self._trace(name, list(points)) for name, points in groupby(self._points, lambda point: point.trace)]
        page = (
            Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
            .from_string(_TEMPLATE.read_text(encoding="utf-8"))
            .render(
                title="Prefix cache policies compared",
                subtitle=self._subtitle(),
                ours=self._ours,
                baseline=self._baseline,
                notes=[*notes, *self._own_notes()],
                standings=[self._standing(standing) for standing in standings],
                traces=traces,
                csv=_base64(csv_text.encode()),
                json=_base64(json_text.encode()),
                settings=self._settings(),
                policies=self._policies(),
                picture=lambda figure: Markup(
                    '<figure><img alt="{0}" src="data:image/png;base64,{1}"><figcaption>{0}</figcaption></figure>'
                ).format(figure.caption, figure.data),
            )
        )
        report = Report(
            self._folder / "index.html",
            self._folder / "summary.csv",
            self._folder / "summary.json",
            self._pictures,
            standings,
        )
        report.page.write_text(page, encoding="utf-8")
        report.csv.write_text(csv_text, encoding="utf-8")
        report.json.write_text(json_text, encoding="utf-8")
        return report

    def _subtitle(self) -> str:
        runs = [run for point in self._points for members in point.runs.values() for run in members]
        live = sum(not run.facts.simulated for run in runs)
        kinds = [text for count, text in ((len(runs) - live, "simulated"), (live, "live")) if count]
        counts = " and ".join(f"{len(runs) - live if kind == 'simulated' else live} {kind}" for kind in kinds)
        policies = len({series.policy for point in self._points for series in point.runs})
        traces = len({point.trace for point in self._points})
        return (
            f"{counts} run{'s' if len(runs) > 1 else ''}: {policies} polic{'ies' if policies > 1 else 'y'}, "
            f"{traces} trace{'s' if traces > 1 else ''}, {len(self._points)} "
            f"capacit{'ies' if len(self._points) > 1 else 'y'}."
        )

    def _own_notes(self) -> list[str]:
        notes = []
        for point in self._points:
            seeds = {series: frozenset(run.facts.seed for run in runs) for series, runs in point.runs.items()}
            simulated = {found for series, found in seeds.items() if not series.live}
            if len(simulated) > 1:
                notes.append(
                    f"{point.trace}, {point.capacity_text}: not every policy has the same seeds, so their numbers "
                    "are not of the same requests. Run the sweep to its end."
                )
            silent = [s.label for s, runs in point.runs.items() if not all(run.hits_known for run in runs)]
            if silent:
                notes.append(
                    f"{point.trace}: the server behind {', '.join(silent)} did not report cached tokens, so hit rates "
                    "are not known. vLLM reports them with --enable-prompt-tokens-details."
                )
            for series, runs in point.runs.items():
                if failed := sum(run.failed for run in runs):
                    notes.append(
                        f"{point.trace}, {series.label}: {failed} request{'s' if failed > 1 else ''} failed, left out here."
                    )
        return notes

    def _trace(self, name: str, points: list[Point]) -> dict[str, Any]:
        anchor = _file_name(name)
        overview = []
        sized = [point for point in points if point.factor is not None or math.isfinite(point.capacity_bytes)]
        if len(sized) > 1:
            overview.append(
                self._picture(
                    f"{anchor}-capacity",
                    "Hit rate and time to first token against the capacity of all tiers.",
                    figures.against_capacity(sized, self._curves, self._styles),
                )
            )
        focus = min(points, key=lambda point: abs(math.log(point.factor)) if point.factor else 0.0)
        return {
            "name": name,
            "anchor": anchor,
            "figures": overview,
            "points": [self._point(anchor, point, point is focus) for point in points],
        }

    def _point(self, anchor: str, point: Point, is_open: bool) -> dict[str, Any]:
        prefix = f"{anchor}-{_file_name(point.capacity_mark)}"
        rows = [series for series in self._order if series in point.runs]
        by_mean = sorted(rows, key=lambda series: numbers.mean_s if (numbers := point.numbers(series)) else math.inf)
        curves = [series for series in self._curves if series in point.runs] or rows[: figures.HEADLINE]
        drawn = [
            (
                "ttft-cdf",
                "Distribution of the time to first token.",
                figures.ttft_distributions(point, curves, self._styles),
            ),
            (
                "ttft",
                "Time to first token, all policies, by mean.",
                figures.time_to_first_token(point, by_mean, ALL),
            ),
        ]
        if any(point.numbers(series, SENSITIVE) for series in rows):
            drawn.append(
                (
                    "ttft-sensitive",
                    "Time to first token on the reuse-sensitive requests.",
                    figures.time_to_first_token(point, by_mean, SENSITIVE),
                )
            )
        if any(all(run.hits_known for run in point.runs[series]) for series in rows):
            drawn.append(
                ("recomputed", "Tokens computed again, by cause.", figures.recomputed_by_cause(point, by_mean))
            )
        if (figure := figures.evictions(point, [s for s in by_mean if s in curves])) is not None:
            drawn.append(("evictions", "What left each tier for good, and whether it was missed later.", figure))
        if (figure := figures.occupancy(point, curves)) is not None:
            drawn.append(("occupancy", "Bytes in every tier over time (first seed).", figure))
        return {
            "title": f"At {point.capacity_text}",
            "open": is_open,
            "tables": [self._table(point, by_mean, which) for which in (ALL, SENSITIVE)],
            "figures": [self._picture(f"{prefix}-{name}", caption, figure) for name, caption, figure in drawn],
        }

    def _table(self, point: Point, order: Sequence[Series], which: str) -> dict[str, Any]:
        rows = []
        count = 0
        for series in order:
            numbers = point.numbers(series, which)
            if numbers is None:
                continue
            count = max(count, numbers.requests)
            rows.append(
                {
                    "label": series.label,
                    "ours": series.policy == self._ours,
                    # Of all others a colour would stand for several.
                    "colour": self._styles[series].colour if series in self._curves else "transparent",
                    "cells": self._cells(point, series, which, numbers),
                }
            )
        note = ""
        if not rows:
            note = (
                f"None: either {self._baseline} was not run here, or no request is reuse-sensitive."
                if which == SENSITIVE
                else "No request succeeded."
            )
        headings = ["", "requests", "hit rate", "of unlimited", "computed again", "mean TTFT", "p50", "p95", "p99"]
        headings += [
            f"mean / {self._ours}",
            f"p99 / {self._ours}",
            f"mean / {self._baseline}",
            f"p99 / {self._baseline}",
        ]
        title = "All requests" if which == ALL else "Reuse-sensitive requests"
        return {"title": title, "note": note, "headings": headings, "rows": rows}

    def _cells(self, point: Point, series: Series, which: str, numbers: Numbers) -> list[str]:
        known = numbers.hits_known
        cells = [
            f"{numbers.requests:,}",
            percent(numbers.hit_rate),
            percent(numbers.reused_share),
            f"{sum(numbers.recomputed.values()):,.0f}" if known else "-",
            *(seconds(value) for value in (numbers.mean_s, numbers.p50_s, numbers.p95_s, numbers.p99_s)),
        ]
        for choices in (point.ours, point.baselines):
            reference = point.reference(choices, series.live)
            other = point.numbers(reference, which) if reference else None
            for attribute in ("mean_s", "p99_s"):
                value = getattr(numbers, attribute)
                cells.append(times(report_tables.ratio_of(value, getattr(other, attribute))) if other else "-")
        return cells

    def _standing(self, standing: Standing) -> dict[str, Any]:
        def cell(value: float, aside: str = "") -> dict[str, str]:
            mood = "" if math.isnan(value) else "good" if value <= TOLERANCE else "bad"
            return {"text": times(value), "aside": aside, "mood": mood}

        return {
            "where": f"{standing.trace}, {standing.capacity}" + (" (live)" if standing.series != self._ours else ""),
            "cells": [
                cell(standing.mean_ratio, f"({standing.best_mean})"),
                cell(standing.p99_ratio, f"({standing.best_p99})"),
                cell(standing.p50_ratio),
                cell(standing.sensitive_mean_ratio),
                cell(standing.sensitive_p99_ratio),
                {"text": percent(standing.sensitive_reused), "aside": "", "mood": ""},
            ],
        }

    def _settings(self) -> str:
        shown = [
            {
                "policy": series.label,
                "trace": point.trace,
                "seed": run.facts.seed,
                "capacities": point.capacities,
                "seconds": run.facts.seconds,
                **run.facts.settings,
            }
            for point in self._points
            for series, runs in point.runs.items()
            for run in runs
        ]
        return "\n".join(json.dumps(entry, default=str) for entry in shown)

    def _policies(self) -> list[dict[str, str]]:
        """Name and description of every policy of the report that the simulator knows."""
        names = dict.fromkeys(series.policy for series in self._order if series.policy in POLICIES)
        return [{"name": name, "description": POLICIES[name].description} for name in names]

    def _picture(self, name: str, caption: str, figure: Figure) -> Picture:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH)
        path = self._folder / "figures" / f"{name}.png"
        path.write_bytes(buffer.getvalue())
        self._pictures.append(path)
        if self._on_picture is not None:
            self._on_picture(len(self._pictures), max(len(self._pictures), self._expected))
        return Picture(name, caption, _base64(buffer.getvalue()))


def percent(value: float) -> str:
    """A share as a percentage; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.1%}"


def seconds(value: float) -> str:
    """Seconds with three digits, in ms below one second; a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def times(value: float) -> str:
    """A ratio; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:.2f}x"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower() or "trace"
