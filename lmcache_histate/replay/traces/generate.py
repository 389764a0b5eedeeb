"""Built-in workloads: traces that need no download, fixed by their seed.

`AgentSpec` writes sessions of coding agents. Its shares, rewind distances and gaps are those of published agent traces;
sizes of prompts, appended parts and answers are those of Weka's Claude Code sessions. `RewritingSpec` is the HiState
paper's rewriting test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np

from lmcache_histate.replay.traces.build import TraceBuilder, answer_seconds
from lmcache_histate.replay.traces.model import Trace
from lmcache_histate.replay.traces.source import TraceError
from lmcache_histate.replay.traces.text import TEXT_BLOCK_TOKENS, Numbers, Text, shared_text


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution, cut at both ends.

    Attributes:
        median: Half of all values are below.
        sigma: Standard deviation of the logarithm.
        least: Smaller values become this.
        most: Larger values become this.
    """

    median: float
    sigma: float
    least: float = 0.0
    most: float = math.inf

    def draw(self, random: np.random.Generator) -> float:
        """One value."""
        return min(self.most, max(self.least, self.median * math.exp(self.sigma * random.standard_normal())))

    def tokens(self, random: np.random.Generator) -> int:
        """One value as a count, at least 1."""
        return max(1, round(self.draw(random)))


GAPS = Spread(18.0, math.log(2134 / 18) / 2.3263, least=0.2)
"""Seconds between an answer and the next request: median 18, 99th percentile 2,134."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Sessions of coding agents. Lengths in tokens, times in seconds; shares are of the turns after a stream's first.

    Attributes:
        seed: Fixes everything.
        sessions: How many.
        session_gap_s: Mean time between their starts.
        turns: Requests of a session's own stream.
        system_prompts: Different system prompts (with tools); a few sessions share each.
        system_tokens: Length of each.
        first: What a session's first prompt holds besides.
        added: What a turn adds, besides the answer before it.
        answers: Length of an answer.
        gaps: From an answer to the next request.
        rewind_share: Turns that go back into an old turn, if their conversation is long enough: some wait until it is, and
            some for ever. So 2.5% to 3% of all turns do, by a median of 51,000 tokens.
        rewind_back: How far back they go. One that is longer than the conversation waits until it is not.
        resent_share: Rewinds that send what was behind again, as other tokens (a tool result in the middle was dropped or
            shortened, reasoning was stripped); the other rewinds drop it (an edited message, an undo).
        reset_share: Turns that start again after the system prompt, with a summary. So does a prompt that would be longer
            than `context_tokens`.
        fork_share: Turns after which a second stream leaves from an inner position, and goes on beside the first.
        fork_turns: Requests of a fork.
        agent_share: Turns that start a sub-agent; their own stream waits for its end.
        agent_turns: Requests of a sub-agent.
        agent_system_tokens: System prompt of sub-agents, the same for all.
        agent_gaps: From an answer to a sub-agent's next request.
        summary: What a reset keeps, rewritten.
        context_tokens: Longest prompt.
    """

    seed: int = 0
    sessions: int = 48
    session_gap_s: float = 300.0
    turns: Spread = Spread(70, 0.75, 3, 300)
    system_prompts: int = 4
    system_tokens: int = 17_400
    first: Spread = Spread(8_000, 2.0, 50, 150_000)
    added: Spread = Spread(560, 1.5, 10, 60_000)
    answers: Spread = Spread(240, 0.95, 10, 16_000)
    gaps: Spread = GAPS
    rewind_share: float = 0.045
    rewind_back: Spread = Spread(60_000, 0.8, 300)
    resent_share: float = 0.7
    reset_share: float = 0.003
    fork_share: float = 0.004
    fork_turns: Spread = Spread(6, 0.7, 1, 40)
    agent_share: float = 0.01
    agent_turns: Spread = Spread(10, 0.5, 2, 40)
    agent_system_tokens: int = 11_700
    agent_gaps: Spread = Spread(4, 0.8, 0.2)
    summary: Spread = Spread(6_000, 0.5, 500, 20_000)
    context_tokens: int = 240_000


@dataclass(frozen=True, slots=True)
class RewritingSpec:
    """The paper's rewriting test: every turn adds as much; a share of them first goes back to a random position.

    Attributes:
        seed: Fixes everything.
        share: Turns, after a session's first, that rewrite: they keep the conversation up to a position that is uniform
            over it and drop the rest.
        sessions: How many.
        session_gap_s: Mean time between their starts.
        turns: Requests of each.
        new_tokens: What a turn adds, besides the answer before it.
        answer_tokens: Length of every answer.
        gaps: From an answer to the next request.
    """

    seed: int = 0
    share: float = 0.05
    sessions: int = 64
    session_gap_s: float = 300.0
    turns: int = 16
    new_tokens: int = 8_000
    answer_tokens: int = 256
    gaps: Spread = GAPS


WorkloadSpec = AgentSpec | RewritingSpec

BUILTIN_SPECS: dict[str, WorkloadSpec] = {
    "agents": AgentSpec(),
    "rewriting-0": RewritingSpec(share=0.0),
    "rewriting-2.5": RewritingSpec(share=0.025),
    "rewriting-5": RewritingSpec(share=0.05),
    "rewriting-10": RewritingSpec(share=0.10),
}
"""By name."""


def builtin_spec(text: str) -> WorkloadSpec:
    """The workload that a name means: one of `BUILTIN_SPECS`, then settings, as in `agents,seed=3,sessions=20`.

    Raises:
        TraceError: No such workload, or no such setting.
    """
    name, *settings = text.split(",")
    spec = BUILTIN_SPECS.get(name)
    if spec is None:
        raise TraceError(f"builtin:{name}: there are only {', '.join(f'builtin:{known}' for known in BUILTIN_SPECS)}")
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    allowed = {key: type(value) for key, value in values.items() if isinstance(value, int | float)}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in allowed:
            raise TraceError(f"builtin:{text}: {key!r} cannot be set; what can is {', '.join(allowed)}")
        try:
            number = allowed[key](value)
        except ValueError:
            kind = "whole number" if allowed[key] is int else "number"
            raise TraceError(f"builtin:{text}: {key}={value} is not a {kind}") from None
        if number < 0 or (number == 0 and key in ("sessions", "turns", "system_prompts")):
            raise TraceError(f"builtin:{text}: {key}={value} is too small")
        spec = replace(spec, **cast(dict[str, Any], {key: number}))
    return spec


def generate_trace(spec: WorkloadSpec, *, name: str | None = None, limit: int | None = None) -> Trace:
    """Write a workload.

    Args:
        spec: Its shape.
        name: Of the trace.
        limit: Keep only as many requests, the first in order of arrival.
    """
    kind = "agents" if isinstance(spec, AgentSpec) else f"rewriting-{spec.share * 100:g}"
    builder = TraceBuilder(name or f"builtin:{kind}", TEXT_BLOCK_TOKENS)
    starts = np.random.default_rng([spec.seed, 0]).exponential(spec.session_gap_s, spec.sessions).cumsum()
    for number, start in enumerate(starts.tolist()):
        # A generator for each session: more sessions leave the others as they are.
        random = np.random.default_rng([spec.seed, 1, number])
        key = f"session-{number}"
        numbers = Numbers(f"{spec.seed}/{key}")
        if isinstance(spec, AgentSpec):
            _AgentSession(spec, builder, random, key, numbers).write(start)
        else:
            _rewriting_session(spec, builder, random, key, numbers, start)
    trace = builder.finish()
    return trace if limit is None else trace.first(limit)


class _AgentSession:
    """Writes one session: its own stream, its forks and its sub-agents."""

    def __init__(
        self, spec: AgentSpec, builder: TraceBuilder, random: np.random.Generator, key: str, numbers: Numbers
    ) -> None:
        self._spec = spec
        self._builder = builder
        self._random = random
        self._key = key
        self._numbers = numbers
        # The first system prompts are used most, as versions of one agent are.
        weights = 1 / np.arange(1, spec.system_prompts + 1)
        kind = int(random.choice(spec.system_prompts, p=weights / weights.sum()))
        self._system = shared_text(f"system-{kind}", spec.system_tokens, numbers)
        self._agent_system = shared_text("sub-agent", spec.agent_system_tokens, numbers)
        self._children = 0

    def write(self, start_s: float) -> None:
        """Write all of it."""
        text = self._system.kept(self._system.tokens)
        text.extend(self._spec.first.tokens(self._random))
        self._main(self._key, text, self._spec.turns.tokens(self._random), start_s, 0.0, None)

    def _main(self, stream: str, text: Text, turns: int, at_s: float, think_s: float, after: int | None) -> None:
        """A stream that rewinds, forks and starts sub-agents; `text` is its first prompt."""
        spec, random = self._spec, self._random
        back = spec.rewind_back.draw(random)
        owed = 0
        for turn in range(turns):
            request, at_s = self._send(stream, text, at_s, think_s, after if turn == 0 else None)
            if stream == self._key and random.random() < spec.fork_share:
                self._fork(text, at_s, request)
            think_s = spec.gaps.draw(random)
            if random.random() < spec.agent_share:
                think_s = max(think_s, self._agent(at_s, request))
            at_s += think_s
            new = spec.added.tokens(random)
            owed += random.random() < spec.rewind_share
            if text.tokens + new > spec.context_tokens or random.random() < spec.reset_share:
                text = self._system.kept(self._system.tokens)
                new = spec.summary.tokens(random)
            elif owed and back < text.tokens - self._system.tokens:
                resent = random.random() < spec.resent_share
                text = text.kept(round(text.tokens - back))
                text.extend(round(back) if resent else 0)
                back = spec.rewind_back.draw(random)
                owed -= 1
            text.extend(min(new, spec.context_tokens - text.tokens))

    def _send(
        self, stream: str, text: Text, at_s: float, think_s: float, after: int | None = None
    ) -> tuple[int, float]:
        """Send `text` and append the answer to it; the request's handle, and when it was answered."""
        answer = self._spec.answers.tokens(self._random)
        answered = at_s + answer_seconds(answer)
        request = self._builder.add(
            stream,
            at_s,
            text.tokens,
            answer,
            text.hashes,
            session=self._key,
            answered_s=answered,
            think_s=think_s,
            after=after,
        )
        text.extend(answer)
        return request, answered

    def _fork(self, text: Text, at_s: float, after: int) -> None:
        gap = self._spec.gaps.draw(self._random)
        branch = text.kept(int(self._random.integers(self._system.tokens, text.tokens)))
        branch.extend(self._spec.added.tokens(self._random))
        turns = self._spec.fork_turns.tokens(self._random)
        self._main(self._child("fork"), branch, turns, at_s + gap, gap, after)

    def _agent(self, at_s: float, after: int) -> float:
        """Write a sub-agent; how long it takes."""
        spec, random = self._spec, self._random
        stream, text, began = self._child("agent"), self._agent_system.kept(self._agent_system.tokens), at_s
        think_s = 0.0
        for turn in range(spec.agent_turns.tokens(random)):
            text.extend(spec.added.tokens(random))
            _, at_s = self._send(stream, text, at_s + think_s, think_s, after if turn == 0 else None)
            think_s = spec.agent_gaps.draw(random)
        return at_s - began

    def _child(self, kind: str) -> str:
        self._children += 1
        return f"{self._key}/{kind}-{self._children}"


def _rewriting_session(
    spec: RewritingSpec, builder: TraceBuilder, random: np.random.Generator, key: str, numbers: Numbers, at_s: float
) -> None:
    text, think_s = Text(numbers), 0.0
    for turn in range(spec.turns):
        # Both are drawn whether they are needed or not: other shares leave the rest of the trace alone.
        rewrites, place = random.random() < spec.share, random.random()
        if turn and rewrites:
            text = text.kept(int(place * text.tokens))
        text.extend(spec.new_tokens)
        answered = at_s + answer_seconds(spec.answer_tokens)
        builder.add(key, at_s, text.tokens, spec.answer_tokens, text.hashes, answered_s=answered, think_s=think_s)
        text.extend(spec.answer_tokens)
        think_s = spec.gaps.draw(random)
        at_s = answered + think_s
