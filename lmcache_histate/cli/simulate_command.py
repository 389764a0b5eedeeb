"""``histate simulate``: what policies would do with a trace, on one simulated instance."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lmcache_histate.cli.common import TraceArgument, fail
from lmcache_histate.config.values import parse_gib
from lmcache_histate.geometry import GIB
from lmcache_histate.replay.comparison import ALL, SENSITIVE, Numbers, Point, Series, compare
from lmcache_histate.replay.cost_model import CostModelError, read_cost_model
from lmcache_histate.replay.results import Run, write_run
from lmcache_histate.replay.simulator import POLICIES, SimulationSettings, StuckError, simulate
from lmcache_histate.replay.simulator.hardware import GPUS, MODELS
from lmcache_histate.replay.traces.load import load_trace
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.source import TraceError

DEFAULTS = SimulationSettings()
DEFAULT_POLICIES = ("vllm", "cpu-disk", "histate")
BASELINE, OURS = "cpu-disk", "histate"
"""The disk-offload LRU baseline and the policy that reuse-sensitive requests are found with."""
FIGURES = ("reuse", "mean", "p50", "p95", "p99")
"""Columns of the tables that `_cells` fills."""


def list_policies(wanted: bool) -> None:
    """Print every policy and exit, if that is wanted (the callback of `--list-policies`)."""
    if wanted:
        for name, policy in POLICIES.items():
            typer.echo(f"{name:{max(map(len, POLICIES))}}  {policy.description}")
        raise typer.Exit


def simulate_command(
    trace: TraceArgument,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A policy, or all. May be given several times. Default: {', '.join(DEFAULT_POLICIES)}.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="GPU memory for KV and states, in GiB or with a unit.")] = (
        f"{DEFAULTS.gpu_bytes / GIB:g}GiB"
    ),
    cpu: Annotated[str, typer.Option(help="CPU memory of the cache, in GiB or with a unit.")] = (
        f"{DEFAULTS.cpu_bytes / GIB:g}GiB"
    ),
    disk: Annotated[str, typer.Option(help="Disk of the cache, in GiB or with a unit; 0 for none.")] = (
        f"{DEFAULTS.disk_bytes / GIB:g}GiB"
    ),
    remote: Annotated[str, typer.Option(help="Remote tier behind both, in GiB or with a unit; 0 for none.")] = "0",
    sessions: Annotated[int, typer.Option(help="Sessions at the same time.", min=1)] = DEFAULTS.sessions,
    seed: Annotated[int, typer.Option(help="Order in which sessions begin; 0 is the trace's.", min=0)] = 0,
    requests: Annotated[
        int | None, typer.Option(help="Take only so many requests, the first of the trace.", min=1, show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = DEFAULTS.model,
    gpu: Annotated[str, typer.Option(help=f"Of {', '.join(GPUS)}.")] = DEFAULTS.gpu,
    cost_model: Annotated[
        Path | None,
        typer.Option(
            help="A cost model of `histate calibrate`, instead of --gpu's.", metavar="FILE", show_default=False
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of an engine block, a multiple of the trace's. Default: the multiple nearest to 576.",
            min=1,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for result files, for `histate report`.", metavar="FOLDER", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    list_policies: Annotated[
        bool,
        typer.Option("--list-policies", callback=list_policies, is_eager=True, help="Show the policies and exit."),
    ] = False,
) -> None:
    """Simulate policies on a trace: hit rates, TTFT and bytes written to disk.

    Sessions send their requests with the trace's think times to one instance, so many sessions at once. Equal arguments
    give equal results.
    """
    # Progress and messages stay out of what a program reads.
    console = Console(stderr=as_json)
    names = _names(policy)
    settings = _settings(
        gpu_bytes=_bytes("--gpu-memory", gpu_memory),
        cpu_bytes=_bytes("--cpu", cpu),
        disk_bytes=_bytes("--disk", disk),
        remote_bytes=_bytes("--remote", remote),
        sessions=sessions,
        seed=seed,
        model=model,
        gpu=gpu,
        block_tokens=block_size,
        cost_model=cost_model,
    )
    with console.status("reading the trace"):
        try:
            loaded = load_trace(trace, limit=requests)
            settings.block_for(loaded)
        except (TraceError, ValueError) as error:
            fail(str(error))
    runs = _run(console, loaded, settings, names)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, run in zip(names, runs, strict=True):
            write_run(out / f"{name}-seed{seed}.jsonl.gz", run)
    point = compare(runs, [BASELINE], OURS)[0]
    rows = [_row(name, run, point) for name, run in zip(names, runs, strict=True)]
    if as_json:
        typer.echo(json.dumps({"trace": loaded.name, "requests": len(loaded.requests), "policies": rows}, indent=2))
        return
    console.print(_all_requests(loaded, rows, settings))
    if all("sensitive" in row for row in rows):
        console.print(_sensitive_requests(rows))
    else:
        console.print(
            f"No figures of reuse-sensitive requests: they need the policies {BASELINE} and {OURS}, and some such request.",
            highlight=False,
            soft_wrap=True,
        )
    if out is not None:
        console.print(f"results: {out}", highlight=False, soft_wrap=True)
        console.print(f"report:  histate report {out}", highlight=False, soft_wrap=True)


def _names(policy: list[str] | None) -> list[str]:
    names = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    if "all" in names:
        return list(POLICIES)
    for name in names:
        if name not in POLICIES:
            fail(f"--policy: no policy {name!r}; there are {', '.join(POLICIES)}, and all")
    return names


def _bytes(option: str, text: str) -> float:
    try:
        return parse_gib(text) * GIB
    except ValueError as error:
        fail(f"{option}: {error}")


def _settings(cost_model: Path | None, **values: Any) -> SimulationSettings:
    try:
        settings = SimulationSettings(**values)
        if cost_model is None:
            return settings
        return replace(settings, **read_cost_model(cost_model).settings(MODELS[settings.model].kv_bytes_per_token))
    except (CostModelError, ValueError) as error:
        fail(str(error))


def _run(console: Console, trace: Trace, settings: SimulationSettings, names: list[str]) -> list[Run]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    runs = []
    with Progress(*columns, console=console, transient=True) as progress:
        for name in names:
            task = progress.add_task(name, total=len(trace.requests))

            def advance(requests: int, task: Any = task) -> None:
                progress.advance(task, requests)

            try:
                runs.append(simulate(trace, replace(settings, policy=name), advance))
            except (StuckError, ValueError) as error:
                fail(f"{name}: {error}", 1)
    return runs


def _row(name: str, run: Run, point: Point) -> dict[str, Any]:
    series = Series(name)
    row = {"policy": name, **_figures(point.numbers(series, ALL))}
    row["disk_bytes_written"] = run.facts.settings["disk_bytes_written"]
    row["simulated_seconds"] = run.facts.seconds
    sensitive = point.numbers(series, SENSITIVE)
    if sensitive is not None:
        row["sensitive"] = _figures(sensitive)
    return row


def _figures(numbers: Numbers | None) -> dict[str, Any]:
    if numbers is None:
        return {"requests": 0}
    return {
        "requests": numbers.requests,
        "hit_rate": numbers.hit_rate,
        "reused_share": None if math.isnan(numbers.reused_share) else numbers.reused_share,
        "recomputed_tokens": numbers.recomputed,
        "ttft_s": {"mean": numbers.mean_s, "p50": numbers.p50_s, "p95": numbers.p95_s, "p99": numbers.p99_s},
    }


def _all_requests(trace: Trace, rows: list[dict[str, Any]], settings: SimulationSettings) -> Table:
    sizes = {"GPU": settings.gpu_bytes, "CPU": settings.cpu_bytes, "disk": settings.disk_bytes}
    if settings.remote_bytes:
        sizes["remote"] = settings.remote_bytes
    table = _table(
        f"{trace.name}: {len(trace.requests):,} requests, {settings.sessions} sessions at once; "
        + ", ".join(f"{tier} {nbytes / GIB:g} GiB" for tier, nbytes in sizes.items()),
        rows,
        ("hit rate", *FIGURES, "written"),
    )
    table.caption = "TTFT in seconds; reuse: share of what an unlimited cache would reuse; written: to disk, GiB"
    for row in rows:
        written = f"{row['disk_bytes_written'] / GIB:,.0f}"
        table.add_row(row["policy"], f"{row['hit_rate']:.1%}", *_cells(row), written)
    return table


def _sensitive_requests(rows: list[dict[str, Any]]) -> Table:
    count = rows[0]["sensitive"]["requests"]
    table = _table(f"the {count:,} reuse-sensitive requests among them", rows, FIGURES)
    for row in rows:
        table.add_row(row["policy"], *_cells(row["sensitive"]))
    return table


def _table(title: str, rows: list[dict[str, Any]], headings: Sequence[str]) -> Table:
    """Columns for a terminal of 80 characters; in a narrower one everything but the policies is shortened."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True, min_width=max(len(row["policy"]) for row in rows))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(figures: dict[str, Any]) -> list[str]:
    share = figures["reused_share"]
    return ["-" if share is None else f"{share:.1%}", *(f"{value:.3g}" for value in figures["ttft_s"].values())]
