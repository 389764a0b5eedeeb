"""``histate replay``: a trace against a live server, as a result file like those of the simulator."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_histate.cli.common import TraceArgument, fail
from lmcache_histate.config.values import parse_gib
from lmcache_histate.geometry import GIB
from lmcache_histate.replay.comparison import CACHED_TOKENS_REPORTED, RunTable, summarize
from lmcache_histate.replay.report_page import percent, seconds
from lmcache_histate.replay.results import RequestResult, Run, write_run
from lmcache_histate.replay.traces.load import load_trace
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.source import TraceError

if TYPE_CHECKING:
    from lmcache_histate.replay.endpoint import EndpointSettings, Replay

TIERS = ("gpu", "cpu", "disk", "remote")


def replay_command(
    trace: TraceArgument,
    endpoint: Annotated[str, typer.Option(help="The server, as http://HOST:PORT.", metavar="URL")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Result file. Default: NAME.jsonl.gz.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="What reports call this server, for example lmcache or histate.")] = "live",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for. Default: the first that the server lists.", show_default=False)
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="Multiply the lengths of prompts and answers by this, for example 1/16.", metavar="FACTOR"),
    ] = "1",
    speedup: Annotated[float, typer.Option(help="Divide think times by this.", min=1e-3)] = 1.0,
    sessions: Annotated[int, typer.Option(help="Sessions at the same time.", min=1)] = 8,
    requests: Annotated[
        int | None, typer.Option(help="Send only so many requests, the first of the trace.", min=1, show_default=False)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Another seed sends other tokens: a server that is warm from an earlier run starts cold."),
    ] = 0,
    token_ids: Annotated[
        str,
        typer.Option(help="Range of token ids in prompts; all must be in the model's vocabulary.", metavar="LOW-HIGH"),
    ] = "260-500",
    capacity: Annotated[
        str | None,
        typer.Option(
            help="What the server has, so that reports put it beside simulated runs: cpu=96GiB,disk=150GiB "
            f"(of {', '.join(TIERS)}).",
            metavar="TIER=SIZE,...",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Longest silence of the server within a request, in seconds.", min=1)
    ] = 600.0,
) -> None:
    """Send a trace to a live OpenAI-compatible server and record what it measures.

    Closed loop: a request is sent when the answer before it in its stream is complete and its think time is over. Prompts
    are token ids made from the trace's block hashes, so they share prefixes exactly where the trace does; what the server
    answers does not enter later prompts. OPENAI_API_KEY, if it is set, is sent along.

    How many tokens were cached is known only if the server says so: start vLLM with --enable-prompt-tokens-details.
    """
    from lmcache_histate.replay.endpoint import EndpointSettings

    console = Console()
    settings = EndpointSettings(
        name, _scale(scale), speedup, sessions, _token_ids(token_ids), seed, _capacities(capacity)
    )
    try:
        loaded = load_trace(trace, limit=requests)
    except TraceError as error:
        fail(str(error))
    path = output or Path(f"{name}.jsonl.gz")
    if not path.parent.is_dir():
        fail(f"--output: there is no folder {path.parent}")
    run, problem = _replay(console, loaded, endpoint, model, timeout, settings)
    if run is not None and run.requests:
        write_run(path, run)
        _show(console, run, path)
    if problem:
        fail(problem, 1)
    assert run is not None
    if all(result.error for result in run.requests):
        fail(f"every request failed; the first: {run.requests[0].error}", 1)


def _replay(
    console: Console, trace: Trace, url: str, model: str | None, timeout_s: float, settings: EndpointSettings
) -> tuple[Run | None, str]:
    """The run, as far as it came, and why it ended early (empty if it did not)."""
    from lmcache_histate.replay.endpoint import Replay
    from lmcache_histate.replay.endpoint_client import EndpointClient, EndpointError

    replay: Replay | None = None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console)
    task = progress.add_task("requests", total=None, figures="")
    times: list[float] = []
    failed = 0

    def answered(result: RequestResult) -> None:
        nonlocal failed
        if result.error:
            failed += 1
        else:
            times.append(result.ttft_s)
        figures = f"TTFT {seconds(sum(times) / len(times))}" if times else ""
        progress.update(task, advance=1, figures=figures + (f", {failed} failed" if failed else ""))

    async def send() -> None:
        nonlocal replay
        async with EndpointClient(url, timeout_s) as client:
            served = await client.model(model)
            replay = Replay(trace, client, served, settings, answered)
            fitting = replay.fitting
            console.print(f"{served.name} at {client.url}: {fitting.requests:,} requests", highlight=False)
            if fitting.left_out:
                console.print(
                    f"{fitting.streams_cut} streams end early, at their first request of more than the server's "
                    f"{served.max_model_len:,} tokens: {fitting.left_out:,} requests are not sent. A smaller --scale "
                    "sends them.",
                    highlight=False,
                    soft_wrap=True,
                )
            progress.update(task, total=fitting.requests)
            with progress:
                await replay.run()

    problem = ""
    try:
        asyncio.run(send())
    except EndpointError as error:
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted; what was measured until then is kept"
    return (replay.result() if replay is not None else None), problem


def _show(console: Console, run: Run, path: Path) -> None:
    table = RunTable.of(run)
    numbers = summarize([table])
    if numbers is not None:
        shown = Table(title=f"{run.facts.policy}: {run.facts.trace}", box=SIMPLE_HEAD, pad_edge=False)
        headings = ("requests", "failed", "hit rate", "of unlimited", "mean TTFT", "p50", "p95", "p99")
        for heading in headings:
            shown.add_column(heading, justify="right", no_wrap=True)
        shown.add_row(
            f"{numbers.requests:,}",
            f"{table.failed:,}",
            percent(numbers.hit_rate),
            percent(numbers.reused_share),
            *(seconds(value) for value in (numbers.mean_s, numbers.p50_s, numbers.p95_s, numbers.p99_s)),
        )
        console.print(shown)
        if not run.facts.settings[CACHED_TOKENS_REPORTED]:
            console.print(
                "The server did not say how many tokens it had cached: hit rates are not known. For vLLM, add "
                "--enable-prompt-tokens-details.",
                highlight=False,
                soft_wrap=True,
            )
    if table.failed:
        first = next(result.error for result in run.requests if result.error)
        console.print(
            f"{table.failed} requests failed; the first: {first}", highlight=False, markup=False, soft_wrap=True
        )
    console.print(f"result: {path}", highlight=False, soft_wrap=True)


def _scale(text: str) -> float:
    try:
        value = float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError):
        fail(f"--scale: {text!r} is not a number or a fraction such as 1/16")
    if not 0 < value < math.inf:
        fail(f"--scale: {text} must be above 0")
    return value


def _token_ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high)
    except ValueError:
        fail(f"--token-ids: {text!r} is not a range such as 260-500")
    if found[0] < 0 or found[1] - found[0] < 15:
        fail(f"--token-ids: {text!r} has fewer than 16 ids, so different blocks would often look alike")
    return found


def _capacities(text: str | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in (text or "").split(","):
        tier, _, size = part.strip().partition("=")
        if not part.strip():
            continue
        if tier not in TIERS:
            fail(f"--capacity: {part.strip()!r} is not one of {', '.join(f'{tier}=SIZE' for tier in TIERS)}")
        try:
            found[tier] = parse_gib(size) * GIB
        except ValueError as error:
            fail(f"--capacity: {tier}: {error}")
    return found
