"""LMCache's lookup-hash log: a line a lookup, as `lmcache server --lookup-hash-log-dir` writes it.

Checked against `lmcache.v1.mp_observability.subscribers.logging.lookup_hash` of LMCache 0.5.6. The log names neither
sessions nor answers: streams are inferred (`StreamFinder`), and every answer counts as one token.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec
import numpy as np
import xxhash

from lmcache_histate.replay.traces.build import TraceBuilder, mixed
from lmcache_histate.replay.traces.infer import NOTE, StreamFinder
from lmcache_histate.replay.traces.model import BlockHashes
from lmcache_histate.replay.traces.source import Count, Source, TraceError

NO_ANSWERS = "it does not log answers: each counts as one token, and gaps include the time it took"
REMEMBERED_REQUESTS = 4096
"""A request that waits or is preempted is looked up again: its later lines are dropped while it is among so many."""


class _Lookup(msgspec.Struct):
    timestamp: float
    chunk_size: Annotated[int, msgspec.Meta(ge=1)]
    seq_len: Count
    chunk_hashes: list[str]
    request_id: str = ""
    model_name: str = ""


def read_lookup_log(source: Source, name: str, limit: int | None = None) -> TraceBuilder:
    """Read lookups. Models never share blocks.

    Raises:
        TraceError: Chunks of several sizes, or too many bad lines.
    """
    decoder = msgspec.json.Decoder(_Lookup)
    builder: TraceBuilder | None = None
    streams = StreamFinder()
    seen: deque[str] = deque(maxlen=REMEMBERED_REQUESTS)
    seen_set: set[str] = set()
    for path in source.paths:
        for number, line in source.lines(path):
            try:
                lookup = decoder.decode(line)
                hashes = _hashes(lookup)
            except (msgspec.MsgspecError, ValueError) as error:
                source.bad_lines.skip(path, number, str(error))
                continue
            if lookup.request_id:
                if lookup.request_id in seen_set:
                    continue
                if len(seen) == seen.maxlen:
                    seen_set.discard(seen[0])
                seen.append(lookup.request_id)
                seen_set.add(lookup.request_id)
            if builder is None:
                builder = TraceBuilder(name, lookup.chunk_size, NOTE, NO_ANSWERS)
            elif builder.block_tokens != lookup.chunk_size:
                raise TraceError(
                    f"{path}, line {number}: chunk_size {lookup.chunk_size}, but {builder.block_tokens} before: the "
                    "server ran with other settings; read the files apart"
                )
            builder.add(streams.stream_of(hashes), lookup.timestamp, lookup.seq_len, 1, hashes)
            if limit is not None and len(builder) >= limit:
                return builder
    return builder or TraceBuilder(name, 256)


def _hashes(lookup: _Lookup) -> BlockHashes:
    """64 bits of each rolling hash, mixed with the model's name."""
    numbers = [int(text[2:][-16:], 16) for text in lookup.chunk_hashes]
    return mixed(np.array(numbers, np.uint64), xxhash.xxh3_64_intdigest(lookup.model_name.encode()))
