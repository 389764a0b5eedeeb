"""TraceLab's round traces: a line a request, without hashes; what was cached tells what was kept.

A round names how many tokens of its prompt the provider had cached (`prefix_tokens`). Below what the round before left
there, it is a rewrite: the rest of the prompt counts as new. A provider's cache that lost something looks the same.
A session's first round shares its cached prefix with other sessions of the same model.
"""

from __future__ import annotations

import msgspec

from lmcache_histate.replay.traces.build import TraceBuilder
from lmcache_histate.replay.traces.clock import seconds
from lmcache_histate.replay.traces.source import Count, Source
from lmcache_histate.replay.traces.text import TEXT_BLOCK_TOKENS, Numbers, Text, shared_text

CACHE_GRAIN_TOKENS = 128
"""Providers round cached prefixes down by less than this (OpenAI: steps of 128)."""

NOTE = "it has no hashes: a rewrite is inferred where the provider had cached less than before"
INPUT_EVENTS = ("user_message", "tool_result")


class _Event(msgspec.Struct):
    event_type: str
    timestamp: float | str


class _Round(msgspec.Struct):
    session_id: str
    input_tokens_total: Count
    prefix_tokens: Count
    output_tokens: Count
    provider: str = ""
    model: str = ""
    claude_uncached_input_tokens: Count | None = None
    timing_events: list[_Event] = []


class _Session:
    """Where a session stands: its text, the answer included, and what the provider must have cached of it."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.cached = 0
        self.answered_s: float | None = None


def read_tracelab(source: Source, name: str, limit: int | None = None) -> TraceBuilder:
    """Read rounds; a session is a stream.

    Raises:
        TraceError: Too many bad lines.
    """
    decoder = msgspec.json.Decoder(_Round)
    builder = TraceBuilder(name, TEXT_BLOCK_TOKENS, NOTE)
    sessions: dict[str, _Session] = {}
    for path in source.paths:
        for number, line in source.lines(path):
            try:
                turn = decoder.decode(line)
                _add(builder, sessions, turn)
            except (msgspec.MsgspecError, ValueError) as error:
                source.bad_lines.skip(path, number, str(error))
            if limit is not None and len(builder) >= limit:
                return builder
    return builder


def _add(builder: TraceBuilder, sessions: dict[str, _Session], turn: _Round) -> None:
    total, prefix = turn.input_tokens_total, turn.prefix_tokens
    if prefix > total:
        raise ValueError(f"prefix_tokens {prefix}, input_tokens_total {total}: not a prefix of a prompt")
    arrival, answered = _times(turn)
    known = sessions.get(turn.session_id)
    if known is None:
        numbers = Numbers(f"tracelab/{turn.session_id}")
        known = _Session(shared_text(f"{turn.provider}/{turn.model}", prefix, numbers))
        sessions[turn.session_id] = known
        kept = prefix
    else:
        rewritten = prefix < known.cached - CACHE_GRAIN_TOKENS
        kept = min(prefix if rewritten else known.text.tokens, total)
    if arrival is None:
        arrival = known.answered_s or 0.0
    text = known.text.kept(kept)
    text.extend(total - kept)
    builder.add(turn.session_id, arrival, total, turn.output_tokens, text.hashes, answered_s=answered)
    known.cached = total - (turn.claude_uncached_input_tokens or 0)
    known.answered_s = answered
    text.extend(turn.output_tokens)
    known.text = text


def _times(turn: _Round) -> tuple[float | None, float | None]:
    """When the prompt was complete, and when the answer was."""
    events = turn.timing_events
    if not events:
        return None, None
    inputs = [seconds(event.timestamp) for event in events if event.event_type in INPUT_EVENTS]
    times = [seconds(event.timestamp) for event in events]
    return (max(inputs) if inputs else times[0]), max(times)
