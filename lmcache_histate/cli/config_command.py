"""``histate config``: what was resolved, where each value came from, and the commands that it becomes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_histate.backends.arguments import (
    connector_extra_config,
    server_arguments,
    server_environment,
    vllm_arguments,
)
from lmcache_histate.cli.common import (
    HIDDEN,
    ChunkSizeOption,
    ConfigOption,
    NoMachineCheckOption,
    hide_secrets,
    readable_errors,
    resolve,
)
from lmcache_histate.cli.settings_text import show
from lmcache_histate.config import SETTINGS, Config

PLACEHOLDER = "BLOCK_SIZE"
"""Stands for the model's block size in the printed commands while it is not known."""

_UNKNOWN_CHUNK = 987_654_321  # a number that no block size comes near, replaced by PLACEHOLDER wherever it shows


def config_command(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    chunk_size: ChunkSizeOption = None,
    no_machine_check: NoMachineCheckOption = False,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help=f"Print passwords instead of {HIDDEN}.")] = False,
) -> None:
    """Show every setting, its value and where it came from, and the commands that the configuration becomes."""
    with readable_errors():
        resolved = resolve(config, chunk_size, machine_check=not no_machine_check)
        if as_json:
            typer.echo(json.dumps(report(resolved, show_secrets=show_secrets), indent=2))
        else:
            _print_table(resolved, show_secrets=show_secrets)
            _print_commands(resolved, from_option=config is not None, show_secrets=show_secrets)


def report(config: Config, *, show_secrets: bool) -> dict[str, Any]:
    """Everything that the command shows, as JSON values. An unknown block size appears as ``BLOCK_SIZE``."""
    visible = _unchanged if show_secrets else hide_secrets
    chunk = config.chunk_size if isinstance(config.chunk_size, int) else _UNKNOWN_CHUNK
    values = {key: config.value(key) for key in SETTINGS}
    settings = {key: {"value": value, "origin": config.origin(key)} for key, value in visible(values).items()}
    environment = server_environment(config)
    return {
        "settings": settings,
        "ignored": list(config.ignored),
        "server_environment": environment if show_secrets else dict.fromkeys(environment, HIDDEN),
        "server_command": _placeheld(server_command(config, chunk, show_secrets=show_secrets)),
        "vllm_arguments": vllm_arguments(config),
        "connector_extra_config": _placeheld(_extra_config(config, chunk, show_secrets=show_secrets)),
    }


def _unchanged(value: Any) -> Any:
    return value


def server_command(config: Config, chunk_size: int, *, show_secrets: bool) -> list[str]:
    """The whole ``lmcache server`` command for the first of ``server_url``, one word an item."""
    endpoint = config.endpoints[0]
    words = ["lmcache", "server", "--host", endpoint.host, "--port", str(endpoint.port), "--http-host", endpoint.host]
    words += server_arguments(config, chunk_size)
    return words if show_secrets else [_hide_in_word(word) for word in words]


def _extra_config(config: Config, chunk_size: int, *, show_secrets: bool) -> dict[str, Any]:
    extra = connector_extra_config(config, chunk_size)
    key = "lmcache.mp.autostart.server_args"
    if not show_secrets and key in extra:
        extra[key] = shlex.join(_hide_in_word(word) for word in shlex.split(extra[key]))
    return extra


def _hide_in_word(word: str) -> str:
    """A word of a command line without passwords, looking into JSON where it is JSON."""
    try:
        value = json.loads(word) if word.startswith("{") else word
    except json.JSONDecodeError:
        value = word
    hidden = hide_secrets(value)
    return hidden if isinstance(hidden, str) else json.dumps(hidden, separators=(",", ":"))


def _placeheld(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _placeheld(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_placeheld(item) for item in value]
    return value.replace(str(_UNKNOWN_CHUNK), PLACEHOLDER) if isinstance(value, str) else value


def _print_table(config: Config, *, show_secrets: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"HiState configuration: {config.source}", title_justify="left", show_edge=False, pad_edge=False
    )
    table.add_column("Setting", no_wrap=True)
    table.add_column("Value", overflow="fold")
    table.add_column("From", overflow="fold")
    for key, entry in report(config, show_secrets=show_secrets)["settings"].items():
        # Plain text objects: a path such as /mnt/[cache] is not markup.
        style = None if entry["origin"] == "default" else "bold"
        table.add_row(key, _plain(show(entry["value"])), _plain(entry["origin"]), style=style)
    # Redirected output has no width of its own: every row in one line, for grep. The table takes only what it needs.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    Console(width=width).print(table)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _print_commands(config: Config, *, from_option: bool, show_secrets: bool) -> None:
    shown = report(config, show_secrets=show_secrets)
    known = isinstance(config.chunk_size, int)
    if not config.histate.enabled:
        typer.echo("\nHiState is switched off (histate.enabled: false): vLLM and LMCache run as they do without it.")
        return
    if config.starts_server:
        intro = "vLLM starts this server itself when nothing answers at that address (histate.autostart):"
    else:
        intro = (
            "Run this server at each address of server_url before vLLM:"
            if len(config.endpoints) > 1
            else ("Run this server before vLLM (histate.autostart is off, or server_url is on another machine):")
        )
    typer.echo(f"\n# {intro}")
    if not known:
        typer.echo(
            f"# chunk_size is auto: the connector fills in the model's block size. By hand, put it in place of "
            f"{PLACEHOLDER}\n# (vLLM logs 'Setting attention block size to N tokens'), or use --chunk-size N here."
        )
    for name, value in shown["server_environment"].items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(format_command(shown["server_command"]))
    typer.echo("\n# vLLM, with your model and its other flags:")
    typer.echo(f"export {_variable(config, from_option)}")
    for entry in shown["settings"].values():
        if entry["origin"].startswith("environment "):
            typer.echo(f"export {entry['origin'].removeprefix('environment ')}={shlex.quote(_raw(entry['value']))}")
    typer.echo(format_command(["vllm", "serve", "MODEL", *shown["vllm_arguments"]]))
    if not show_secrets and HIDDEN in json.dumps(shown):
        typer.echo(f"\n# Passwords are shown as {HIDDEN}; --show-secrets prints them.")


def _raw(value: Any) -> str:
    """A value as an environment variable would carry it."""
    return (
        json.dumps(value) if isinstance(value, list | tuple) and value and isinstance(value[0], dict) else show(value)
    )


def _variable(config: Config, from_option: bool) -> str:
    strict = from_option or os.environ.get("LMCACHE_CONFIG", "").strip() == config.source
    is_file = config.source != "histate"
    value = str(Path(config.source).absolute()) if is_file else config.source
    return f"{'LMCACHE_CONFIG' if strict else 'LMCACHE_CONFIG_FILE'}={shlex.quote(value)}"


def format_command(words: list[str]) -> str:
    """A shell command, correctly quoted, with one flag and its value a line."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(shlex.join(line) for line in lines if line)
