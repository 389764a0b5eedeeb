"""Who sends what when: at most so many sessions at once, each request sent a think time after its stream's last answer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from lmcache_histate.replay.simulator.prompts import PreparedTrace, Prompt

START_GAP_S = 10.0
"""Seconds between the starts of the first sessions: enough to prefill a long first prompt, so that the run does not begin
with a queue that no service would see."""


class Sessions:
    """The closed loop.

    Sessions begin in the trace's order (with a seed other than 0, in an order drawn from it); the next one begins when
    one has got its last answer.

    Args:
        trace: All prompts.
        at_once: Most sessions at once.
        seed: Of the order.
        send: Called as `send(prompt, time)`, times in any order.
    """

    def __init__(self, trace: PreparedTrace, at_once: int, seed: int, send: Callable[[Prompt, float], None]) -> None:
        self._trace = trace
        self._send = send
        self._open: dict[str, int] = {}
        """Requests of every session that are not answered yet."""
        self._starts: dict[str, list[str]] = {}
        """Streams of every session that start by themselves."""
        self._after: dict[int, list[str]] = {}
        """Streams that an answer starts."""
        for prompt in trace.prompts:
            self._open[prompt.session] = self._open.get(prompt.session, 0) + 1
        for key, stream in trace.streams.items():
            if stream.after is None:
                self._starts.setdefault(stream.session, []).append(key)
            else:
                self._after.setdefault(stream.after, []).append(key)
        order = list(self._open)
        if seed:
            random.Random(seed).shuffle(order)
        self._waiting = deque(order)
        for number in range(min(at_once, len(order))):
            self._start(number * START_GAP_S)

    def _start(self, now: float) -> None:
        if not self._waiting:
            return
        streams = self._trace.streams
        starting = self._starts.get(self._waiting.popleft(), [])
        begin = min((streams[key].start_s for key in starting), default=0.0)
        for key in starting:
            self._send(self._trace.prompts[self._trace.first[key]], now + streams[key].start_s - begin)

    def answered(self, prompt: Prompt, now: float) -> None:
        """A request got its answer: its stream goes on, streams that waited for it start, or its session ends."""
        prompts = self._trace.prompts
        if prompt.following is not None:
            self._send(prompts[prompt.following], now + prompts[prompt.following].think_s)
        for key in self._after.get(prompt.index, ()):
            first = prompts[self._trace.first[key]]
            self._send(first, now + first.think_s)
        self._open[prompt.session] -= 1
        if not self._open[prompt.session]:
            self._start(now)
