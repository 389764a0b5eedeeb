"""A bound that knows the future: it saves only snapshots that will be used and evicts by next use and what it would cost.

Belady's rule with sizes and costs: of all units of HiState's, the one goes first whose bytes cost least for each second
that they wait, `recomputed tokens / (bytes * seconds until the next use)`; what is never used again goes before all else.
It is a bound for practice, not a proof: the optimum for objects of unlike sizes and costs is NP-hard, and the times of
the closed loop move with the policy. What moves down does so at once. When a use comes is estimated from the session's
own think times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmcache_histate.connector.capture_plan import CapturePlan, SchedulerRequest, last_boundary
from lmcache_histate.replay.simulator.policies.base import Capture, Match, Site
from lmcache_histate.replay.simulator.policies.orders import UnitOrder
from lmcache_histate.replay.simulator.policies.units import UnitSettings, UnitTiers
from lmcache_histate.replay.simulator.prompts import PreparedTrace, Prompt
from lmcache_histate.scorer.policy import CachePolicy
from lmcache_histate.state_store.objects import CacheObject, Tier
from lmcache_histate.state_store.units import MANAGED, UnitKind

ANSWER_S = 0.01
"""Seconds of a decoded token, to estimate when a session's later requests come."""


class Future:
    """When every block is used, and where later requests resume.

    Args:
        trace: All prompts.
    """

    def __init__(self, trace: PreparedTrace) -> None:
        self._session_of = {prompt.index: prompt.session for prompt in trace.prompts}
        self.at = self._estimate(trace)
        """Seconds from its session's start to every request."""
        self.done: dict[str, float] = {}
        """How far every session is, on that clock."""
        self.started: dict[str, float] = {}
        first_use = np.full(trace.nodes, -1, dtype=np.int64)
        self.resumes: dict[int, list[tuple[str, float]]] = {}
        """Snapshots that are used: (session, its clock) of every request that would resume there."""
        self.uses: dict[int, list[tuple[str, float]]] = {}
        """The same for the last block that each later request reads: its KV, and that before it, is used then."""
        for prompt in trace.prompts:
            path = prompt.nodes[: prompt.boundary]
            known = first_use[path] >= 0
            depth = len(path) if known.all() else int(np.argmin(known))
            when = (prompt.session, self.at[prompt.index])
            if depth:
                self.resumes.setdefault(int(path[depth - 1]), []).append(when)
                for node in path[:depth].tolist():
                    self.uses.setdefault(node, []).append(when)
            first_use[prompt.nodes[first_use[prompt.nodes] < 0]] = prompt.index
        for uses in (self.resumes, self.uses):
            for times in uses.values():
                times.sort(key=lambda use: use[1])

    @staticmethod
    def _estimate(trace: PreparedTrace) -> list[float]:
        at = [0.0] * len(trace.prompts)
        ends = [0.0] * len(trace.prompts)
        last: dict[str, int] = {}
        for prompt in trace.prompts:
            stream = trace.streams[prompt.stream]
            if prompt.stream in last:
                at[prompt.index] = ends[last[prompt.stream]] + prompt.think_s
            elif stream.after is not None:
                at[prompt.index] = ends[stream.after] + prompt.think_s
            else:
                at[prompt.index] = stream.start_s
            ends[prompt.index] = at[prompt.index] + ANSWER_S * prompt.output_tokens
            last[prompt.stream] = prompt.index
        return at

    def seen(self, prompt: Prompt, now: float) -> None:
        """A request was looked up: its session is that far."""
        at = self.at[prompt.index]
        self.done[prompt.session] = max(self.done.get(prompt.session, 0.0), at)
        self.started[prompt.session] = now - at

    def wait(self, uses: Sequence[tuple[str, float]], now: float) -> float:
        """Seconds until the first of `uses` that is still to come, infinite if none is. O(sessions that use it)."""
        best = float("inf")
        for session, at in uses:
            if at > self.done.get(session, -1.0):
                best = min(best, max(self.started.get(session, now) + at - now, 1e-3))
                if session in self.done:
                    break
        return best


class OfflineCapture(Capture):
    """Snapshots exactly where later requests resume; the answer's last boundary, if it is used.

    Args:
        trace: All prompts.
        future: Of the same trace.
        block_tokens: Block size.
    """

    def __init__(self, trace: PreparedTrace, future: Future, block_tokens: int) -> None:
        self._trace = trace
        self._future = future
        self._block = block_tokens

    def plan(self, request: SchedulerRequest, resumed: int, cached: int, now: float) -> CapturePlan:
        """All useful positions as stops; a bound does not cut steps for them."""
        prompt = self._trace.prompts[int(request.request_id)]
        final = last_boundary(request.num_prompt_tokens, self._block)
        nodes = prompt.nodes[: prompt.boundary].tolist()
        first = resumed // self._block
        stops = [
            (place + 1) * self._block
            for place in range(first, len(nodes))
            if self._future.wait(self._future.resumes.get(nodes[place], ()), now) != float("inf")
        ]
        return CapturePlan(request, tuple(stop for stop in stops if stop < final), final, None, resumed)


class OfflineOrder(UnitOrder):
    """Lowest cost per byte and second until the next use.

    Args:
        policy: Whose order it is.
        future: When things are used.
        numbers: Block of every chunk hash.
    """

    def __init__(self, policy: CachePolicy, future: Future, numbers: dict[bytes, int]) -> None:
        super().__init__(policy)
        self._future = future
        self._numbers = numbers
        self._now = 0.0

    def value(self, node: int, tier: Tier) -> float:
        """Tokens recomputed without the unit, over what it frees (tokens of KV) and the seconds until its next use."""
        number = self._numbers[self.tree.hashes[node]]
        bundle = self.tree.unit_kind[tier][node] == UnitKind.BUNDLE
        uses = self._future.uses if bundle else self._future.resumes
        wait = self._future.wait(uses.get(number, ()), self._now)
        if wait == float("inf"):
            return 0.0
        cost = self.tree.position[node] - self.start_of(node)
        return cost / (self.freed_tokens(node, tier) * wait)

    def used(self, nodes: Sequence[int], now: float) -> None:
        """Their next use is a later one now: values on the path may have fallen. O(nodes)."""
        self._now = now
        for node in nodes:
            for tier in MANAGED:
                if self.tree.unit_kind[tier][node]:
                    self._requeue(node, tier)


class OfflineTiers(UnitTiers):
    """The tiers under an `OfflineOrder`.

    Args:
        site: What it runs on.
        policy: With that order.
        future: The same.
        settings: Watermarks.
    """

    def __init__(self, site: Site, policy: CachePolicy, future: Future, settings: UnitSettings) -> None:
        super().__init__(site, policy, settings)
        self._future = future

    def lookup(self, prompt: Prompt, path: Sequence[int], now: float) -> Match:
        """As ever, once the future knows that this request is past."""
        self._future.seen(prompt, now)
        return super().lookup(prompt, path, now)

    def store(
        self, prompt: Prompt, path: Sequence[int], start: int, end: int, snapshots: Sequence[int], now: float
    ) -> None:
        """Only what will be used comes in."""
        future, never = self._future, float("inf")
        while end > start and future.wait(future.uses.get(path[end - 1], ()), now) == never:
            end -= 1
        wanted = [place for place in snapshots if future.wait(future.resumes.get(path[place - 1], ()), now) != never]
        super().store(prompt, path, start, end, wanted, now)

    def _may_move(self, nbytes: int, now: float) -> bool:
        """A bound moves whenever it likes."""
        return True

    def _move(self, objects: Sequence[CacheObject], now: float) -> int:
        """Move at once: what is being written takes no room in CPU memory."""
        nbytes = sum(entry.nbytes for entry in objects)
        if self._held(Tier.DISK) + nbytes > self.site.disk_bytes:
            return 0
        self._links.disk_write.transfer(nbytes, now)
        self._add([entry._replace(tier=Tier.DISK) for entry in objects], now)
        self._take(objects, now)
        return nbytes
