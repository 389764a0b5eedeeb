"""Where one request's prefill should leave snapshots of the recurrent state, and which of them to keep.

vLLM saves a recurrent state only where a scheduler step ends on a block boundary. ``Request.shared_prefix_boundary = p``
(vLLM 0.32, ``Scheduler._mamba_block_aligned_split``) makes a prefill step end at ``p``; a connector that moves it on after
every step places snapshots wherever it likes. Everything here is arithmetic on token positions: no vLLM import.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

IntervalChooser = Callable[[int], int | None]
"""Segment length in tokens -> tokens between snapshots, or None for "only at the segment's end"."""


class SchedulerRequest(Protocol):
    """The part of ``vllm.v1.request.Request`` that placement reads and writes. Positions are in tokens."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and answer so far."""
    num_computed_tokens: int
    shared_prefix_boundary: int


def last_boundary(num_tokens: int, block_size: int, drops_last_block: bool = False) -> int:
    """The last block boundary that a resend of ``num_tokens`` tokens can resume at, in tokens; 0 when there is none.

    Source: vLLM ``get_mamba_prefill_checkpoint_position``. One token is always recomputed; with EAGLE-style drafting
    (``drops_last_block``) the last block is dropped instead.
    """
    if drops_last_block:
        return max(num_tokens // block_size - 1, 0) * block_size
    return max(num_tokens - 1, 0) // block_size * block_size


def plan_stops(start: int, final: int, interval: int | None, block_size: int, junction: int = 0) -> tuple[int, ...]:
    """Positions strictly inside a prefill at which a step should end, ascending.

    Stops sit every ``interval`` tokens counted from ``start``, where a snapshot already exists, so that the spacing
    holds across turns. The prompt's own last boundary is not among them: vLLM always stops there.

    Args:
        start: Tokens already matched (local and external cache together).
        final: The prompt's last boundary (``last_boundary``), in tokens.
        interval: Tokens between snapshots; rounded up to a block multiple. None plans no stop of our own.
        block_size: Recurrent block size in tokens.
        junction: vLLM's own shared-prefix boundary (tokens), kept as a stop; 0 when there is none.

    Returns:
        Block multiples ``s`` with ``start < s < final``. O(number of stops).
    """
    first = start // block_size * block_size
    stops: set[int] = set()
    if interval is not None:
        step = -(-interval // block_size) * block_size
        stops.update(range(first + step, final, step))
    floored = junction // block_size * block_size
    if start < floored < final:
        stops.add(floored)
    return tuple(sorted(stop for stop in stops if stop > start))


@dataclass
class CapturePlan:
    """One request's stops and the snapshots taken so far. All positions in tokens."""

    request: SchedulerRequest
    stops: tuple[int, ...]
    final: int
    """Last block boundary of the prompt: vLLM stops there by itself, and that snapshot is always kept."""
    interval: int | None
    anchor: int = 0
    """Last snapshot that stays, as far as the answer is concerned."""
    tail: int | None = None
    """Newest snapshot taken while decoding; it stays until the answer reaches the next boundary."""
    superseded: list[int] = field(default_factory=list)

    def next_stop(self, position: int) -> int:
        """First stop after ``position``, or 0 when none is left. O(log stops)."""
        index = bisect_right(self.stops, position)
        return self.stops[index] if index < len(self.stops) else 0

    def arm(self, position: int) -> int:
        """Tell vLLM's scheduler the next stop after ``position``; returns what was armed (0: nothing)."""
        stop = self.next_stop(position)
        self.request.shared_prefix_boundary = stop
        return stop

    def keeps(self, position: int) -> bool:
        """Whether a snapshot that vLLM happens to have at ``position`` should be stored.

        Inside the prompt only planned positions are; a boundary reached while decoding always is, because it may turn
        out to be the last one of the answer.
        """
        if position >= self.final:
            return True
        index = bisect_right(self.stops, position)
        return index > 0 and self.stops[index - 1] == position

    def took(self, position: int) -> None:
        """Account for a stored snapshot; the answer's earlier, closer-than-interval ones become superseded."""
        if position <= self.final:
            self.anchor = max(self.anchor, position)
            return
        if self.tail is not None:
            if self.interval is not None and self.tail - self.anchor >= self.interval:
                self.anchor = self.tail
            else:
                self.superseded.append(self.tail)
        self.tail = position


class CapturePlanner:
    """The plans of all live requests of one scheduler: arms the next stop, filters what is stored.

    Args:
        block_size: Recurrent block size in tokens.
        choose_interval: Called once per planned request.
        drops_last_block: vLLM drafts EAGLE-style and resumes one block earlier (see ``last_boundary``).
    """

    def __init__(self, block_size: int, choose_interval: IntervalChooser, drops_last_block: bool = False) -> None:
        self._block_size = block_size
        self._drops_last_block = drops_last_block
        self._choose_interval = choose_interval
        self._plans: dict[str, CapturePlan] = {}
        self._arming: dict[str, CapturePlan] = {}
        self.stops_planned = 0
        self.stops_overrun = 0
        """Armed stops that a step ran past: the running vLLM does not honour the hint."""

    def plan(self, request: SchedulerRequest, matched: int) -> CapturePlan:
        """Plan (or plan again, after a preemption or a failed load) and arm the first stop.

        Args:
            request: vLLM's request, with vLLM's own junction still in ``shared_prefix_boundary``.
            matched: Tokens the request will resume after, local and external cache together.

        Complexity:
            O(number of stops), independent of the prompt otherwise.
        """
        final = last_boundary(request.num_prompt_tokens, self._block_size, self._drops_last_block)
        interval = self._choose_interval(max(final - matched, 0))
        stops = plan_stops(matched, final, interval, self._block_size, request.shared_prefix_boundary)
        if matched < final < last_boundary(request.num_tokens, self._block_size, self._drops_last_block):
            # Preempted while decoding: vLLM prefills the answer with the prompt and stops only at the answer's end.
            stops += (final,)
        plan = CapturePlan(
            request=request,
            stops=stops,
            final=final,
            interval=interval,
            anchor=matched // self._block_size * self._block_size,
        )
        before = self._plans.get(request.request_id)
        if before is not None and before.tail is not None and before.tail <= matched:
            plan.anchor, plan.tail = before.anchor, before.tail
        self._plans[request.request_id] = plan
        self.stops_planned += len(plan.stops)
        if plan.arm(matched):
            self._arming[request.request_id] = plan
        else:
            self._arming.pop(request.request_id, None)
        return plan

    def on_step(self, scheduled: Mapping[str, int]) -> None:
        """Move every prefilling request's stop on, once a step has been scheduled.

        Args:
            scheduled: Request id -> tokens scheduled in this step (``SchedulerOutput.num_scheduled_tokens``).

        Complexity:
            O(requests that still have a stop ahead); decoding requests cost nothing.
        """
        done = []
        for request_id, plan in self._arming.items():
            tokens = scheduled.get(request_id)
            if tokens is None:
                continue
            start = plan.request.num_computed_tokens
            end = start + tokens
            if start < plan.request.shared_prefix_boundary < end:
                self.stops_overrun += 1
            if not plan.arm(end):
                done.append(request_id)
        for request_id in done:
            del self._arming[request_id]

    def largest_chunk(self, scheduled: Mapping[str, int]) -> tuple[int, int] | None:
        """Positions [start, end) of the request that has most of a step's tokens, before `on_step`. O(requests)."""
        request_id = max(scheduled, key=scheduled.__getitem__, default="")
        plan = self._plans.get(request_id)
        if plan is None:
            return None
        start = plan.request.num_computed_tokens
        return start, start + scheduled[request_id]

    def get(self, request_id: str) -> CapturePlan | None:
        """The plan of a live request, or None (for example when the request was never looked up)."""
        return self._plans.get(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop finished requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._plans.pop(request_id, None)
            self._arming.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._plans)
