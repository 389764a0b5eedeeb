"""``histate server``: LMCache's server with HiState in it, standing alone, for one or several vLLM instances."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from lmcache_histate.backends.arguments import server_arguments, server_environment
from lmcache_histate.cli.common import ChunkSizeOption, ConfigOption, NoMachineCheckOption, readable_errors, resolve
from lmcache_histate.config import ENVIRONMENT_NAMES, Config, ConfigError
from lmcache_histate.config.values import Endpoint

SERVER_ENTRY_POINT = "lmcache.v1.multiprocess.http_server"
"""The module that LMCache's own autostart runs; running the same one keeps both ways of starting alike."""


def server_command(
    config: ConfigOption = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on for vLLM (0.0.0.0 for every network). Default: that of server_url."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port to listen on for vLLM. Default: that of server_url.")
    ] = None,
    http_host: Annotated[
        str | None,
        typer.Option(
            help="Address of the HTTP interface, which has no password: keep it away from open networks. "
            "Default: 127.0.0.1."
        ),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the HTTP interface. Default: http_port.")
    ] = None,
    chunk_size: ChunkSizeOption = None,
    no_machine_check: NoMachineCheckOption = False,
) -> None:
    """Run a standalone LMCache server with HiState, until it is interrupted or terminated."""
    with readable_errors():
        resolved = resolve(config, chunk_size, machine_check=not no_machine_check)
        chunk = _chunk_size(resolved)
        resolved, endpoint = _place(resolved, host, port, http_port)
        arguments = [
            "--host",
            endpoint.host,
            "--port",
            str(endpoint.port),
            "--http-host",
            http_host or "127.0.0.1",
            *server_arguments(resolved, chunk),
        ]
    typer.echo(f"Starting LMCache's server with HiState at {endpoint.url}, HTTP port {resolved.http_port}.", err=True)
    _replace_process([sys.executable, "-m", SERVER_ENTRY_POINT, *arguments], server_environment(resolved))


def _place(config: Config, host: str | None, port: int | None, http_port: int | None) -> tuple[Config, Endpoint]:
    """`config` with the addresses of the command line in it, and the endpoint to listen on."""
    if not config.histate.enabled:
        raise ConfigError(
            f"{config.origin('histate.enabled')}: histate.enabled: HiState is switched off. Set it to true, or run "
            "`lmcache server`."
        )
    endpoints = config.endpoints
    if len(endpoints) > 1 and (host is None or port is None):
        raise ConfigError(
            f"{config.origin('server_url')}: server_url: it names {len(endpoints)} servers. Say which one this is "
            "with --host and --port."
        )
    endpoint = Endpoint(host or endpoints[0].host, port or endpoints[0].port)
    # The server module is handed the configuration too: it should see where the server really is.
    placed = config.replaced("command line", server_url=endpoint.url, http_port=http_port or config.http_port)
    return placed, endpoint


def _chunk_size(config: Config) -> int:
    if isinstance(config.chunk_size, int):
        return config.chunk_size
    raise ConfigError(
        f"{config.origin('chunk_size')}: chunk_size: auto works only where vLLM starts the server. Start vLLM with the "
        "model once and look for 'Setting attention block size to N tokens' in its log, then use --chunk-size N or "
        "set chunk_size: N."
    )


def _replace_process(command: list[str], environment: dict[str, str]) -> None:
    """Become `command`, so that signals, exit code and process id are the server's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The settings of the environment are in the command already, and some of them hold passwords.
    inherited = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT_NAMES}
    os.execve(command[0], command, {**inherited, **environment})
