"""``histate demo``: one scripted agent workload on vLLM alone, stock LMCache and HiState, on this machine's CPU."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TaskID

from lmcache_histate.cli.common import counted_progress
from lmcache_histate.replay import report
from lmcache_histate.replay.engine import EngineDied, EngineSettings
from lmcache_histate.replay.live import BACKENDS, Capacity, run_backend
from lmcache_histate.replay.outcome import RequestOutcome, RunOutcome, Verdict, compare_outputs
from lmcache_histate.replay.processes import StartError, cache_folder, unwinding_on_signals
from lmcache_histate.replay.tiny_model import ensure_tiny_model
from lmcache_histate.replay.workload import Step, WorkloadSpec, make_script

CAPACITY = Capacity(pool_blocks=256, memory_bytes=64 << 20, disk_bytes=256 << 20)
"""vLLM's pool holds two of the five sessions, CPU memory about half of the KV, the disk everything for a while: with room
for all of it no policy could show a difference."""

TITLES = {name: backend.title for name, backend in BACKENDS.items()}


def demo(
    output: Annotated[Path, typer.Option(help="Folder for results, plot and logs.")] = Path(".demo"),
    backends: Annotated[
        str, typer.Option(help=f"What to compare, separated by commas, of: {', '.join(BACKENDS)}.")
    ] = ",".join(BACKENDS),
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
) -> None:
    """Compare back ends on a small hybrid model with random weights; needs no GPU and no download.

    The first back end named is the reference for the outputs of the others.
    """
    names = [name.strip() for name in backends.split(",") if name.strip()]
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        raise typer.BadParameter(f"unknown: {', '.join(unknown) or 'none given'}; choose of {', '.join(BACKENDS)}")
    if importlib.util.find_spec("vllm") is None:
        typer.echo("The demo runs vLLM on the CPU: pip install 'lmcache-histate[cpu]', or `make setup`.", err=True)
        raise typer.Exit(2)
    console = Console()
    script = make_script(WorkloadSpec(seed=seed))
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with unwinding_on_signals():
        try:
            runs = _run_all(console, names, script, output)
        except (StartError, EngineDied) as error:
            console.print(f"[red]The demo stopped:[/red] {error}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
    reference = runs[0]
    verdicts = {run.backend: compare_outputs(run.requests, reference.requests) for run in runs[1:]}
    _show(console, runs, verdicts, output, seed, time.monotonic() - started)
    if (own := verdicts.get("histate")) is not None and own.wrong:
        raise typer.Exit(1)


def _run_all(console: Console, names: list[str], script: list[Step], output: Path) -> list[RunOutcome]:
    runs: list[RunOutcome] = []
    with counted_progress(console=console) as progress:
        building = progress.add_task("tiny hybrid model", total=1)
        model = ensure_tiny_model(cache_folder() / "models" / "tiny")
        progress.update(building, completed=1)
        for name in names:
            start = progress.add_task(f"{TITLES[name]}: starting the engine", total=1)
            requests = progress.add_task(f"{TITLES[name]}: requests", total=len(script), start=False)

            def started(start: TaskID = start, requests: TaskID = requests) -> None:
                progress.update(start, completed=1)
                progress.start_task(requests)

            def answered(outcome: RequestOutcome, requests: TaskID = requests) -> None:
                progress.advance(requests)

            runs.append(
                run_backend(
                    BACKENDS[name],
                    script,
                    EngineSettings(model),
                    CAPACITY,
                    output / name,
                    reference=runs[0] if runs else None,
                    on_start=started,
                    on_request=answered,
                )
            )
    return runs


def _show(
    console: Console,
    runs: list[RunOutcome],
    verdicts: dict[str, Verdict],
    output: Path,
    seed: int,
    seconds: float,
) -> None:
    console.print()
    console.print(report.main_table(runs, TITLES, verdicts))
    console.print(report.kind_table(runs, TITLES))
    for name, verdict in verdicts.items():
        if verdict.rounding:
            console.print(f"{TITLES[name]}: {len(verdict.rounding)} outputs differ by rounding alone.", highlight=False)
    settings = {
        "seed": seed,
        "pool_blocks": CAPACITY.pool_blocks,
        "memory_bytes": CAPACITY.memory_bytes,
        "disk_bytes": CAPACITY.disk_bytes,
    }
    report.save_json(report.to_json(runs, verdicts, settings), output / "results.json")
    console.print(f"{seconds:.0f} s; results: {output / 'results.json'}", highlight=False)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No plot: matplotlib is not installed (pip install 'lmcache-histate[plots]').", highlight=False)
        return
    report.save_plot(runs, TITLES, output / "demo.png")
    console.print(f"plot: {output / 'demo.png'}", highlight=False)


if __name__ == "__main__":
    typer.run(demo)
