"""``histate report``: result files in, one self-contained page with plots and tables out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lmcache_histate.cli.common import counted_progress, fail
from lmcache_histate.replay.comparison import ComparisonError, compare
from lmcache_histate.replay.report_page import percent, times, write_report
from lmcache_histate.replay.report_tables import Standing
from lmcache_histate.replay.results import ResultError, Run, read_run

SUFFIXES = (".jsonl", ".jsonl.gz")
OURS = "histate"
BASELINES = ("cpu-disk", "lmcache")


def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Result files of `histate simulate`, `sweep` and `replay`, or folders of them.", metavar="RESULTS"
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page, plots, CSV and JSON.")] = Path(
        "report"
    ),
    ours: Annotated[str, typer.Option(help="Name of the policy that is judged by the others.")] = OURS,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the run with LRU on CPU and disk, which defines the reuse-sensitive requests. May be given "
            f"several times; the first that a point has is used. Default: {', '.join(BASELINES)}.",
            show_default=False,
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Policies that plots of curves show, separated by commas. Default: the most telling ones. "
            "Tables and bars always show all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare runs, simulated and live, in one HTML page with plots, tables, CSV and JSON."""
    for module in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(module) is None:
            fail(f"the report needs {module}: pip install 'lmcache-histate[plots]'")
    console = Console()
    files = result_files(results)
    with counted_progress(console=console, transient=True) as progress:
        reading = progress.add_task("reading results", total=len(files))

        def runs() -> Iterator[Run]:
            for file in files:
                yield read_run(file)
                progress.advance(reading)

        try:
            points = compare(runs(), baseline or BASELINES, ours)
        except (ResultError, ComparisonError, OSError) as error:
            fail(str(error))
        names = [name.strip() for name in (policies or "").split(",") if name.strip()]
        present = {series.policy for point in points for series in point.runs}
        if unknown := sorted(set(names) - present):
            fail(f"--policies: no run of {', '.join(unknown)}; there are {', '.join(sorted(present))}")
        drawing = progress.add_task("drawing", total=None)

        def drawn(done: int, expected: int) -> None:
            progress.update(drawing, completed=done, total=expected)

        written = write_report(points, output, ours, names, on_picture=drawn)
    if written.standings:
        console.print(_standings_table(written.standings, ours))
    console.print(f"report:  {written.page}", highlight=False, soft_wrap=True)
    console.print(f"numbers: {written.csv}, {written.json}", highlight=False, soft_wrap=True)
    console.print(f"plots:   {output / 'figures'} ({len(written.pictures)} PNG)", highlight=False, soft_wrap=True)


def result_files(paths: list[Path]) -> list[Path]:
    """The result files that the paths name, folders searched through; hidden files and folders are left out."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            members = [
                entry
                for entry in sorted(path.rglob("*"))
                if entry.name.endswith(SUFFIXES) and not any(part[0] == "." for part in entry.relative_to(path).parts)
            ]
            if not members:
                fail(f"{path}: no result files (*.jsonl, *.jsonl.gz) in this folder")
            found.update(dict.fromkeys(members))
        elif path.exists():
            found[path] = None
        else:
            fail(f"{path}: no such file or folder")
    return list(found)


def _standings_table(standings: list[Standing], ours: str) -> Table:
    table = Table(title=f"{ours} over the best online baseline (below 1 is faster)", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("trace", overflow="fold")
    table.add_column("capacity", overflow="fold")
    for heading in ("mean TTFT", "p99 TTFT", "p50*", "reuse**"):
        table.add_column(heading, justify="right", no_wrap=heading.endswith("*"), overflow="fold")
    for standing in standings:
        table.add_row(
            standing.trace,
            standing.capacity,
            f"{times(standing.mean_ratio)} {standing.best_mean}",
            f"{times(standing.p99_ratio)} {standing.best_p99}",
            times(standing.p50_ratio),
            percent(standing.sensitive_reused),
        )
    table.caption = (
        f"* over {standings[0].baseline or 'the disk-offload baseline'}'s; ** share of what the unlimited cache reuses, "
        "on reuse-sensitive requests"
    )
    return table
