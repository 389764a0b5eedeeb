"""What the sub-commands share: finding the configuration, showing errors, hiding passwords."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from lmcache_histate.config import Config, ConfigError, check_machine, load_config
from lmcache_histate.config.values import hide_password

EXIT_USAGE = 2
"""Exit code when the configuration or the command line cannot be used."""

HIDDEN = "***"

ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The YAML file, or the word 'histate' for the defaults. Without it, LMCACHE_CONFIG, then "
        "LMCACHE_CONFIG_FILE (if it has a histate: section).",
        show_default=False,
    ),
]
ChunkSizeOption = Annotated[
    int | None,
    typer.Option(
        "--chunk-size",
        metavar="TOKENS",
        min=1,
        help="The model's block size, where the file says chunk_size: auto. vLLM logs it: "
        "'Setting attention block size to N tokens'.",
        show_default=False,
    ),
]
NoMachineCheckOption = Annotated[
    bool,
    typer.Option("--no-machine-check", help="Do not compare the sizes and folders with this machine."),
]

_SECRET_KEY = re.compile(r"pass(word|wd)?$|secret|token|access_key", re.IGNORECASE)

TraceArgument = Annotated[
    list[str],
    typer.Argument(help="Trace files, a folder of them, or a built-in workload (builtin:agents).", metavar="TRACE"),
]


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print a message for the user on standard error and exit."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print a :class:`ConfigError` as a message on standard error and exit with code 2, without a traceback."""
    try:
        yield
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"Error: {problem}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


def resolve(file: str | None, chunk_size: int | None, *, machine_check: bool) -> Config:
    """The configuration that ``-c`` or the environment names, checked against the machine unless told otherwise.

    `chunk_size`, when given, takes the place of ``chunk_size: auto``. Warnings go to standard error. Raises
    :class:`ConfigError` also when nothing names a configuration, or `chunk_size` contradicts the file.
    """
    environ = dict(os.environ) if file is None else {**os.environ, "LMCACHE_CONFIG": file}
    if file is not None and not file.strip():
        raise ConfigError(
            "-c: the name of the file is empty. Name a YAML file, or the word 'histate' for the defaults."
        )
    config = load_config(environ)
    if config is None:
        raise ConfigError(
            "HiState is not configured. Use -c FILE, or set LMCACHE_CONFIG to a YAML file or to the word 'histate' "
            "(the defaults)." + _unused_file(environ)
        )
    for text in config.ignored:
        typer.echo(f"Warning: {text}", err=True)
    if chunk_size is not None:
        if config.chunk_size not in ("auto", chunk_size):
            raise ConfigError(
                f"{config.origin('chunk_size')}: chunk_size: {config.chunk_size}, but --chunk-size says {chunk_size}. "
                "Remove one of the two: both must be the model's block size."
            )
        config = config.replaced("--chunk-size", chunk_size=chunk_size)
    if machine_check:
        check_machine(config)
    return config


def _unused_file(environ: dict[str, str]) -> str:
    file = environ.get("LMCACHE_CONFIG_FILE", "").strip()
    return f" LMCACHE_CONFIG_FILE={file} has no histate: section (or cannot be read)." if file else ""


def hide_secrets(value: Any) -> Any:
    """A copy of a JSON value in which passwords, by key or inside URLs, are replaced by ``***``."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(item, str) and item and _SECRET_KEY.search(key) else hide_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide_secrets(item) for item in value]
    return hide_password(value) if isinstance(value, str) else value


def counted_progress(*more: ProgressColumn, console: Console, transient: bool = False) -> Progress:
    """A progress bar that shows what is done, of how much, and for how long.

    Args:
        more: Columns behind these.
        console: Where it is drawn.
        transient: It goes when the work is done.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, *more, console=console, transient=transient)
