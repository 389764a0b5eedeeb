"""Who sent a request, where a trace does not say: told by the prompts alone."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_histate.replay.traces.model import BlockHashes

EDIT_SHARE = 0.5
"""A prompt that keeps at least this share of a stream's last prompt is an edit in that stream; one that keeps less shares
a system prompt with it, and is somebody else's."""


@dataclass(slots=True)
class _Last:
    """Of a stream: blocks of its last prompt."""

    blocks: int


class StreamFinder:
    """Assigns each prompt to a stream: the one that first sent the last block that the prompt shares with anything.

    A prompt that extends the stream's last one continues it; so does one that keeps at least `EDIT_SHARE` of it (an
    edited message). Anything else starts a new stream. A prompt without whole blocks is a stream of its own.
    """

    def __init__(self) -> None:
        self._owner: dict[int, str] = {}
        self._last: dict[str, _Last] = {}
        self._count = 0

    def stream_of(self, hashes: BlockHashes) -> str:
        """The key of the stream that a prompt belongs to. O(log(known blocks) + new blocks), in order of arrival."""
        owner = self._owner
        numbers = hashes.tolist()
        known = _known_blocks(numbers, owner)
        stream = owner[numbers[known - 1]] if known else ""
        last = self._last.get(stream)
        if last is None or known < last.blocks * EDIT_SHARE:
            stream = f"stream-{self._count}"
            self._count += 1
            self._last[stream] = _Last(len(numbers))
        else:
            last.blocks = len(numbers)
        for number in numbers[known:]:
            owner[number] = stream
        return stream


def _known_blocks(numbers: list[int], owner: dict[int, str]) -> int:
    """How many blocks a prompt shares with earlier ones: chained numbers are known up to a point and unknown behind it."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] in owner:
            low = middle + 1
        else:
            high = middle
    return low
