"""The settings as text, for ``--help`` and for docs/configuration.md; made from the model, so never out of date.

``python -m lmcache_histate.cli.settings_text docs/configuration.md`` rewrites the tables in the document.
"""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from lmcache_histate.config import ENVIRONMENT_NAMES, SETTINGS
from lmcache_histate.config.model import default_of


def show(value: Any) -> str:
    """A value as a user would write it in the file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return json.dumps(value) if value else "none"
    if isinstance(value, tuple | list):
        if all(isinstance(item, str) for item in value):
            return shlex.join(value) or "none"
        return ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def settings_help() -> str:
    """Every setting with its description and default, in lines of at most 84 characters."""
    lines = [
        "Settings of the file. HISTATE_<SETTING> in the environment overrides any of them,",
        "for example HISTATE_INTERVAL=512 or HISTATE_MAX_LOCAL_CPU_SIZE=96GiB.",
        "",
    ]
    for key, text in SETTINGS.items():
        lines.append(f"  {key} (default {show(default_of(key))})")
        lines += textwrap.wrap(text, 84, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def settings_table(section: bool) -> str:
    """A Markdown table of the settings of the ``histate:`` section, or of those at the top level."""
    variables = {key: name for name, key in ENVIRONMENT_NAMES.items()}
    lines = ["| Setting | Default | Meaning | Environment |", "|---|---|---|---|"]
    for key, text in SETTINGS.items():
        if key.startswith("histate.") is section:
            name = key.removeprefix("histate.")
            lines.append(f"| `{name}` | `{show(default_of(key))}` | {text} | `{variables[key]}` |")
    return "\n".join(lines)


def with_tables(document: str) -> str:
    """`document` with the tables between its ``<!-- settings: NAME -->`` and ``<!-- end -->`` lines made anew.

    Raises ``ValueError`` when one of the two tables has no place in the document.
    """
    for name, section in (("top", False), ("histate", True)):
        before, begin, rest = document.partition(f"<!-- settings: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not begin or not end:
            raise ValueError(f"there is no place for the table {name!r}")
        document = f"{before}{begin}{settings_table(section)}\n{end}{after}"
    return document


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
