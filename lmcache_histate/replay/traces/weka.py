"""Weka's agent traces: one JSON document a session (a file each, or one a line), blocks numbered within the session.

`hash_ids` are chained (equal number, equal prefix) and local to the session. A sub-agent's requests are nested, timed
from its own start, and numbered in the session's space; its `t` is the time of its *end*.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash

from lmcache_histate.replay.traces.build import TraceBuilder, answer_seconds, mixed
from lmcache_histate.replay.traces.source import Count, Source, TraceError

SESSION_GAP_S = 300.0
"""Sessions are recorded from 0 each; they are set this far apart."""
NOTE = f"its sessions have no common clock: they are taken to start {SESSION_GAP_S:.0f} s apart"


class _Entry(msgspec.Struct):
    """A request, or a sub-agent with its own requests."""

    t: float
    type: str
    tokens: Count = msgspec.field(default=0, name="in")
    out: Count = 0
    hash_ids: list[Count] = []
    api_time: float | None = None
    think_time: float | None = None
    requests: list[_Entry] = []
    agent_id: str = ""
    duration_ms: float = 0.0


class _Session(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[_Entry]
    id: str = ""


def read_weka(source: Source, name: str, limit: int | None = None) -> TraceBuilder:
    """Read sessions until there are `limit` requests.

    Args:
        source: Files.
        name: Of the trace.
        limit: Most requests; None for all.

    Returns:
        The requests; sessions start `SESSION_GAP_S` apart.

    Raises:
        TraceError: Blocks of several sizes, or too many sessions that cannot be read.
    """
    decoder = msgspec.json.Decoder(_Session)
    builder: TraceBuilder | None = None
    sessions = 0
    keys: set[str] = set()
    for path in source.paths:
        for number, document in _documents(source, path):
            try:
                session = decoder.decode(document)
            except (msgspec.MsgspecError, ValueError) as error:
                source.bad_lines.skip(path, number, f"not a session: {error}")
                continue
            if builder is None:
                builder = TraceBuilder(name, session.block_size, NOTE)
            elif builder.block_tokens != session.block_size:
                raise TraceError(
                    f"{path}, line {number}: block_size {session.block_size}, but {builder.block_tokens} in the files "
                    "before; read them as separate traces"
                )
            key = session.id or f"{path.name}:{number}"
            if key in keys:
                key = f"{key}#{sessions}"  # another recording of the same name
            keys.add(key)
            _add_session(builder, session, key, sessions * SESSION_GAP_S, limit)
            sessions += 1
            if limit is not None and len(builder) >= limit:
                return builder
    return builder or TraceBuilder(name, 64)


def _documents(source: Source, path: Path) -> Iterator[tuple[int, bytes]]:
    """A document a line, or the whole file where its first line is not complete."""
    lines = source.lines(path)
    for number, line in lines:
        if number == 1 and not line.rstrip().endswith(b"}"):
            line += b"".join(text for _, text in lines)
        yield number, line


def _add_session(builder: TraceBuilder, session: _Session, key: str, start_s: float, limit: int | None) -> None:
    salt = xxhash.xxh3_64_intdigest(key.encode())
    last: int | None = None
    agents = 0
    for entry in session.requests:
        if limit is not None and len(builder) >= limit:
            return
        if entry.type != "subagent":
            last = _add(builder, entry, key, key, start_s, salt)
            continue
        agents += 1
        stream = f"{key}/{entry.agent_id or agents}"
        begins = start_s + max(0.0, entry.t - entry.duration_ms / 1000)
        for request in entry.requests:
            _add(builder, request, stream, key, begins, salt, last)


def _add(
    builder: TraceBuilder, entry: _Entry, stream: str, session: str, start_s: float, salt: int, after: int | None = None
) -> int:
    arrival = start_s + entry.t
    seconds = entry.api_time if entry.api_time is not None else answer_seconds(entry.out)
    return builder.add(
        stream,
        arrival,
        entry.tokens,
        entry.out,
        mixed(np.array(entry.hash_ids, np.uint64), salt),
        session=session,
        answered_s=arrival + seconds,
        think_s=entry.think_time if after is None else None,
        after=after,
    )
