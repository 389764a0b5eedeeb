"""``histate fsck``: check, and mend, the folder of a disk tier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_histate.cli.common import EXIT_USAGE

MIB = 1 << 20
SHOWN = 20
"""Findings listed one by one; all are counted."""


def fsck_command(
    path: Annotated[Path, typer.Argument(help="The folder of the disk tier (local_disk).", metavar="PATH")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Delete what could never be served and mend the catalogue. No server may use it."
        ),
    ] = False,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Do not read payloads: quick, but flipped bits go unseen.")
    ] = False,
) -> None:
    """Check a disk tier without a server. Exit code 0: nothing is wrong (any more); 1: something is; 2: cannot be checked."""
    from lmcache_histate.backends.disk.fsck import fsck
    from lmcache_histate.backends.disk.lock import FolderInUseError

    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:.0f} records"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("checking", total=None)
            report = fsck(path, repair, not headers_only, lambda count: bar.advance(task, count))
    except FolderInUseError as error:
        typer.echo(f"Error: {error}. Stop the server, or check without --repair.", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    except OSError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    table = Table("model", "records", "payload MiB", "disk MiB", "damaged", title=f"{path}")
    for namespace in report.namespaces:
        table.add_row(
            namespace.model or namespace.name,
            f"{namespace.records:,}",
            f"{namespace.payload_bytes / MIB:,.1f}",
            f"{namespace.disk_bytes / MIB:,.1f}",
            str(namespace.damaged),
        )
    console.print(table)
    if report.in_use:
        console.print("A server uses this folder: temporary files and the catalogue were not judged.")
    if report.findings:
        found = Table("what", "count", "mended")
        counts = Counter(finding.problem for finding in report.findings)
        mended = Counter(finding.problem for finding in report.findings if finding.repaired)
        for problem, count in counts.items():
            found.add_row(problem.value, str(count), str(mended[problem]))
        console.print(found)
        for finding in report.findings[:SHOWN]:
            console.print(
                f"  {finding.problem.value}: {finding.path} ({finding.detail})", highlight=False, soft_wrap=True
            )
        if len(report.findings) > SHOWN:
            console.print(f"  ... and {len(report.findings) - SHOWN} more")
    if report.clean:
        console.print("Everything that is there can be served." if not report.findings else "Nothing is left to mend.")
        return
    console.print("Run again with --repair to mend this." if not repair else "Some of it could not be mended.")
    raise typer.Exit(1)
