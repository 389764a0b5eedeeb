"""One serving instance as a discrete-event simulation: sessions send requests, a scheduler runs steps, caches fill up.

The scheduler is vLLM's: a step holds at most `step_tokens` tokens; requests that decode come first, then chunks of
prefill in order of arrival. A chunk ends on a block boundary, at a stop, or at the prompt's end. A request whose prefix
is being loaded holds its blocks and lets others go ahead.

What is simplified: a request is admitted only when its blocks for prompt and answer can be had, so nothing is preempted;
an answer's blocks are cached when it ends. Steps in which all requests decode are jumped over in closed form.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from lmcache_histate.connector.capture_plan import CapturePlan
from lmcache_histate.replay.results import RequestResult, TierSample
from lmcache_histate.replay.simulator.gpu_pool import BlockPool
from lmcache_histate.replay.simulator.hardware import StepTimes
from lmcache_histate.replay.simulator.ledger import Ledger
from lmcache_histate.replay.simulator.objects import KV, SNAPSHOT
from lmcache_histate.replay.simulator.policies.base import Capture, Tiers
from lmcache_histate.replay.simulator.prompts import Prompt


class StuckError(RuntimeError):
    """A request can never be served; the message says why."""


@dataclass(slots=True, eq=False)
class Active:
    """A request on its way. The first block of fields is what vLLM's own request has and `CapturePlanner` reads."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    shared_prefix_boundary: int

    prompt: Prompt
    path: list[int]
    sent_s: float
    plan: CapturePlan | None = None
    stops: list[int] = field(default_factory=list)
    """Positions at which steps must end, the next one last."""
    resumed: int = 0
    """Blocks that were not computed."""
    reusable: int = 0
    disk_blocks: int = 0
    remote_blocks: int = 0
    kv_gone: int = 0
    snapshot_gone: int = 0
    never_saved: int = 0
    shared: list[int] = field(default_factory=list)
    """Cached blocks of KV that it uses."""
    own: int = 0
    """Other blocks of KV that it holds."""
    stored: int = 0
    """Blocks of its path that are cached or were offered."""
    chunk: int = 0
    """Tokens of prefill in the step that runs."""
    left: int = 0
    """Answer tokens that are still to come."""
    first_token_s: float = 0.0


class Engine:
    """Runs a trace's requests through a scheduler, a block pool and the tiers below.

    Args:
        times: Cost of steps.
        block_tokens: Tokens of a block.
        step_tokens: Token budget of a step.
        max_requests: Most requests that run at once.
        pool: The GPU's block pool.
        capture: Where snapshots are taken.
        tiers: What lies below.
        ledger: What the run is judged by.
        answered: Called when an answer is complete; sends what follows.
        sample_every: The tiers are looked at each time that so many more requests are finished.
        cuts_steps: Whether stops cut steps. False for bounds, which take snapshots anywhere for nothing.
    """

    def __init__(
        self,
        times: StepTimes,
        block_tokens: int,
        step_tokens: int,
        max_requests: int,
        pool: BlockPool,
        capture: Capture,
        tiers: Tiers,
        ledger: Ledger,
        answered: Callable[[Prompt, float], None],
        sample_every: int,
        cuts_steps: bool = True,
    ) -> None:
        self.now = 0.0
        self.results: list[tuple[int, RequestResult]] = []
        self.samples: list[TierSample] = []
        self._times = times
        self._block = block_tokens
        self._step_tokens = step_tokens
        self._max_requests = max_requests
        self._pool = pool
        self._capture = capture
        self._tiers = tiers
        self._ledger = ledger
        self._answered = answered
        self._sample_every = sample_every
        self._cuts_steps = cuts_steps
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._waiting: deque[Active] = deque()
        self._running: list[Active] = []
        self._admitted = 0

    # -- events -------------------------------------------------------------------------------------------------------

    def later(self, time: float, action: Callable[[float], None]) -> None:
        """Run `action(time)` at `time`; of equal times, in the order of the calls."""
        heapq.heappush(self._events, (time, next(self._number), action))

    def send(self, prompt: Prompt, now: float) -> None:
        """A request arrives."""
        self._waiting.append(
            Active(
                request_id=str(prompt.index),
                num_prompt_tokens=prompt.prompt_tokens,
                num_tokens=prompt.prompt_tokens,
                num_computed_tokens=0,
                shared_prefix_boundary=0,
                prompt=prompt,
                path=prompt.nodes.tolist(),
                sent_s=now,
            )
        )

    def run(self) -> None:
        """Until nothing is left to happen.

        Raises:
            StuckError: A request needs more GPU memory than there is.
        """
        while True:
            while self._events and self._events[0][0] <= self.now:
                time, _, action = heapq.heappop(self._events)
                action(time)
            tokens = self._schedule()
            if tokens:
                self._capture.stepped(self.now, tokens)
                self._step(tokens)
            elif self._events:
                self._capture.stepped(self.now, 0)
                self.now = self._events[0][0]
            elif self._waiting:
                head, blocks = self._waiting[0], self._blocks_for(self._waiting[0])
                raise StuckError(
                    f"request {head.prompt.index} of stream {head.prompt.stream} needs {blocks} blocks of GPU memory and a "
                    f"state's for its {head.num_prompt_tokens:,} tokens and answer; the pool has {self._pool.blocks}. "
                    "Give the GPU more memory, or leave the request out."
                )
            else:
                return

    # -- scheduling ---------------------------------------------------------------------------------------------------

    def _schedule(self) -> int:
        """Choose the tokens of the next step: `chunk` of every request that prefills; returns their sum with decodes."""
        budget = self._step_tokens
        prefilling = []
        for active in self._running:
            if active.num_computed_tokens >= active.num_prompt_tokens:
                budget -= 1
            else:
                prefilling.append(active)
        for active in prefilling:
            budget -= self._chunk(active, budget)
        # With less than a block left vLLM admits nobody: a chunk that does not end the prompt ends on a block boundary.
        while budget >= self._block and self._waiting and self._admitted < self._max_requests:
            head = self._waiting[0]
            if not self._admit(head):
                break
            self._waiting.popleft()
            if head.plan is not None:
                budget -= self._chunk(head, budget)
        return self._step_tokens - budget

    def _chunk(self, active: Active, budget: int) -> int:
        """Tokens of prefill that `active` gets of `budget`."""
        position = active.num_computed_tokens
        end = min(active.num_prompt_tokens, active.stops[-1] if active.stops else math.inf, position + max(budget, 0))
        if end == position + budget and end < active.num_prompt_tokens:
            end -= end % self._block
        active.chunk = max(0, int(end) - position)
        return active.chunk

    def _blocks_for(self, active: Active) -> int:
        tokens = active.num_prompt_tokens + active.prompt.output_tokens
        return -(-tokens // self._block)

    def _admit(self, active: Active) -> bool:
        """Look a request's prefix up and give it its blocks; False if they cannot be had now. O(path)."""
        pool, prompt = self._pool, active.prompt
        path = active.path[: prompt.boundary]
        local_kv, local = pool.match(path)
        own = self._blocks_for(active) - local
        if not pool.fits(path[:local], own):
            return False
        now = self.now
        below = self._tiers.lookup(prompt, path, now)
        resumed = max(local, below.resume)
        causes = self._ledger.looked_up(prompt.nodes[: prompt.boundary], max(local_kv, below.kv), resumed)
        active.resumed, active.reusable = resumed, causes.reusable
        active.kv_gone, active.snapshot_gone, active.never_saved = causes[1:]
        if local:
            pool.touch_state(path[local - 1])
        active.shared = path[:local]
        active.own = own
        pool.take(active.shared, active.own)
        active.stored = resumed
        active.num_computed_tokens = resumed * self._block
        active.shared_prefix_boundary = local_kv * self._block if local_kv > resumed else 0
        self._admitted += 1
        cached = max(local_kv, below.kv) * self._block
        if resumed > local:
            load = self._tiers.load(prompt, path, local, resumed, now)
            active.disk_blocks, active.remote_blocks = load.disk_blocks, load.remote_blocks
            self.later(load.ready_at, lambda time: self._loaded(active, path, local, cached, time))
        else:
            self._begin(active, cached, now)
        return True

    def _loaded(self, active: Active, path: list[int], local: int, cached: int, now: float) -> None:
        """The prefix is in the GPU: its blocks are cached there, too."""
        self._fill(active, path[local : active.resumed])
        if self._pool.save_state(path[active.resumed - 1]):
            self._ledger.saved(path[active.resumed - 1])
        self._begin(active, cached, now)

    def _begin(self, active: Active, cached: int, now: float) -> None:
        plan = active.plan = self._capture.plan(active, active.resumed * self._block, cached, now)
        if self._cuts_steps:
            boundary = active.prompt.boundary * self._block
            stops = sorted({*plan.stops, boundary}, reverse=True)
            active.stops = [stop for stop in stops if active.num_computed_tokens < stop < active.num_prompt_tokens]
        active.left = active.prompt.output_tokens
        self._running.append(active)

    def _fill(self, active: Active, nodes: list[int]) -> None:
        for node in nodes:
            if self._pool.fill(node):
                active.shared.append(node)
                active.own -= 1

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self, tokens: int) -> None:
        """Run the step that was scheduled, or all steps of decoding until something else can happen."""
        decoding, contexts, prefill_s = 0, 0.0, 0.0
        chunks = []
        for active in self._running:
            if active.chunk:
                start = active.num_computed_tokens
                prefill_s += self._times.prefill(start, start + active.chunk)
                chunks.append(active)
            elif active.num_computed_tokens >= active.num_prompt_tokens:
                decoding += 1
                contexts += active.num_computed_tokens
        steps = 1
        if chunks:
            self.now += self._times.step(tokens, prefill_s, decoding, contexts)
        else:
            steps = min(
                active.left for active in self._running if active.num_computed_tokens >= active.num_prompt_tokens
            )
            if self._events:
                steps = min(steps, self._times.steps_within(decoding, contexts, self._events[0][0] - self.now))
            self.now += self._times.decode_steps(decoding, contexts, steps)
        done = []
        for active in self._running:
            if active.chunk:
                self._prefilled(active)
            elif active.num_computed_tokens >= active.num_prompt_tokens:
                active.num_computed_tokens += steps
                active.left -= steps
            if active.left <= 0:
                done.append(active)
        for active in done:
            self._running.remove(active)
            self._finish(active)

    def _prefilled(self, active: Active) -> None:
        """A chunk of prefill is done: cache its blocks, keep the state if it is wanted."""
        position = active.num_computed_tokens = active.num_computed_tokens + active.chunk
        active.chunk = 0
        while active.stops and active.stops[-1] <= position:
            active.stops.pop()
        block, plan = self._block, active.plan
        assert plan is not None
        end = min(position, active.num_prompt_tokens) // block
        snapshots = []
        if self._cuts_steps:
            if position % block == 0 and plan.keeps(position):
                snapshots.append(end)
        else:
            # Every planned stop that the chunk passed, and the prompt's end.
            boundary = active.prompt.boundary
            planned = {stop // block for stop in plan.stops} | {boundary}
            snapshots = sorted(place for place in planned if active.stored < place <= end)
        for place in snapshots:
            plan.took(place * block)
        self._store(active, end, snapshots)
        if position >= active.num_prompt_tokens:
            active.first_token_s = self.now
            active.left -= 1

    def _store(self, active: Active, end: int, snapshots: list[int]) -> None:
        """Blocks up to `end` are computed, with snapshots at the ends of those named."""
        path, start = active.path, active.stored
        if end > start:
            self._ledger.computed(active.prompt.nodes[start:end])
            self._fill(active, path[start:end])
            active.stored = end
        for place in snapshots:
            self._pool.save_state(path[place - 1])
            self._ledger.saved(path[place - 1])
        if end > start or snapshots:
            self._tiers.store(active.prompt, path, start, max(end, start), snapshots, self.now)

    def _finish(self, active: Active) -> None:
        """The answer is complete: cache its blocks and those snapshots of it that stay; give the blocks back."""
        prompt, block, plan = active.prompt, self._block, active.plan
        assert plan is not None
        places = range(prompt.boundary + 1, prompt.end + 1)
        for place in places:
            plan.took(place * block)
        gone = set(plan.superseded)
        self._store(active, prompt.end, [place for place in places if place * block not in gone])
        self._pool.release(active.shared, active.own)
        self._tiers.finished(prompt, active.path, active.resumed, self.now)
        self._admitted -= 1
        self.results.append((prompt.index, self._result(active)))
        if len(self.results) % self._sample_every == 0:
            self._sample()
        self._answered(prompt, self.now)

    def _result(self, active: Active) -> RequestResult:
        prompt, block = active.prompt, self._block
        return RequestResult(
            stream=prompt.stream,
            session=prompt.session,
            sent_s=active.sent_s,
            ttft_s=active.first_token_s - active.sent_s,
            seconds=self.now - active.sent_s,
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=prompt.output_tokens,
            hit_tokens=active.resumed * block,
            reusable_tokens=active.reusable * block,
            disk_tokens=active.disk_blocks * block,
            remote_tokens=active.remote_blocks * block,
            recomputed_kv_gone=active.kv_gone * block,
            recomputed_snapshot_gone=active.snapshot_gone * block,
            recomputed_never_saved=active.never_saved * block,
        )

    def _sample(self) -> None:
        pool = self._pool
        held = self._tiers.occupancy()
        self.samples.append(
            TierSample(
                self.now,
                {"gpu": float(pool.cached[KV]), **held.kv},
                {"gpu": float(pool.cached[SNAPSHOT] * pool.state_blocks), **held.snapshots},
            )
        )
