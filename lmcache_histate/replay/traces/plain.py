"""The plain format, for logs of one's own: a JSON line a request (docs/traces.md).

Token ids are hashed block by block as they are read, with a key that differs from trace to trace, and forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np

from lmcache_histate.replay.traces.build import TraceBuilder
from lmcache_histate.replay.traces.clock import seconds
from lmcache_histate.replay.traces.infer import StreamFinder
from lmcache_histate.replay.traces.model import BlockHashes
from lmcache_histate.replay.traces.source import Count, Source, TraceError, first_lines

TOKEN_BLOCK = 16
"""Block for token ids: the block sizes of engines (528, 576, 256, 64 ...) are multiples of it."""


_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Line(msgspec.Struct):
    time: float | str
    session: str | int | None = None
    stream: str | int | None = None
    tokens: list[_Token] | None = None
    hashes: list[int | str] | None = None
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count = 1
    answered: float | str | None = None


def read_plain(source: Source, name: str, limit: int | None = None) -> TraceBuilder:
    """Read requests. Lines without a session are assigned to streams by their prompts (`StreamFinder`).

    Raises:
        TraceError: Blocks of several sizes, or too many bad lines.
    """
    decoder = msgspec.json.Decoder(_Line)
    key = blake2b(b"".join(first_lines(source.paths[0], 1, 1 << 20)), digest_size=32).digest()
    builder: TraceBuilder | None = None
    streams = StreamFinder()
    for path in source.paths:
        for number, text in source.lines(path):
            try:
                line = decoder.decode(text)
                block, prompt_tokens, hashes = _prompt(line, key)
                arrival = seconds(line.time)
                answered = None if line.answered is None else seconds(line.answered)
            except (msgspec.MsgspecError, ValueError) as error:
                source.bad_lines.skip(path, number, str(error))
                continue
            if builder is None:
                builder = TraceBuilder(name, block)
            elif builder.block_tokens != block:
                raise TraceError(
                    f"{path}, line {number}: blocks of {block} tokens, but of {builder.block_tokens} before; one trace "
                    f"has one size (prompts as token ids: {TOKEN_BLOCK})"
                )
            session = None if line.session is None else str(line.session)
            stream = session or (streams.stream_of(hashes) if line.stream is None else "")
            if line.stream is not None:
                stream += f"/{line.stream}"
            builder.add(
                stream, arrival, prompt_tokens, line.output_tokens, hashes, session=session, answered_s=answered
            )
            if limit is not None and len(builder) >= limit:
                return builder
    return builder or TraceBuilder(name, TOKEN_BLOCK)


def _prompt(line: _Line, key: bytes) -> tuple[int, int, BlockHashes]:
    """Block size, prompt length and chained hashes of a line.

    Raises:
        ValueError: Neither or both of tokens and hashes, or lengths that cannot be.
    """
    if (line.tokens is None) == (line.hashes is None):
        raise ValueError("give the prompt either as 'tokens' or as 'hashes'")
    if line.tokens is not None:
        data = np.array(line.tokens, np.uint32).tobytes()
        step = TOKEN_BLOCK * 4
        whole = len(data) - len(data) % step
        blocks = (data[at : at + step] for at in range(0, whole, step))
        return TOKEN_BLOCK, len(line.tokens), _chained(blocks, key)
    assert line.hashes is not None
    if line.block_tokens is None:
        raise ValueError("'hashes' need 'block_tokens', the tokens of one block")
    prompt_tokens = len(line.hashes) * line.block_tokens if line.prompt_tokens is None else line.prompt_tokens
    if len(line.hashes) < prompt_tokens // line.block_tokens:
        raise ValueError(f"{len(line.hashes)} hashes of {line.block_tokens} tokens, but prompt_tokens {prompt_tokens}")
    return line.block_tokens, prompt_tokens, _chained((str(number).encode() for number in line.hashes), key)


def _chained(blocks: Iterable[bytes], key: bytes) -> BlockHashes:
    """Each block's hash covers the ones before it, so that hashes of single blocks name prefixes."""
    numbers, state = [], b""
    for block in blocks:
        state = blake2b(state + block, digest_size=8, key=key).digest()
        numbers.append(state)
    return np.frombuffer(b"".join(numbers), np.uint64)
