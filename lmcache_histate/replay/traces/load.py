"""The door to traces: `load_trace` reads whatever it is given, and finds out by itself what it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from lmcache_histate.replay.traces.build import TraceBuilder
from lmcache_histate.replay.traces.generate import builtin_spec, generate_trace
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.mooncake import read_mooncake
from lmcache_histate.replay.traces.source import BadLines, Source, TraceError, find_files, first_line
from lmcache_histate.replay.traces.weka import read_weka

logger = logging.getLogger(__name__)

BUILTIN = "builtin:"
"""Prefix of the names of built-in workloads, as in `builtin:agents`."""

Reader = Callable[[Source, str, int | None], TraceBuilder]

READERS: dict[str, Reader] = {
    "weka": read_weka,
    "mooncake": read_mooncake,
}
"""By format."""


def load_trace(
    paths: str | Path | Sequence[str | Path],
    *,
    limit: int | None = None,
    bad_lines: int = 100,
    on_bad_line: Callable[[str], None] = logger.warning,
    on_progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read a trace.

    Args:
        paths: A file, a folder, several of them (one trace together, of one format), or a built-in workload
            (`builtin:agents`, `builtin:rewriting-5`).
        limit: Most requests to read; None for all.
        bad_lines: How many lines may be skipped because they cannot be used.
        on_bad_line: Called with a message for each of them.
        on_progress: Called with the bytes read since the last call; `find_files` gives the files and so the total.

    Raises:
        TraceError: A missing file, an unknown format, files of several formats, too many bad lines, no request at all.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    if any(str(name).startswith(BUILTIN) for name in names):
        if len(names) > 1:
            raise TraceError("a built-in workload is a trace by itself: name it alone")
        return generate_trace(builtin_spec(str(names[0]).removeprefix(BUILTIN)), limit=limit)
    files = find_files(names)
    formats = {path: found for path in files if (found := detect_format(path))}
    if not formats:
        raise TraceError(f"{names[0]}: no requests in it, every file is empty")
    if len(kinds := sorted(set(formats.values()))) > 1:
        examples = ", ".join(f"{next(str(p) for p, f in formats.items() if f == kind)} ({kind})" for kind in kinds)
        raise TraceError(f"the files are of several formats, which cannot be one trace: {examples}")
    source = Source(list(formats), BadLines(bad_lines, on_bad_line), on_progress)
    name = Path(names[0]).name.split(".")[0] or str(names[0])
    trace = READERS[kinds[0]](source, name, limit).finish()
    if not trace.requests:
        raise TraceError(f"{names[0]}: no request in it could be used ({source.bad_lines.count} bad lines)")
    return trace


def detect_format(path: Path) -> str:
    """The format of a file, by its content; empty for an empty file.

    Raises:
        TraceError: None that is known.
    """
    line = first_line(path)
    if not line:
        return ""
    if b'"hash_ids"' in line and b'"input_length"' in line:
        return "mooncake"
    if b'"requests"' in line or b'"block_size"' in line or line.strip() == b"{":
        return "weka"
    raise TraceError(f"{path}: not a trace that this program knows")


def _keys(line: bytes) -> set[str]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return set()
    return set(found) if isinstance(found, dict) else set()
