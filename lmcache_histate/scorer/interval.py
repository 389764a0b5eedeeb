"""How far apart snapshots go on a new segment.

A segment of `L` tokens with a snapshot every `I` costs, in token equivalents per hit,

    cost(I) = I / 2  +  (L / I) * (N_s * T_KV / T_state + stop)

The first term is the mean distance back to a snapshot. The second is what the snapshots take: each displaces `N_s`
tokens of KV, for as long as snapshots stay (`T_state`) against how long KV stays (`T_KV`), and each costs one extra
scheduler step. The continuous optimum is `sqrt(2 * L * (N_s * T_KV / T_state + stop))` (paper, adaptive interval; the
stop term is ours).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Supported intervals in blocks; "final only" (one interval as long as the segment) comes on top."""


def optimal_interval(length: float, snapshot_tokens: float, ratio: float = 1.0, stop_tokens: float = 0.0) -> float:
    """The continuous optimum in tokens.

    Args:
        length: tokens of the segment, `L`.
        snapshot_tokens: `N_s`.
        ratio: `T_KV / T_state`.
        stop_tokens: price of one stop in token equivalents.
    """
    return math.sqrt(2.0 * length * (snapshot_tokens * ratio + stop_tokens))


def interval_cost(
    interval: float, length: float, snapshot_tokens: float, ratio: float = 1.0, stop_tokens: float = 0.0
) -> float:
    """`cost(I)` of the module's formula, in token equivalents. Arguments as in `optimal_interval`."""
    return interval / 2.0 + length / interval * (snapshot_tokens * ratio + stop_tokens)


def choose_interval(
    length: int,
    snapshot_tokens: float,
    block: int,
    ratio: float = 1.0,
    stop_tokens: float = 0.0,
    multiples: Sequence[int] = MULTIPLES,
    step_tokens: int | None = None,
) -> int:
    """The cheapest supported interval for a segment of `length` tokens, in tokens.

    Candidates are the `multiples` of `block` shorter than the segment, and the segment itself (final only), which wins
    ties. O(candidates).

    Args:
        length: tokens of the segment, `L`.
        snapshot_tokens: `N_s`.
        block: tokens of a block.
        ratio: `T_KV / T_state`.
        stop_tokens: price of one extra scheduler step in token equivalents.
        multiples: supported intervals in blocks.
        step_tokens: tokens after which a prefill step ends anyway, so that a stop there is free; None charges every stop.
    """

    def cost(interval: int) -> float:
        extra = 1.0 if step_tokens is None else extra_steps(interval, step_tokens)
        return interval_cost(interval, length, snapshot_tokens, ratio, stop_tokens * extra)

    candidates = [block * multiple for multiple in multiples if block * multiple < length] + [max(length, block)]
    return min(reversed(candidates), key=cost)


def extra_steps(interval: int, step_tokens: int) -> float:
    """Steps that a stop every `interval` tokens adds to each interval of prefill, when steps hold `step_tokens`: [0, 1)."""
    return math.ceil(interval / step_tokens) - interval / step_tokens


def grid(start: int, end: int, interval: int, block: int) -> list[int]:
    """Positions of the snapshots in [start, end): every `interval` after `start`, and the last block boundary.

    `start` is rounded down to a block and has its snapshot already. The grid hangs on `start`, so that its last gap is
    the short one. Empty when no whole block is left.
    """
    start -= start % block
    last = end - end % block
    if last <= start:
        return []
    return [*range(start + interval, last, interval), last]
