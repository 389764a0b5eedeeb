"""``histate sweep``: policies times capacities times seeds on all cores, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn

from lmcache_histate.cli.common import TraceArgument, counted_progress, fail
from lmcache_histate.cli.simulate_command import list_policies
from lmcache_histate.config.values import parse_gib
from lmcache_histate.geometry import GIB
from lmcache_histate.replay.cost_model import CostModelError, read_cost_model
from lmcache_histate.replay.simulator import POLICIES, SimulationSettings
from lmcache_histate.replay.simulator.hardware import GPUS, MODELS
from lmcache_histate.replay.sweep import (
    Capacity,
    Failure,
    Sweep,
    SweepPoint,
    TraceSource,
    capacity_of_factor,
    points_of,
)
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.source import TraceError

FACTORS = "0.25,0.5,0.75,1,1.5,2"
GROUPS: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "main": lambda name: name in ("histate", "histate-paper") or not name.startswith("histate"),
    "ablations": lambda name: name.startswith("histate"),
}
"""Words for several policies."""
DEFAULTS = SimulationSettings()
SHOWN_FAILURES = 10


def sweep_command(
    trace: TraceArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the results; a sweep that is there is continued.")
    ] = Path("sweep"),
    capacities: Annotated[
        str,
        typer.Option(
            help="Capacities below the GPU, separated by commas: multiples of the working set (0.5), shared between CPU "
            "memory and disk as 96 to 150, or CPU memory and disk (96GiB+150GiB).",
            metavar="LIST",
        ),
    ] = FACTORS,
    policies: Annotated[
        str,
        typer.Option(
            help="Policies, separated by commas; `--list-policies` shows them. Or all, main (HiState, the paper's, every "
            "baseline and bound), ablations (HiState with parts changed).",
            metavar="LIST",
        ),
    ] = "all",
    seeds: Annotated[
        int, typer.Option(help="Runs of every point, each with the sessions in another order.", min=1)
    ] = 1,
    sessions: Annotated[int, typer.Option(help="Sessions at the same time.", min=1)] = DEFAULTS.sessions,
    requests: Annotated[
        int | None, typer.Option(help="Take only so many requests, the first of the trace.", min=1, show_default=False)
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"Of {', '.join(GPUS)}.")] = DEFAULTS.gpu,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = DEFAULTS.model,
    gpu_memory: Annotated[str, typer.Option(help="GPU memory for KV and snapshots, in GiB or with a unit.")] = (
        f"{DEFAULTS.gpu_bytes / GIB:g}"
    ),
    cost_model: Annotated[
        Path | None,
        typer.Option(
            help="A cost model of `histate calibrate`, instead of --gpu's.", metavar="FILE", show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes. Default: one a core.", min=1, show_default=False)
    ] = None,
    list_policies: Annotated[
        bool,
        typer.Option("--list-policies", callback=list_policies, is_eager=True, help="Show the policies and exit."),
    ] = False,
) -> None:
    """Simulate every policy at every capacity with every seed.

    Interrupt it at any time: run the same command again, and it goes on where it was. Results of another trace, other
    settings or another version of the code are never mixed in.
    """
    console = Console()
    names = _policies(policies)
    settings = _settings(sessions, model, gpu, gpu_memory, cost_model)
    sizes = [_capacity(text) for text in capacities.split(",") if text.strip()]
    if not sizes:
        fail("--capacities: none given")
    source = TraceSource(tuple(trace), requests)
    with console.status("reading the trace"):
        try:
            loaded = source.load()
            settings.block_for(loaded)
        except (TraceError, ValueError) as error:
            fail(str(error))
    with console.status("measuring the working set"):
        sweep, found = _open(output, source, loaded, settings, sizes)
    for aside in sweep.set_aside:
        console.print(f"results of other settings or code set aside: {aside}", highlight=False, soft_wrap=True)
    points = points_of(names, found, range(seeds))
    todo = sweep.open_points(points)
    count = workers or len(os.sched_getaffinity(0))
    console.print(
        f"{loaded.name}: {len(loaded.requests):,} requests; {len(points)} points, {len(points) - len(todo)} of them done; "
        f"{count} processes",
        highlight=False,
        soft_wrap=True,
    )
    failures = _run(console, sweep, todo, len(points), count)
    for failure in failures[:SHOWN_FAILURES]:
        console.print(f"failed: {failure.point.label}: {failure.reason}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"results: {sweep.folder}", highlight=False, soft_wrap=True)
    console.print(f"report:  histate report {sweep.folder}", highlight=False, soft_wrap=True)
    if failures:
        fail(f"{len(failures)} of {len(points)} points failed; the same command tries them again", 1)


def _run(console: Console, sweep: Sweep, todo: list[SweepPoint], all_points: int, workers: int) -> list[Failure]:
    with counted_progress(TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("points", total=all_points, completed=all_points - len(todo))

        def done(point: SweepPoint, failure: Failure | None) -> None:
            progress.update(task, advance=1, description=f"points (last: {point.label})")

        try:
            return sweep.run(todo, workers, done)
        except KeyboardInterrupt:
            progress.stop()
            fail("interrupted; the same command goes on from here", 130)


def _open(
    output: Path, source: TraceSource, trace: Trace, settings: SimulationSettings, sizes: list[float | Capacity]
) -> tuple[Sweep, list[Capacity]]:
    try:
        sweep = Sweep(output, source, trace, settings)
    except OSError as error:
        fail(f"--output: {error}")
    needed = any(isinstance(size, float) for size in sizes)
    working_set = sweep.working_set_bytes(trace) if needed else 0.0
    return sweep, [size if isinstance(size, Capacity) else capacity_of_factor(size, working_set) for size in sizes]


def _policies(text: str) -> list[str]:
    names: dict[str, None] = {}
    for word in (word.strip() for word in text.split(",")):
        if word in GROUPS:
            names.update(dict.fromkeys(name for name in POLICIES if GROUPS[word](name)))
        elif word in POLICIES:
            names[word] = None
        elif word:
            fail(f"--policies: no policy {word}; there are {', '.join((*POLICIES, *GROUPS))}")
    if not names:
        fail("--policies: none given")
    return list(names)


def _capacity(text: str) -> float | Capacity:
    cpu, plus, disk = text.strip().partition("+")
    try:
        if plus:
            return Capacity(parse_gib(cpu) * GIB, parse_gib(disk) * GIB)
        factor = float(cpu.removesuffix("x"))
        capacity_of_factor(factor, 1.0)
    except ValueError as error:
        fail(
            f"--capacities: {text.strip()!r}: write a multiple of the working set (0.5) or CPU+DISK (96GiB+150GiB): {error}"
        )
    return factor


def _settings(sessions: int, model: str, gpu: str, gpu_memory: str, cost_model: Path | None) -> SimulationSettings:
    try:
        gpu_bytes = parse_gib(gpu_memory) * GIB
        settings = SimulationSettings(sessions=sessions, model=model, gpu=gpu, gpu_bytes=gpu_bytes)
        if cost_model is None:
            return settings
        return replace(settings, **read_cost_model(cost_model).settings(MODELS[model].kv_bytes_per_token))
    except (ValueError, CostModelError) as error:
        fail(str(error))
