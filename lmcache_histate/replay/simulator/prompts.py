"""A trace made ready: every block is a number, and every request knows the path that its prompt and answer make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from lmcache_histate.replay.traces.model import Stream, Trace

Nodes = npt.NDArray[np.int32]


@dataclass(slots=True)
class Prompt:
    """One request.

    Attributes:
        index: In the trace's order of arrival.
        stream: Its stream.
        session: Whose work it is.
        think_s: As in `TraceRequest`.
        prompt_tokens, output_tokens: Lengths; an answer has at least one token.
        nodes: The whole blocks of prompt and answer, shape (`end`,). The last token of an answer is never computed.
        boundary: Blocks up to the prompt's last boundary that a resend can resume at: one token is always computed.
        following: The stream's next request, None for its last.
    """

    index: int
    stream: str
    session: str
    think_s: float
    prompt_tokens: int
    output_tokens: int
    nodes: Nodes
    boundary: int
    following: int | None = None

    @property
    def end(self) -> int:
        """Blocks of prompt and answer."""
        return len(self.nodes)


class PreparedTrace:
    """All prompts of a trace, with its blocks numbered from 0.

    The answer's blocks are those of the stream's next prompt, if that goes on where this one ended. Otherwise (the
    session rewound, or ended) nobody asks for them again, and they get numbers of their own.

    Args:
        trace: Blocks as the engine has them.
    """

    def __init__(self, trace: Trace) -> None:
        self.name = trace.name
        self.block_tokens = trace.block_tokens
        block = trace.block_tokens
        requests = trace.requests
        hashes = [np.asarray(request.hashes, dtype=np.uint64) for request in requests]
        lengths = [len(row) for row in hashes]
        names, numbers = np.unique(np.concatenate(hashes) if hashes else np.zeros(0, np.uint64), return_inverse=True)
        rows = np.split(numbers.astype(np.int32), np.cumsum(lengths)[:-1]) if hashes else []
        following: dict[int, int] = {}
        last: dict[str, int] = {}
        for index, request in enumerate(requests):
            if request.stream in last:
                following[last[request.stream]] = index
            last[request.stream] = index
        self.prompts: list[Prompt] = []
        self.nodes = len(names)
        """Blocks of all paths."""
        for index, request in enumerate(requests):
            output = max(1, request.output_tokens)
            end = (request.prompt_tokens + output - 1) // block
            own = rows[index][: request.prompt_tokens // block]
            nodes = np.empty(end, dtype=np.int32)
            nodes[: len(own)] = own
            known = len(own)
            later = following.get(index)
            if later is not None and requests[later].prompt_tokens >= request.prompt_tokens + output:
                row = rows[later]
                if not known or (len(row) >= known and row[known - 1] == own[-1]):
                    known = min(end, len(row))
                    nodes[len(own) : known] = row[len(own) : known]
            nodes[known:] = np.arange(self.nodes, self.nodes + end - known)
            self.nodes += end - known
            self.prompts.append(
                Prompt(
                    index,
                    request.stream,
                    trace.streams.get(request.stream, Stream(request.stream)).session,
                    request.think_s,
                    request.prompt_tokens,
                    output,
                    nodes,
                    max(request.prompt_tokens - 1, 0) // block,
                    later,
                )
            )
        self.streams = {
            key: trace.streams.get(key, Stream(key)) for key in dict.fromkeys(request.stream for request in requests)
        }
        self.first: dict[str, int] = {}
        """The first request of every stream."""
        for prompt in self.prompts:
            self.first.setdefault(prompt.stream, prompt.index)

    def chunk_hashes(self) -> list[bytes]:
        """A name of eight bytes for every node, alike in every run. O(nodes)."""
        return [xxhash.xxh3_64_digest(number.to_bytes(4, "little")) for number in range(self.nodes)]
