"""Mooncake's traces: a line a request, blocks of 512 tokens with numbers that are global; no sessions."""

from __future__ import annotations

import msgspec
import numpy as np

from lmcache_histate.replay.traces.build import NO_ANSWER_TIMES, TraceBuilder, mixed
from lmcache_histate.replay.traces.infer import NOTE, StreamFinder
from lmcache_histate.replay.traces.source import Count, Source

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[Count]


def read_mooncake(source: Source, name: str, limit: int | None = None) -> TraceBuilder:
    """Read requests; who sent them is inferred (`StreamFinder`). `timestamp` is in milliseconds.

    The last of `hash_ids` may name a block that is not whole; it is dropped.

    Raises:
        TraceError: Too many bad lines.
    """
    decoder = msgspec.json.Decoder(_Line)
    builder, streams = TraceBuilder(name, BLOCK_TOKENS, NOTE, NO_ANSWER_TIMES), StreamFinder()
    for path in source.paths:
        for number, text in source.lines(path):
            try:
                line = decoder.decode(text)
                hashes = mixed(np.array(line.hash_ids, np.uint64))[: line.input_length // BLOCK_TOKENS]
            except (msgspec.MsgspecError, ValueError) as error:
                source.bad_lines.skip(path, number, str(error))
                continue
            builder.add(streams.stream_of(hashes), line.timestamp / 1000, line.input_length, line.output_length, hashes)
            if limit is not None and len(builder) >= limit:
                return builder
    return builder
