"""How densely the scheduler takes snapshots: the configured interval, or one that follows storage pressure."""

from __future__ import annotations

import time
from typing import Protocol

from lmcache_histate.connector.step_cost import StepCost
from lmcache_histate.protocol import PlacementFacts, PrefillTime
from lmcache_histate.scorer.interval import choose_interval

ASK_SECONDS = 1.0
"""The server's facts are moving averages: asking more often than this tells nothing new."""
FEWEST_HITS = 0.01
"""Least expected hits of a segment: one in a hundred is what snapshots insure against in any case."""
ANSWER_SECONDS = 30.0
"""A question without an answer for this long is given up; the last known facts stay in use."""


class FactsSource(Protocol):
    """Where storage pressure comes from (``ServerLink``). Neither call waits."""

    def poll_placement(self) -> PlacementFacts | None:
        """The newest answer, once."""

    def ask_placement(self, prefill: PrefillTime | None) -> bool:
        """Ask again and tell a prefill's time, unless a question is open; whether a question was sent."""

    def forget_placement(self) -> None:
        """Give the open question up."""


class Placement:
    """Turns a segment's length into the tokens between two snapshots.

    Args:
        interval: ``"adaptive"``, a token count, or ``"final-only"`` (the setting ``histate.interval``).
        block_size: Recurrent block size in tokens; intervals are multiples of it.
        step_tokens: Token budget of one scheduler step (``max_num_batched_tokens``): a stop where a step ends anyway is free.
        source: Where the server's facts come from.
        facts: What to go by until the server answered.
        steps_ahead: Steps that the scheduler runs ahead of the engine (``StepCost``).
    """

    def __init__(
        self,
        interval: str | int,
        block_size: int,
        step_tokens: int,
        source: FactsSource,
        facts: PlacementFacts | None = None,
        steps_ahead: int = 0,
    ) -> None:
        self._setting = interval
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._source = source
        self._asked_at = self._sent_at = float("-inf")
        self.facts = facts or PlacementFacts()
        self.step_cost = StepCost(steps_ahead=steps_ahead)

    def on_request(self) -> None:
        """Take the newest facts if they arrived, and ask again at most once a second. Never waits. O(1)."""
        facts = self._source.poll_placement()
        if facts is not None:
            self.facts = facts
        now = time.monotonic()
        if now - self._sent_at >= ANSWER_SECONDS:
            self._source.forget_placement()
        if now - self._asked_at >= ASK_SECONDS:
            self._asked_at = now
            if self._source.ask_placement(self.step_cost.take_prefill()):
                self._sent_at = now

    def on_step(self, tokens: int, chunk: tuple[int, int] | None = None) -> None:
        """Learn what a step costs (``StepCost.on_step``). Called once per scheduler step. O(1)."""
        self.step_cost.on_step(time.monotonic(), tokens, chunk)

    def interval(self, segment_tokens: int) -> int | None:
        """Tokens between snapshots on a new segment, a block multiple; None for its end only."""
        if isinstance(self._setting, int):
            return self._setting
        if self._setting == "final-only" or self.facts.snapshot_tokens <= 0.0:
            return None
        facts = self.facts
        # The rule weighs what one hit recomputes against what the snapshots take: expected hits put both on one scale.
        hits = segment_tokens * facts.internal_hits_per_token if facts.internal_hits_per_token else 1.0
        hits = max(hits, FEWEST_HITS)
        interval = choose_interval(
            segment_tokens,
            facts.snapshot_tokens * facts.pressure / hits,
            self._block_size,
            ratio=facts.residence_ratio,
            stop_tokens=self.step_cost.tokens / hits,
            step_tokens=self._step_tokens,
        )
        return None if interval >= segment_tokens else interval
