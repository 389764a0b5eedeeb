"""Who sent a request, where a trace does not say: told by the prompts alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from lmcache_histate.replay.traces.model import BlockHashes

EDIT_SHARE = 0.5
"""A prompt that keeps more than this share of a stream's last prompt is an edit in that stream; one that keeps less shares
a system prompt with it, and is somebody else's."""

SHARED_BY = 2
"""Streams that left at one block before it counts as the end of a shared prefix."""

REMEMBERED_BLOCKS = 2_000_000
"""Blocks that are remembered (some 100 bytes each); beyond it, the streams that are idle for longest are forgotten."""

NOTE = "it names no sessions: streams are inferred from what prompts share"


@dataclass(slots=True)
class _Stream:
    """Blocks of its last prompt, the stream that it left (whose blocks come before its own), and the blocks it brought."""

    parent: str | None
    last_blocks: int = 0
    brought: list[BlockHashes] = field(default_factory=list)


class StreamFinder:
    """Assigns each prompt to a stream: the one that first sent the last block that the prompt shares with anything.

    A prompt that extends the stream's last one continues it; so does one that keeps more than `EDIT_SHARE` of it (an
    edited message). Anything else starts a new stream, and a block at which `SHARED_BY` new streams left is taken for the
    end of a shared prefix: who leaves there later is always new. A prompt without whole blocks is a stream of its own.

    Args:
        remembered_blocks: Bound of memory; a stream that comes back after it was forgotten is a new one.
    """

    def __init__(self, remembered_blocks: int = REMEMBERED_BLOCKS) -> None:
        self._limit = remembered_blocks
        self._owner: dict[int, str] = {}
        self._left: dict[int, int] = {}
        # The longest idle first; a stream comes after those that left it, so that it is forgotten after them.
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._count = 0

    def stream_of(self, hashes: BlockHashes) -> str:
        """The key of the stream that a prompt belongs to, in order of arrival. O(blocks of the prompt)."""
        numbers = hashes.tolist()
        known = known_blocks(numbers, self._owner)
        name = self._continued(numbers[known - 1], known) if known else None
        if name is None:
            name = f"stream-{self._count}"
            self._count += 1
            if known == len(numbers):
                return name  # it brings no block, so nothing will ever lead back to it
            self._streams[name] = _Stream(self._owner[numbers[known - 1]] if known else None)
        stream = self._streams[name]
        stream.last_blocks = len(numbers)
        if known < len(numbers):
            stream.brought.append(hashes[known:])
            self._owner.update(dict.fromkeys(numbers[known:], name))
        self._touch(name)
        self._forget()
        return name

    def _continued(self, leaves: int, known: int) -> str | None:
        """The stream that a prompt continues which leaves what is known after `known` blocks, the last being `leaves`."""
        left = self._left.get(leaves, 0)
        name = self._owner[leaves]
        if left < SHARED_BY and known > self._streams[name].last_blocks * EDIT_SHARE:
            return name
        self._left[leaves] = left + 1
        return None

    def _touch(self, name: str) -> None:
        at: str | None = name
        while at is not None:
            self._streams.move_to_end(at)
            at = self._streams[at].parent

    def _forget(self) -> None:
        while len(self._owner) > self._limit and len(self._streams) > 1:
            _, stream = self._streams.popitem(last=False)
            for brought in stream.brought:
                for number in brought.tolist():
                    del self._owner[number]
                    self._left.pop(number, None)


def known_blocks(hashes: Sequence[int], known: Container[int]) -> int:
    """How many leading blocks of a prompt are known: chained hashes are known up to a point and unknown behind it.

    Args:
        hashes: Of the prompt's blocks.
        known: Blocks of earlier prompts, each with all blocks before it.
    """
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
