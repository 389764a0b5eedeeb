"""A trace: requests in streams, each prompt as chained block hashes. What readers give and everything else takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

BlockHashes = npt.NDArray[np.uint64]
"""One number per whole block of a prompt, in order. A number names the whole prefix up to its block, across the trace:
two prompts share their first n blocks exactly if their n-th numbers are equal."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        stream: Key of its stream in `Trace.streams`; requests of one stream follow each other.
        arrival_s: Seconds from the start of the trace at which it was sent, as recorded.
        think_s: Seconds between the end of the stream's previous answer (for a stream's first request: see `Stream`)
            and this request. Never negative.
        prompt_tokens: Length of the prompt; the tokens behind the last whole block have no hash.
        output_tokens: Length of the answer.
        hashes: Of the prompt's whole blocks.
    """

    stream: str
    arrival_s: float
    think_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: BlockHashes


@dataclass(frozen=True, slots=True)
class Stream:
    """A sequence of requests, each sent after the one before was answered.

    Attributes:
        session: Whose work it is: an agent's own stream and those of its sub-agents share a session.
        after: Index in `Trace.requests` of the request whose answer starts the stream (a sub-agent's), None for a
            stream that starts by itself.
        start_s: Seconds from the start of the trace (of its session, in a closed loop) at which a stream starts that
            starts by itself.
    """

    session: str
    after: int | None = None
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: For reports.
        block_tokens: Tokens of one block of `TraceRequest.hashes`.
        requests: Ordered by `arrival_s`; a stream's requests in their order.
        streams: By key.
        notes: What a reader had to assume, for users.
    """

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    streams: dict[str, Stream] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def coarser(self, blocks: int) -> Trace:
        """The same trace with blocks of `blocks` of its blocks, for an engine whose blocks are larger.

        Raises:
            ValueError: `blocks` below 1.
        """
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        # Prompts that extend each other are views of one array; so are they in the coarser trace.
        arrays: dict[int, BlockHashes] = {}
        requests = []
        for request in self.requests:
            array = shared_array(request.hashes)
            if id(array) not in arrays:
                arrays[id(array)] = np.ascontiguousarray(array[blocks - 1 :: blocks])
            hashes = arrays[id(array)][: len(request.hashes) // blocks]
            requests.append(replace(request, hashes=hashes))
        return Trace(self.name, self.block_tokens * blocks, requests, self.streams, self.notes)

    def first(self, count: int) -> Trace:
        """The first `count` requests, and the streams that have any of them."""
        requests = self.requests[:count]
        kept = {request.stream for request in requests}
        streams = {key: stream for key, stream in self.streams.items() if key in kept}
        return Trace(self.name, self.block_tokens, requests, streams, self.notes)


def shared_array(hashes: BlockHashes) -> BlockHashes:
    """The array whose beginning `hashes` is a view of, or `hashes` itself."""
    base = hashes.base
    if (
        isinstance(base, np.ndarray)
        and base.dtype == hashes.dtype
        and base.ndim == 1
        and base.strides == hashes.strides
        and base.ctypes.data == hashes.ctypes.data
    ):
        return base
    return hashes
