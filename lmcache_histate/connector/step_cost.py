"""What one more scheduler step costs, in tokens of prefill, learned from the running engine."""

from __future__ import annotations

from collections import deque

from lmcache_histate.protocol import PrefillTime

CLEAR_SHARE = 0.75
"""A step tells what prefill costs if one prompt's chunk is at least this share of its tokens."""


class StepCost:
    """Least squares of step time over step tokens, ``seconds = fixed + per_token * tokens``, with exponential forgetting.

    A stop ends a step early, so it costs the fixed part of one more step; ``tokens`` gives that as the number of prefill
    tokens that take as long. Only back-to-back steps with prefill work are evidence: idle time is not step time.

    Args:
        forget: Weight of the past at each new observation, in (0, 1).
        longest_step_seconds: Gaps longer than this are idle time or a stall, not a step.
        default_tokens: Answer while too little was seen.
        steps_ahead: How many steps the scheduler runs ahead of the engine (1 under asynchronous scheduling): a step is
            then scheduled when the one so many before it is done.
    """

    def __init__(
        self,
        forget: float = 0.98,
        longest_step_seconds: float = 5.0,
        default_tokens: float = 32.0,
        steps_ahead: int = 0,
    ) -> None:
        self._forget = forget
        self._longest = longest_step_seconds
        self._default = default_tokens
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._last = 0.0
        self._pending: deque[tuple[int, tuple[int, int] | None]] = deque()
        self._steps_ahead = steps_ahead
        self._prefill: PrefillTime | None = None

    def on_step(self, now: float, tokens: int, chunk: tuple[int, int] | None = None) -> None:
        """Note that a step is being scheduled. O(1).

        The time since the previous call is the duration of the oldest step that still runs, if there was always work.

        Args:
            now: Seconds, any steady clock.
            tokens: Tokens in the step.
            chunk: Positions [start, end) of the prompt that has most of them, if it is known.
        """
        seconds, self._last = now - self._last, now
        if tokens <= 0:
            self._pending.clear()
            return
        self._pending.append((tokens, chunk))
        if len(self._pending) < self._steps_ahead + 2:
            return
        done, chunk = self._pending.popleft()
        if not 0.0 < seconds <= self._longest:
            return
        x = float(done)
        if chunk is not None and chunk[1] - chunk[0] >= CLEAR_SHARE * done:
            self._prefill = PrefillTime(*chunk, 1e3 * seconds * (chunk[1] - chunk[0]) / done)
        self._weight = self._weight * self._forget + 1.0
        self._x = self._x * self._forget + x
        self._y = self._y * self._forget + seconds
        self._xx = self._xx * self._forget + x * x
        self._xy = self._xy * self._forget + x * seconds

    def take_prefill(self) -> PrefillTime | None:
        """The newest prefill that was timed, once."""
        prefill, self._prefill = self._prefill, None
        return prefill

    @property
    def tokens(self) -> float:
        """Fixed cost of a step in prefill tokens; the default until steps of different sizes were seen."""
        if self._weight < 8.0:
            return self._default
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < 1.0:
            return self._default
        per_token = (self._xy / self._weight - mean_x * mean_y) / variance
        fixed = mean_y - per_token * mean_x
        if per_token <= 0.0:
            return self._default
        return max(fixed / per_token, 0.0)
