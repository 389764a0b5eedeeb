"""Puts a trace together, request by request, in memory that grows with what is new in each prompt, not with prompts.

An agent's prompt repeats the one before it. So a stream keeps the hashes of its longest prompt, and the shorter ones
that it extends are views of that array; only a prompt that leaves the path gets an array of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmcache_histate.replay.traces.model import BlockHashes, Stream, Trace, TraceRequest

ANSWER_TOKENS_PER_S = 50.0
"""How fast an answer is taken to come where a trace does not say when it was complete."""
NO_ANSWER_TIMES = (
    f"it does not say when answers were complete: they are taken to come at {ANSWER_TOKENS_PER_S:.0f} tokens/s"
)


def answer_seconds(output_tokens: int) -> float:
    """Seconds that an answer takes, where the trace does not say."""
    return output_tokens / ANSWER_TOKENS_PER_S


def mixed(numbers: BlockHashes, salt: int = 0) -> BlockHashes:
    """Numbers that are unique within `salt`, spread over 64 bits (the finaliser of splitmix64: a bijection for each salt)."""
    x = numbers.astype(np.uint64) + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(slots=True)
class _Run:
    """Prompts of one stream that extend each other: the longest one's hashes stand for all."""

    hashes: BlockHashes


@dataclass(slots=True)
class _Draft:
    stream: str
    arrival_s: float
    think_s: float
    prompt_tokens: int
    output_tokens: int
    run: _Run
    blocks: int


@dataclass(slots=True)
class _OpenStream:
    session: str
    after: int | None
    start_s: float
    run: _Run
    last_arrival_s: float
    answered_s: float


class TraceBuilder:
    """Collects requests; `finish` orders them.

    Args:
        name: Of the trace.
        block_tokens: Tokens of one block.
        notes: What the reader assumes.
    """

    def __init__(self, name: str, block_tokens: int, *notes: str) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.notes = notes
        self._drafts: list[_Draft] = []
        self._streams: dict[str, _OpenStream] = {}

    def __len__(self) -> int:
        return len(self._drafts)

    def add(
        self,
        stream: str,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        hashes: BlockHashes,
        *,
        session: str | None = None,
        answered_s: float | None = None,
        think_s: float | None = None,
        after: int | None = None,
    ) -> int:
        """Add a stream's next request. O(1) plus what is new in its prompt.

        Args:
            stream: Key of the stream; a new one starts here.
            arrival_s: Seconds; an earlier time than that of the stream's last request, or of `after`, counts as that.
            prompt_tokens: Length of the prompt.
            output_tokens: Length of the answer.
            hashes: Of all whole blocks of the prompt; hashes behind `prompt_tokens` are cut off.
            session: Of a new stream; by default a session of its own.
            answered_s: When the answer was complete; by default estimated from its length.
            think_s: As recorded; by default the time since the last answer.
            after: Handle (as returned by `add`) of the request whose answer starts this new stream.

        Returns:
            A handle of this request, for `after`.
        """
        blocks = min(len(hashes), prompt_tokens // self.block_tokens)
        hashes = hashes[:blocks]
        known = self._streams.get(stream)
        if known is None:
            run = _Run(hashes)
            start = arrival_s
            if after is not None:
                arrival_s = max(arrival_s, self._drafts[after].arrival_s)
                start = self._answered(after)
            known = _OpenStream(session or stream, after, arrival_s, run, arrival_s, start)
            self._streams[stream] = known
        else:
            arrival_s = max(arrival_s, known.last_arrival_s)
            # A number names the whole prefix, so one comparison tells whether one prompt begins with the other.
            held = known.run.hashes
            shorter = min(len(held), blocks)
            if shorter and held[shorter - 1] != hashes[shorter - 1]:
                known.run = _Run(hashes)
            elif blocks > len(held):
                known.run.hashes = hashes
        if think_s is None:
            think_s = arrival_s - known.answered_s
        self._drafts.append(
            _Draft(stream, arrival_s, max(0.0, think_s), prompt_tokens, output_tokens, known.run, blocks)
        )
        known.last_arrival_s = arrival_s
        known.answered_s = answered_s if answered_s is not None else arrival_s + answer_seconds(output_tokens)
        return len(self._drafts) - 1

    def _answered(self, handle: int) -> float:
        """When the answer to an earlier request, the last of its stream so far, was complete."""
        return self._streams[self._drafts[handle].stream].answered_s

    def finish(self) -> Trace:
        """The trace, ordered by arrival and starting at 0. O(n log n) in requests."""
        drafts = self._drafts
        order = sorted(range(len(drafts)), key=lambda index: drafts[index].arrival_s)
        place = {old: new for new, old in enumerate(order)}
        zero = drafts[order[0]].arrival_s if order else 0.0
        requests = [
            TraceRequest(
                draft.stream,
                draft.arrival_s - zero,
                draft.think_s,
                draft.prompt_tokens,
                draft.output_tokens,
                draft.run.hashes[: draft.blocks],
            )
            for draft in (drafts[index] for index in order)
        ]
        streams = {
            key: Stream(
                stream.session, None if stream.after is None else place[stream.after], max(0.0, stream.start_s - zero)
            )
            for key, stream in self._streams.items()
        }
        return Trace(self.name, self.block_tokens, requests, streams, self.notes)
