"""Where HiState takes snapshots: the connector's own `Placement` and `CapturePlanner`, on simulated time."""

from __future__ import annotations

from lmcache_histate.connector.capture_plan import CapturePlan, CapturePlanner, SchedulerRequest
from lmcache_histate.connector.placement import ASK_SECONDS, Placement
from lmcache_histate.protocol import PlacementFacts, PrefillTime
from lmcache_histate.replay.simulator.policies.base import Capture, Site
from lmcache_histate.replay.simulator.policies.units import UnitTiers
from lmcache_histate.scorer.interval import choose_interval


class _ToldDirectly:
    """The facts are handed over; nobody is asked."""

    def poll_placement(self) -> PlacementFacts | None:
        """Nothing new."""
        return None

    def ask_placement(self, prefill: PrefillTime | None) -> bool:
        """No question is sent."""
        return False

    def forget_placement(self) -> None:
        """No question is open."""


class HiStateCapture(Capture):
    """As `connector.histate_connector` plans: facts of the server at most once a second, step cost from observed steps.

    Args:
        site: What it runs on.
        tiers: The server.
        interval: The setting `histate.interval`.
        paper: Follow the paper's rule: the residence times alone, without expected hits, fill and the price of a stop.
    """

    def __init__(self, site: Site, tiers: UnitTiers, interval: str | int, paper: bool = False) -> None:
        block = self._block = site.geometry.block_tokens
        self._tiers = tiers
        self._placement = Placement(
            interval,
            block,
            site.step_tokens,
            _ToldDirectly(),
            PlacementFacts(snapshot_tokens=site.geometry.snapshot_tokens),
        )
        self._planner = CapturePlanner(block, self._paper_interval if paper else self._placement.interval)
        self._asked_at = float("-inf")

    def plan(self, request: SchedulerRequest, resumed: int, cached: int, now: float) -> CapturePlan:
        """Stops every so many tokens, the number chosen for this segment, and vLLM's junction."""
        if now - self._asked_at >= ASK_SECONDS:
            self._asked_at = now
            self._placement.facts = self._tiers.facts(now)
        plan = self._planner.plan(request, resumed)
        self._planner.forget([request.request_id])
        return plan

    def _paper_interval(self, segment_tokens: int) -> int | None:
        facts = self._placement.facts
        interval = choose_interval(segment_tokens, facts.snapshot_tokens, self._block, facts.residence_ratio)
        return None if interval >= segment_tokens else interval

    def stepped(self, now: float, tokens: int) -> None:
        """As the connector's `build_connector_meta` reports steps. O(1)."""
        self._placement.step_cost.on_step(now, tokens)
