"""Who sent a request, where a trace does not say: told by the prompts alone."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lmcache_histate.replay.traces.model import BlockHashes

EDIT_SHARE = 0.5
"""A prompt that keeps at least this share of a stream's last prompt is an edit in that stream; one that keeps less shares
a system prompt with it, and is somebody else's."""

NOTE = "it names no sessions: streams are inferred from what prompts share"
SHARED_BY = 2
"""Streams that left at one block before it counts as the end of a shared prefix."""


class StreamFinder:
    """Assigns each prompt to a stream: the one that first sent the last block that the prompt shares with anything.

    A prompt that extends the stream's last one continues it; so does one that keeps at least `EDIT_SHARE` of it (an
    edited message). Anything else starts a new stream, and a block at which `SHARED_BY` new streams left is taken for the
    end of a shared prefix: who leaves there later is always new. A prompt without whole blocks is a stream of its own.
    """

    def __init__(self) -> None:
        self._owner: dict[int, str] = {}
        self._last_blocks: dict[str, int] = {}
        self._left: dict[int, int] = {}

    def stream_of(self, hashes: BlockHashes) -> str:
        """The key of the stream that a prompt belongs to. O(log(known blocks) + new blocks), in order of arrival."""
        owner = self._owner
        numbers = hashes.tolist()
        known = known_blocks(numbers, owner)
        leaves = numbers[known - 1] if known else None
        stream = owner[leaves] if leaves is not None else ""
        left = 0 if leaves is None else self._left.get(leaves, 0)
        if leaves is None or left >= SHARED_BY or known < self._last_blocks[stream] * EDIT_SHARE:
            stream = f"stream-{len(self._last_blocks)}"
            if leaves is not None:
                self._left[leaves] = left + 1
        self._last_blocks[stream] = len(numbers)
        for number in numbers[known:]:
            owner[number] = stream
        return stream


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
