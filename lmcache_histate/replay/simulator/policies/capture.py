"""Where snapshots are taken: at the ends of turns, on a grid, or wherever a scheduler step ends."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_histate.connector.capture_plan import CapturePlan, SchedulerRequest, last_boundary, plan_stops
from lmcache_histate.replay.simulator.policies.base import Capture


class TurnEnds(Capture):
    """The prompt's last boundary, the answer's, and junctions: where a prompt leaves a path that is cached.

    vLLM 0.32 with `prefix_cache_retention_interval=0`; the answer's end is what LMCache's `save_decode_cache` adds.

    Args:
        block_tokens: Block size.
        all_tiers: Junctions with what any tier holds; vLLM itself only sees the GPU's pool.
    """

    def __init__(self, block_tokens: int, all_tiers: bool = False) -> None:
        self._block = block_tokens
        self._all_tiers = all_tiers

    def plan(self, request: SchedulerRequest, resumed: int, cached: int, now: float) -> CapturePlan:
        """One stop at the junction."""
        final = last_boundary(request.num_prompt_tokens, self._block)
        junction = cached if self._all_tiers else request.shared_prefix_boundary
        stops = plan_stops(resumed, final, None, self._block, junction)
        return CapturePlan(request, stops, final, None, resumed)


class Grid(Capture):
    """Every so many tokens, counted from the start of the prompt, besides the ends of turns and junctions.

    Args:
        block_tokens: Block size.
        interval: Tokens, rounded up to whole blocks.
    """

    def __init__(self, block_tokens: int, interval: int) -> None:
        self._block = block_tokens
        self._interval = -(-interval // block_tokens) * block_tokens

    def plan(self, request: SchedulerRequest, resumed: int, cached: int, now: float) -> CapturePlan:
        """Stops at all multiples of the interval."""
        final = last_boundary(request.num_prompt_tokens, self._block)
        anchor = resumed // self._interval * self._interval
        stops = plan_stops(anchor, final, self._interval, self._block, request.shared_prefix_boundary)
        return CapturePlan(request, tuple(stop for stop in stops if stop > resumed), final, self._interval, anchor)


@dataclass
class KeepAll(CapturePlan):
    """Keeps every state that a step leaves behind."""

    def keeps(self, position: int) -> bool:
        """Always."""
        return True


class StepEnds(TurnEnds):
    """Wherever a scheduler step ends on a block boundary; no step is cut for it."""

    def plan(self, request: SchedulerRequest, resumed: int, cached: int, now: float) -> CapturePlan:
        """As `TurnEnds`, and everything is kept."""
        plan = super().plan(request, resumed, cached, now)
        return KeepAll(plan.request, plan.stops, plan.final, plan.interval, plan.anchor)
