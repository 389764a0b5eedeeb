"""``histate analyze``: what request logs say about a cache for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_histate.cli.common import ConfigOption, fail, readable_errors, resolve
from lmcache_histate.config import Config, load_config
from lmcache_histate.config.values import parse_gib
from lmcache_histate.geometry import GIB, CacheGeometry
from lmcache_histate.replay.analysis import Analysis, Bin, Quantiles, analyze
from lmcache_histate.replay.analysis_advice import FOLDER, Setting, advise, gib, to_yaml
from lmcache_histate.replay.traces.load import BUILTIN, load_trace
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.source import TraceError, find_files

DEFAULT_MODEL = "qwen3.5-9b"
BLOCK_TOKENS = {DEFAULT_MODEL: 528}
"""Block sizes that vLLM was seen to choose; for other models the user says it."""
SHOWN_BAD_LINES = 5
BAR_WIDTH = 40


def analyze_command(
    log: Annotated[
        list[str],
        typer.Argument(
            help="Request logs: files, or folders of them, packed or not; the format is detected. Or a built-in workload "
            "(builtin:agents).",
            metavar="LOG",
        ),
    ],
    config: ConfigOption = None,
    model: Annotated[str, typer.Option(help="Whose sizes count. --kv-bytes and --snapshot-bytes override them.")] = (
        DEFAULT_MODEL
    ),
    block_size: Annotated[
        int | None,
        typer.Option(
            help="The model's block size in tokens, as vLLM logs it. Default: chunk_size of the configuration, or "
            f"{BLOCK_TOKENS[DEFAULT_MODEL]} for {DEFAULT_MODEL}. The nearest multiple of the trace's blocks is taken.",
            min=1,
            show_default=False,
        ),
    ] = None,
    kv_bytes: Annotated[
        float | None, typer.Option(help="KV of one token, in bytes.", min=1, show_default=False)
    ] = None,
    snapshot_bytes: Annotated[
        float | None, typer.Option(help="One snapshot, in bytes; 0: attention only.", min=0, show_default=False)
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(help="CPU memory of the cache, in GiB or with a unit, instead of the configuration's."),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(help="Disk of the cache, in GiB or with a unit, instead of the configuration's.")
    ] = None,
    cpu_budget: Annotated[
        str | None, typer.Option(help="Most CPU memory that may be recommended, in GiB or with a unit.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", "-o", help="Write the recommended configuration here.", metavar="FILE")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Read only so many requests.", min=1, show_default=False)] = None,
    bad_lines: Annotated[
        int, typer.Option(help="Lines that may be skipped because they cannot be used; one more is an error.", min=0)
    ] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a cache is worth for the requests in a log, and what it needs.

    Shows how many requests hit inside a turn, what is computed again although it matched, the working set against the
    tiers, distances and gaps, and a configuration with the reason for every value. Token ids are hashed as they are read.
    """
    with readable_errors():
        configured = _configuration(config)
    geometry = _geometry(model, block_size, kv_bytes, snapshot_bytes, configured)
    tiers = _tiers(configured, cpu, disk)
    budget = _bytes("--cpu-budget", cpu_budget)
    trace, result = _measure(log, geometry, limit, bad_lines, quiet=as_json)
    folder = configured.local_disk if configured and configured.local_disk else FOLDER
    settings = advise(result, geometry, budget, folder)
    whose = model if None in (kv_bytes, snapshot_bytes) else "a model of these sizes"
    text = to_yaml(settings, f"From {len(trace.requests):,} requests of {trace.name}, for {whose}.")
    if save is not None:
        save.write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(_report(result, tiers, settings), indent=2))
        return
    _print(Console(), result, tiers, text, save)


def _configuration(file: str | None) -> Config | None:
    """The configuration of `-c` or the environment; none is fine."""
    if file is None and load_config() is None:
        return None
    return resolve(file, None, machine_check=False)


def _geometry(
    model: str, block: int | None, kv_bytes: float | None, snapshot_bytes: float | None, config: Config | None
) -> CacheGeometry:
    from lmcache_histate.replay.simulator.hardware import MODELS

    known = MODELS.get(model.lower())
    if known is None and (kv_bytes is None or snapshot_bytes is None):
        fail(f"--model {model}: known are {', '.join(MODELS)}. For others give --kv-bytes and --snapshot-bytes.")
    if block is None and config is not None and isinstance(config.chunk_size, int):
        block = config.chunk_size
    block = block or BLOCK_TOKENS.get(model.lower())
    if block is None:
        fail(f"--block-size: not known for {model}. vLLM logs it: 'Setting attention block size to N tokens'.")
    kv = kv_bytes if kv_bytes is not None or known is None else known.kv_bytes_per_token
    snapshot = snapshot_bytes if snapshot_bytes is not None or known is None else known.snapshot_bytes
    assert kv is not None
    assert snapshot is not None
    return CacheGeometry(block, kv, snapshot)


def _bytes(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(parse_gib(text)) * GIB
    except ValueError as error:
        fail(f"{option} {text}: {error}")


def _tiers(config: Config | None, cpu: str | None, disk: str | None) -> dict[str, float]:
    """Bytes of the tiers that there are."""
    sizes = {"cpu": _bytes("--cpu", cpu), "disk": _bytes("--disk", disk)}
    if config is not None:
        if sizes["cpu"] is None and config.local_cpu:
            sizes["cpu"] = config.max_local_cpu_size * GIB
        if sizes["disk"] is None and config.local_disk:
            sizes["disk"] = config.max_local_disk_size * GIB
    return {tier: size for tier, size in sizes.items() if size}


def _measure(
    log: list[str], geometry: CacheGeometry, limit: int | None, bad_lines: int, *, quiet: bool
) -> tuple[Trace, Analysis]:
    messages: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
    try:
        with bar:
            total = None if log[0].startswith(BUILTIN) else sum(file.stat().st_size for file in find_files(log))
            reading = bar.add_task("reading", total=total)
            trace = load_trace(
                log,
                limit=limit,
                bad_lines=bad_lines,
                on_bad_line=messages.append,
                on_progress=lambda count: bar.advance(reading, count),
            )
            bar.update(reading, total=1, completed=1)
            measuring = bar.add_task("measuring", total=3 * len(trace.requests))
            result = analyze(trace, geometry, lambda count: bar.advance(measuring, count))
    except TraceError as error:
        _warn(messages)
        fail(str(error))
    _warn(messages)
    return trace, result


def _warn(messages: list[str]) -> None:
    for message in messages[:SHOWN_BAD_LINES]:
        typer.echo(f"Warning: {message}", err=True)
    if len(messages) > SHOWN_BAD_LINES:
        typer.echo(f"Warning: {len(messages) - SHOWN_BAD_LINES} more lines were skipped", err=True)


def _needs(result: Analysis) -> dict[str, tuple[str, Quantiles]]:
    need = result.working_set
    return {
        "kv": ("KV that is used again", need.kv),
        "final_snapshots": ("newest snapshot of each live stream", need.final_snapshots),
        "historical_snapshots": ("their earlier snapshots", need.historical_snapshots),
    }


def _report(result: Analysis, tiers: dict[str, float], settings: list[Setting]) -> dict[str, Any]:
    return {
        **result.to_json(),
        "tiers": {tier: {"bytes": size, **_holds(result, tier, tiers)} for tier, size in tiers.items()},
        "recommended": [msgspec.to_builtins(setting) for setting in settings],
    }


def _holds(result: Analysis, tier: str, tiers: dict[str, float]) -> dict[str, float]:
    """How much of the working set a tier (with those above it) holds, as shares of what is needed."""
    need = result.working_set
    hot = (need.kv.p50 + need.final_snapshots.p50, need.kv.most + need.final_snapshots.most)
    every = (hot[0] + need.historical_snapshots.p50, hot[1] + need.historical_snapshots.most)
    wanted, size = (hot, tiers["cpu"]) if tier == "cpu" else (every, sum(tiers.values()))
    return {"of_median": size / wanted[0] if wanted[0] else 1.0, "of_peak": size / wanted[1] if wanted[1] else 1.0}


def _print(console: Console, result: Analysis, tiers: dict[str, float], text: str, save: Path | None) -> None:
    console.print(
        f"[bold]{result.trace}[/]: {result.requests:,} requests in {result.sessions:,} sessions ({result.streams:,} "
        f"streams), {result.seconds / 3600:,.1f} h; {result.prompt_tokens:,} prompt tokens, {result.output_tokens:,} "
        "answered",
        highlight=False,
    )
    for title, quantiles in (("prompt", result.prompts), ("new in it", result.new)):
        console.print(
            f"  {title}: median {quantiles.p50:,.0f} tokens, p90 {quantiles.p90:,.0f}, p99 {quantiles.p99:,.0f}, "
            f"longest {quantiles.most:,.0f}",
            highlight=False,
        )
    for note in result.notes:
        console.print(f"  Note: {note}.", highlight=False)
    console.print(_hit_table(result))
    console.print(_bound_table(result))
    console.print(_need_table(result))
    for line in _tier_lines(result, tiers):
        console.print(line, highlight=False)
    _histogram(
        console,
        f"\nHow far before its stream's last end a request leaves it (tokens; blocks of {result.block_tokens})",
        result.distances,
        "tokens",
    )
    if result.rewind_tokens.most:
        console.print(f"  those that go back: median {result.rewind_tokens.p50:,.0f} tokens", highlight=False)
    _histogram(console, "\nFrom an answer to the next request (seconds)", result.gaps, "s")
    gaps = result.gap_seconds
    console.print(f"  median {gaps.p50:,.1f} s, p90 {gaps.p90:,.0f} s, p99 {gaps.p99:,.0f} s\n", highlight=False)
    console.print("[bold]Recommended[/]" + (f", written to {save}" if save else ""))
    typer.echo(text)


def _hit_table(result: Analysis) -> Table:
    hits, total = result.hits, result.requests
    table = Table("where requests hit, with nothing evicted", box=SIMPLE_HEAD)
    table.add_column("requests", justify="right")
    table.add_column("share", justify="right")
    rows = (
        ("nowhere", hits.none),
        ("at the end of their stream's last prompt", hits.append),
        ("where another prompt ended", hits.other_end),
        ("inside a turn", hits.inside),
    )
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count / total:.1%}")
    table.add_section()
    for name, tokens in (
        ("tokens that match an earlier prompt", hits.matched_tokens),
        ("  of these computed again: snapshots at ends", hits.recomputed_ends),
        ("  ... at ends and seen junctions (vLLM)", hits.recomputed_junctions),
    ):
        table.add_row(name, f"{tokens:,}", _of(tokens, result))
    return table


def _of(tokens: int, result: Analysis) -> str:
    return f"{tokens / result.prompt_tokens:.2%}" if result.prompt_tokens else "-"


def _bound_table(result: Analysis) -> Table:
    table = Table("hit rate with unlimited memory, snapshots at", box=SIMPLE_HEAD)
    table.add_column(f"blocks of {result.block_tokens}", justify="right")
    same = result.block_tokens == result.trace_block_tokens
    if not same:
        table.add_column(f"of {result.trace_block_tokens}, the trace's", justify="right")
    for name, share in result.bounds.items():
        table.add_row(name, f"{share:.2%}", *([] if same else [f"{result.trace_bounds[name]:.2%}"]))
    return table


def _need_table(result: Analysis) -> Table:
    table = Table("working set (needed by later requests)", box=SIMPLE_HEAD)
    for name in ("median", "p90", "peak"):
        table.add_column(name, justify="right")
    for title, quantiles in _needs(result).values():
        table.add_row(title, gib(quantiles.p50), gib(quantiles.p90), gib(quantiles.most))
    need = result.working_set
    table.add_section()
    table.add_row("everything ever, KV / snapshots", "", "", f"{gib(need.all_kv)} / {gib(need.all_snapshots)}")
    return table


def _tier_lines(result: Analysis, tiers: dict[str, float]) -> list[str]:
    if not tiers:
        return ["No tiers to compare with: give -c, LMCACHE_CONFIG, or --cpu and --disk."]
    lines = []
    what = {"cpu": "KV and newest snapshots", "disk": "all of it, with the tiers above"}
    for tier, size in tiers.items():
        holds = _holds(result, tier, tiers)
        lines.append(
            f"{tier}: {gib(size)}, {holds['of_median']:.0%} of what is needed at the median, {holds['of_peak']:.0%} at the "
            f"peak ({what[tier]})"
        )
    return lines


def _histogram(console: Console, title: str, bins: list[Bin], unit: str) -> None:
    console.print(title, highlight=False)
    most = max((entry.count for entry in bins), default=0) or 1
    labels = [_label(entry, unit) for entry in bins]
    width = max(map(len, labels))
    for label, entry in zip(labels, bins, strict=True):
        bar = "█" * round(entry.count / most * BAR_WIDTH) or ("▏" if entry.count else "")
        console.print(f"  {label:>{width}} {entry.count:>7,} {bar}", highlight=False, markup=False)


def _label(entry: Bin, unit: str) -> str:
    if entry.high is None:
        return f"{_short(entry.low)} or more"
    if unit == "tokens" and entry.high == 1:
        return "0"
    return f"{_short(entry.low)} - {_short(entry.high)}"


def _short(number: float) -> str:
    return f"{number / 1024:.0f}K" if number >= 1024 and number % 1024 == 0 else f"{number:,.0f}"
