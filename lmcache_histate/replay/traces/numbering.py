"""Blocks of a trace numbered 0, 1, 2 ...: what is known of each fits arrays, a few bytes a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_histate.replay.traces.model import BlockHashes, Trace, shared_array

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NumberedBlocks:
    """The blocks of a trace's prompts.

    Attributes:
        prompts: Numbers of each request's whole blocks. Prompts that are views of one array in the trace are here, too.
        count: Different blocks, those of shared arrays that no prompt reaches included.
    """

    prompts: Sequence[Numbers]
    count: int


def number_blocks(trace: Trace) -> NumberedBlocks:
    """Number the blocks of a trace. O(n log n) in the blocks of prompts that do not extend each other."""
    owners: dict[int, BlockHashes] = {}
    for request in trace.requests:
        owner = shared_array(request.hashes)
        owners[id(owner)] = owner
    everything = np.concatenate(list(owners.values())) if owners else np.empty(0, np.uint64)
    everything.sort()
    different = everything[np.diff(everything, prepend=everything[:1] + np.uint64(1)) != 0]
    del everything
    numbers = {key: np.searchsorted(different, owner).astype(np.int32) for key, owner in owners.items()}
    prompts = [numbers[id(shared_array(request.hashes))][: len(request.hashes)] for request in trace.requests]
    return NumberedBlocks(prompts, len(different))
