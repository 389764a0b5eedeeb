"""``histate calibrate``: the simulator's cost model, measured on a live server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_histate.cli.common import fail
from lmcache_histate.replay.cost_model import write_cost_model
from lmcache_histate.replay.report_page import seconds

if TYPE_CHECKING:
    from lmcache_histate.replay.calibration import Calibration

DEFAULT_LONGEST = 32768
SHORTEST = 512


def calibrate_command(
    endpoint: Annotated[
        str, typer.Option(help="The server, as http://HOST:PORT. Nobody else should use it meanwhile.", metavar="URL")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The cost model.", metavar="FILE")] = Path(
        "cost-model.yaml"
    ),
    model: Annotated[
        str | None, typer.Option(help="Model to ask for. Default: the first that the server lists.", show_default=False)
    ] = None,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt.", min=16)] = SHORTEST,
    longest: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the longest prompt. Default: what the server takes, at most {DEFAULT_LONGEST}.",
            min=64,
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[int, typer.Option(help="Different lengths of prompts.", min=3, max=50)] = 7,
    repeats: Annotated[int, typer.Option(help="Measure everything so often; medians are taken.", min=1)] = 3,
    timeout: Annotated[
        float, typer.Option(help="Longest silence of the server within a request, in seconds.", min=1)
    ] = 600.0,
) -> None:
    """Measure prefill, hits and decoding on a live server, and write a cost model for `histate simulate --cost-model`.

    Hits come from vLLM's own cache unless the server runs with VLLM_SERVER_DEV_MODE=1: then that is emptied first, and
    what is measured is the restoring from CPU memory or disk. OPENAI_API_KEY, if it is set, is sent along.
    """
    from lmcache_histate.replay.calibration import DECODE_TOKENS, NEW_TOKENS, calibrate, ladder, request_count
    from lmcache_histate.replay.endpoint_client import EndpointClient, EndpointError

    if not output.parent.is_dir():
        fail(f"--output: there is no folder {output.parent}")
    console = Console()

    async def measure() -> Calibration:
        async with EndpointClient(endpoint, timeout) as client:
            served = await client.model(model)
            room = (served.max_model_len or DEFAULT_LONGEST + DECODE_TOKENS + NEW_TOKENS) - DECODE_TOKENS - NEW_TOKENS
            if longest is not None and longest > room:
                fail(f"--longest: {longest} and an answer do not fit the server's {served.max_model_len} tokens")
            try:
                steps = ladder(shortest, longest or min(DEFAULT_LONGEST, room), lengths)
            except ValueError as error:
                fail(f"{error}: change --shortest or --longest")
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
                task = progress.add_task(f"measuring {served.name}", total=request_count(steps, repeats))
                return await calibrate(client, served, steps, repeats, on_request=lambda: progress.advance(task))

    try:
        result = asyncio.run(measure())
    except EndpointError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", 1)
    write_cost_model(output, result.model)
    _show(console, result)
    console.print(f"cost model: {output}", highlight=False, soft_wrap=True)


def _show(console: Console, result: Calibration) -> None:
    from lmcache_histate.replay.calibration import DECODE_BATCH

    table = Table(title="Time to first token", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "prompt tokens", "cached", "measured", "fitted", "error"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, rows in (("cold", result.prefill), ("hit", result.hits)):
        for row in rows:
            known = row.fitted == row.fitted
            table.add_row(
                name,
                f"{row.tokens:,}",
                f"{row.cached_tokens or 0:,}",
                seconds(row.seconds),
                seconds(row.fitted),
                f"{row.fitted / row.seconds - 1:+.1%}" if known else "-",
            )
    console.print(table)
    steps = Table(title="Decode step", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("answers at once", "prompt tokens", "measured"):
        steps.add_column(heading, justify="right")
    for row in result.decode:
        steps.add_row("1", f"{row.tokens:,}", seconds(row.seconds))
    steps.add_row(str(DECODE_BATCH), f"{result.decode[0].tokens:,}", seconds(result.decode_batch_s))
    console.print(steps)
    figures = "  ".join(f"{name} {value:.3g}" for name, value in asdict(result.model.times).items())
    console.print(f"cost model (seconds): {figures}", highlight=False, soft_wrap=True)
    console.print(f"prefill fits within {result.prefill_fit.error:.1%} on average", highlight=False)
    if result.hits_fit is not None:
        console.print(
            f"hits ({result.hits_from}) fit within {result.hits_fit.error:.1%}: "
            f"{result.hits_fit.coefficients[1] * 1e6:.3g} microseconds for each token restored",
            highlight=False,
            soft_wrap=True,
        )
    for note in result.notes:
        console.print(f"Note: {note}", highlight=False, soft_wrap=True)
