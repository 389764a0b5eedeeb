"""The door to traces: `load_trace` reads whatever it is given, and finds out by itself what it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lmcache_histate.replay.traces.build import TraceBuilder
from lmcache_histate.replay.traces.generate import builtin_spec, generate_trace
from lmcache_histate.replay.traces.lookup_log import read_lookup_log
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.mooncake import read_mooncake
from lmcache_histate.replay.traces.plain import read_plain
from lmcache_histate.replay.traces.source import BadLines, Source, TraceError, find_files, first_lines
from lmcache_histate.replay.traces.tracelab import read_tracelab
from lmcache_histate.replay.traces.weka import read_weka

logger = logging.getLogger(__name__)

BUILTIN = "builtin:"
"""Prefix of the names of built-in workloads, as in `builtin:agents`."""

Reader = Callable[[Source, str, int | None], TraceBuilder]

READERS: dict[str, Reader] = {
    "weka": read_weka,
    "mooncake": read_mooncake,
    "tracelab": read_tracelab,
    "lmcache-lookup": read_lookup_log,
    "plain": read_plain,
}
"""By format."""

_KEY = re.compile(rb'"(\w+)"\s*:')

# Keys that the first line of a format has (weka: the first part of a document, which may be one long line).
_MARKS: dict[str, set[bytes]] = {
    "lmcache-lookup": {b"chunk_hashes", b"seq_len"},
    "tracelab": {b"session_id", b"input_tokens_total", b"prefix_tokens"},
    "mooncake": {b"timestamp", b"input_length", b"hash_ids"},
    "weka": {b"block_size", b"requests"},
    "plain:tokens": {b"time", b"tokens"},
    "plain:hashes": {b"time", b"hashes"},
}


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
        name = str(names[0])
        return generate_trace(builtin_spec(name.removeprefix(BUILTIN)), name=name, limit=limit)
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
    if limit is not None:
        trace = trace.first(limit)
    if not trace.requests:
        raise TraceError(f"{names[0]}: no request in it could be used ({source.bad_lines.count} bad lines)")
    return trace


def detect_format(path: Path) -> str:
    """The format of a file, by its content; empty for an empty file.

    Raises:
        TraceError: None that is known.
    """
    lines = first_lines(path, 20, 1 << 16)
    if lines and not lines[0].endswith(b"\n"):
        lines = first_lines(path, 1, 1 << 24)  # one very long line: its last keys are looked for, too
    if not lines:
        return ""
    for line in lines:
        keys = set(_KEY.findall(line))
        for name, marks in _MARKS.items():
            if marks <= keys:
                return name.split(":")[0]
    if lines[0].strip() == b"{":  # a document over several lines
        return "weka"
    raise TraceError(
        f"{path}: none of the known formats ({', '.join(READERS)}). Its first line begins with {_shape(lines[0])}. "
        "docs/traces.md describes the plain format, which any log can be turned into."
    )


def _shape(line: bytes) -> str:
    """The beginning of a line as far as it can be shown: the names of its keys, never what they hold."""
    keys = [key.decode(errors="replace") for key in _KEY.findall(line)[:8]]
    return f"the keys {', '.join(keys)}" if keys else "something that is not a JSON object"
