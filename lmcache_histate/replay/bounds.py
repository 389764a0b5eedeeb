"""What a trace lets any cache hit: bounds without limits on memory, for each way to place snapshots.

One pass in order of arrival, O(blocks) a request. Answers have no hashes in a trace: what a prompt repeats of an answer
counts as new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.numbering import NumberedBlocks, number_blocks

GRIDS_TOKENS = (1024, 4096, 8192)
"""Intervals of fixed grids that are tried, in tokens."""

Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reuse:
    """How far each request could have been restored, in blocks, with nothing ever evicted.

    Attributes:
        block_tokens: Tokens of one block.
        prompt_tokens: Of each request.
        kv: Blocks whose KV earlier requests had: the unlimited cache with a snapshot at every block.
        ends: To the nearest snapshot, with one at the end of each prompt.
        junctions: With one, besides, wherever an earlier prompt left a known prefix (as vLLM keeps them).
        grids: With one at the end of each prompt and one every so many tokens (the key).
    """

    block_tokens: int
    prompt_tokens: Blocks
    kv: Blocks
    ends: Blocks
    junctions: Blocks
    grids: Mapping[int, Blocks]

    def share(self, blocks: Blocks) -> float:
        """A hit rate: tokens of `blocks` over those of all prompts."""
        total = int(self.prompt_tokens.sum())
        return float(blocks.sum()) * self.block_tokens / total if total else 0.0

    @property
    def bounds(self) -> dict[str, float]:
        """Hit rates by the name of the placement."""
        named = {"every block": self.kv, "ends": self.ends, "ends and junctions": self.junctions}
        named |= {f"ends and every {interval:,}": blocks for interval, blocks in self.grids.items()}
        return {name: self.share(blocks) for name, blocks in named.items()}


def measure_reuse(
    trace: Trace,
    blocks: NumberedBlocks | None = None,
    grids_tokens: Sequence[int] = GRIDS_TOKENS,
    on_progress: Callable[[int], None] | None = None,
) -> Reuse:
    """Run through a trace with a cache that never evicts.

    Args:
        trace: Its blocks are the cache's blocks (`Trace.coarser` makes larger ones).
        blocks: The trace's, if they are numbered already.
        grids_tokens: Intervals; each becomes a multiple of the block, at least one.
        on_progress: Called with the number of requests done since the last call.
    """
    count = len(trace.requests)
    kv, ends, junctions = (np.zeros(count, np.int64) for _ in range(3))
    grid_blocks = {interval: max(1, round(interval / trace.block_tokens)) for interval in grids_tokens}
    grids = {interval: np.zeros(count, np.int64) for interval in grids_tokens}
    blocks = blocks or number_blocks(trace)
    known, at_ends, at_junctions = (np.zeros(blocks.count, np.bool_) for _ in range(3))
    for index, prompt in enumerate(blocks.prompts):
        unknown = ~known[prompt]
        reached = int(unknown.argmax()) if unknown.any() else len(prompt)
        end = _last(at_ends[prompt[:reached]])
        junction = max(end, _last(at_junctions[prompt[:reached]]))
        kv[index], ends[index], junctions[index] = reached, end, junction
        for interval, step in grid_blocks.items():
            grids[interval][index] = max(reached - reached % step, end)
        known[prompt[reached:]] = True
        if len(prompt):
            at_ends[prompt[-1]] = True
        if reached:
            at_junctions[prompt[reached - 1]] = True
        if on_progress is not None:
            on_progress(1)
    prompts = np.fromiter((request.prompt_tokens for request in trace.requests), np.int64, count)
    return Reuse(trace.block_tokens, prompts, kv, ends, junctions, grids)


def _last(marks: npt.NDArray[np.bool_]) -> int:
    """How many leading items there are up to and with the last one that is marked; 0 if none is."""
    return len(marks) - int(marks[::-1].argmax()) if marks.any() else 0
