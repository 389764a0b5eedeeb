"""``histate locate``: where the longest restorable prefix of a prompt is, asked of the directory."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lmcache_histate.cli.common import EXIT_USAGE, ConfigOption
from lmcache_histate.config import ConfigError, load_config
from lmcache_histate.config.values import hide_password

if TYPE_CHECKING:
    from lmcache_histate.backends.locate import Answer

EXIT_UNREACHABLE = 1
"""Exit code when the directory cannot be asked."""

_PROMPT_KEYS = ("token_ids", "prompt_token_ids", "tokens")
"""Keys under which a JSON object may hold the prompt; vLLM answers `/tokenize` with ``tokens``."""


def locate_command(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="File with the prompt's token ids: a JSON list, a JSON object that has one as token_ids, prompt_token_ids or "
            "tokens (such as vLLM's answer to /tokenize), or numbers between spaces, commas or lines. '-': standard input.",
        ),
    ] = "-",
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The model, as vLLM was given it (--model).")],
    hashes: Annotated[
        bool,
        typer.Option(
            "--hashes", help="PROMPT holds LMCache's chunk hashes in hexadecimal, in order, instead of tokens."
        ),
    ] = False,
    salt: Annotated[str, typer.Option("--salt", help="Tenant of the request (cache_salt).")] = "",
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, help="Tensor-parallel size, if the fleet runs the model with several."),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option("--directory", metavar="URL", help="The directory's server, in place of the configuration's."),
    ] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how much of a prompt every instance can restore, from which tiers: for routers, and to see what is cached.

    A prefix counts as far as its KV is whole and, for a model with recurrent layers, a snapshot stands at its end.
    """
    url = directory or _configured(config)
    items = _read(prompt, hashes)
    from lmcache_histate.backends.http_api import hashes_from_hex
    from lmcache_histate.backends.locate import DirectoryError, LocateError, Locator

    try:
        with Locator(url) as locator:
            answer = locator.locate(
                model,
                None if hashes else items,
                chunk_hashes=hashes_from_hex(items) if hashes else None,
                cache_salt=salt,
                world_size=world_size,
            )
    except LocateError as error:
        _stop(str(error))
    except ValueError as error:
        _stop(f"--directory: {error}" if directory else str(error))
    except ModuleNotFoundError as error:
        _stop(f"this needs the Python package {error.name}: pip install 'lmcache-histate[redis]'.")
    except DirectoryError as error:
        _stop(f"{hide_password(url)}: {error}", EXIT_UNREACHABLE)
    if as_json:
        typer.echo(json.dumps(answer.to_json(), indent=2))
    else:
        _show(answer, None if hashes else len(items))


def _configured(config: str | None) -> str:
    environ = dict(os.environ) if config is None else {**os.environ, "LMCACHE_CONFIG": config}
    try:
        resolved = load_config(environ)
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"Error: {problem}", err=True)
        raise typer.Exit(EXIT_USAGE) from None
    if resolved is None:
        _stop("no directory is named. Use --directory redis://HOST:PORT, or -c FILE with histate.directory in it.")
    if resolved.histate.directory is None:
        _stop(
            f"{resolved.source or 'the configuration'} has no histate.directory, so its instances know nothing of each "
            "other. Add one, or name it with --directory redis://HOST:PORT."
        )
    return resolved.histate.directory


def _read(prompt: str, hashes: bool) -> list[Any]:
    """The token ids, or hexadecimal hashes, in a file."""
    where = "standard input" if prompt == "-" else prompt
    try:
        text = sys.stdin.read() if prompt == "-" else Path(prompt).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _stop(f"{where}: cannot be read ({getattr(error, 'strerror', None) or 'it is not a text'}).")
    stripped = text.strip()
    if stripped[:1] in {"[", "{"}:
        try:
            value = json.loads(stripped)
        except json.JSONDecodeError as error:
            _stop(f"{where}: not valid JSON ({error}).")
        if isinstance(value, dict):
            keys = ("chunk_hashes",) if hashes else _PROMPT_KEYS
            value = next((value[key] for key in keys if key in value), None)
            if value is None:
                _stop(f"{where}: the JSON object has no {' or '.join(keys)}.")
    else:
        value = [word for word in re.split(r"[\s,]+", stripped) if word]
        if not hashes:
            try:
                value = [int(word) for word in value]
            except ValueError:
                _stop(f"{where}: expected token ids, whole numbers between spaces, commas or lines, or a JSON list.")
    wanted = str if hashes else int
    if not isinstance(value, list) or not all(isinstance(item, wanted) for item in value):
        _stop(f"{where}: expected a list of {'chunk hashes in hexadecimal' if hashes else 'token ids'}.")
    if not value:
        _stop(f"{where}: it is empty. Give the prompt's {'chunk hashes' if hashes else 'token ids'}.")
    return value


def _show(answer: Answer, prompt_tokens: int | None) -> None:
    console = Console()
    whole = answer.chunks * answer.chunk_tokens
    asked = f"{prompt_tokens:,} tokens, " if prompt_tokens is not None else ""
    title = f"{answer.namespace.model_name}: {asked}{answer.chunks:,} whole chunks of {answer.chunk_tokens:,} tokens"
    if not answer.locations:
        console.print(title, highlight=False)
        console.print("No instance can restore any of it.", highlight=False)
        return
    table = Table(
        title=title, title_justify="left", caption="tokens that can be restored, each column with those before it"
    )
    for name in ("instance", "address"):
        table.add_column(name, overflow="fold")
    for name in ("CPU memory", "+ disk", "+ shared tier"):
        table.add_column(name, justify="right")
    for member, cpu, disk, tokens in answer.locations:
        if member.is_tier:
            table.add_row("(shared tier)", member.name.removeprefix("shared:"), "", "", _share(tokens, whole))
        else:
            table.add_row(member.name, member.address, *(_share(one, whole) for one in (cpu, disk, tokens)))
    console.print(table)


def _share(tokens: int, whole: int) -> str:
    return f"{tokens:,} ({tokens / whole:.0%})" if tokens else "-"


def _stop(problem: str, code: int = EXIT_USAGE) -> NoReturn:
    typer.echo(f"Error: {problem}", err=True)
    raise typer.Exit(code)
