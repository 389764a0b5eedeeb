"""Where snapshots are planned and which are kept, against a plain model of vLLM's split rule."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_model import prefill, prompt_end, step_end

from lmcache_histate.connector.capture_plan import CapturePlan, CapturePlanner, last_boundary, plan_stops

always_the_same = settings(derandomize=True, deadline=None, max_examples=100)


@dataclass
class FakeRequest:
    """What placement sees of vLLM's request."""

    request_id: str = "r"
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = max(self.num_tokens, self.num_prompt_tokens)


@dataclass
class Case:
    """One prompt to prefill."""

    block: int
    prompt: int
    matched: int
    interval: int | None
    junction: int
    drops_last_block: bool

    @property
    def final(self) -> int:
        return prompt_end(self.prompt, self.block, self.drops_last_block)

    @property
    def rounded(self) -> int:
        """The interval in whole blocks."""
        assert self.interval is not None
        return -(-self.interval // self.block) * self.block

    def request(self, request_id: str = "r") -> FakeRequest:
        return FakeRequest(request_id, self.prompt, shared_prefix_boundary=self.junction)

    def planner(self) -> CapturePlanner:
        return CapturePlanner(self.block, lambda _: self.interval, self.drops_last_block)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block = draw(st.sampled_from([16, 64, 528, 1056]))
    prompt = draw(st.integers(1, 40 * block))
    drops = draw(st.booleans())
    matched = draw(st.integers(0, max(prompt - 1, 0)))
    if draw(st.booleans()):
        matched -= matched % block
    interval = draw(st.none() | st.integers(1, 12 * block) | st.integers(1, 8).map(lambda blocks: blocks * block))
    junction = draw(st.just(0) | st.integers(0, prompt) | st.integers(0, prompt // block).map(lambda k: k * block))
    return Case(block, prompt, matched, interval, junction, drops)


def budgets(case: Case, draw: st.DrawFn) -> list[int]:
    """Step budgets, some of them too small for a block because other requests took the rest."""
    return draw(st.lists(st.integers(case.block, 8 * case.block) | st.integers(0, case.block), min_size=1, max_size=8))


def cycle_with_progress(case: Case, sizes: list[int]):
    """A budget for every step: `sizes` over and over, with a whole block now and then so that a prefill ends."""
    step = 0

    def budget() -> int:
        nonlocal step
        step += 1
        return sizes[step % len(sizes)] if step % 3 else 4 * case.block

    return budget


@always_the_same
@given(cases())
def test_stops_are_block_boundaries_strictly_inside_the_segment(case: Case) -> None:
    stops = plan_stops(case.matched, case.final, case.interval, case.block, case.junction)
    assert list(stops) == sorted(set(stops))
    assert all(stop % case.block == 0 and case.matched < stop < case.final for stop in stops)


@always_the_same
@given(cases())
def test_no_position_of_the_segment_is_further_than_an_interval_behind_a_snapshot(case: Case) -> None:
    if case.interval is None:
        return
    stops = plan_stops(case.matched, case.final, case.interval, case.block)
    restart = case.matched - case.matched % case.block
    if case.final <= restart:
        return
    snapshots = [restart, *stops, case.final]
    gaps = [later - earlier for earlier, later in pairwise(snapshots)]
    assert max(gaps) <= case.rounded
    # Only the last gap may be a short one: the grid hangs on what was matched, so it lines up with earlier turns.
    assert all(gap == case.rounded for gap in gaps[:-1])


@always_the_same
@given(cases())
def test_a_junction_inside_the_segment_becomes_a_stop_and_moves_no_other(case: Case) -> None:
    without = set(plan_stops(case.matched, case.final, case.interval, case.block))
    merged = set(plan_stops(case.matched, case.final, case.interval, case.block, case.junction))
    floored = case.junction - case.junction % case.block
    assert merged == without | ({floored} if case.matched < floored < case.final else set())


@pytest.mark.parametrize("drops_last_block", [False, True])
@pytest.mark.parametrize("block", [64, 528, 1056])
def test_last_boundary_is_what_vllm_computes(block: int, drops_last_block: bool) -> None:
    from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

    for tokens in [*range(3 * block + 3), 40 * block - 1, 40 * block, 40 * block + 1]:
        expected = get_mamba_prefill_checkpoint_position(tokens, block, drops_last_block)
        assert last_boundary(tokens, block, drops_last_block) == expected
        assert prompt_end(tokens, block, drops_last_block) == expected


def drive(case: Case, planner: CapturePlanner, request: FakeRequest, budget) -> list[int]:
    """Prefill `request` step by step as vLLM would, moving the stop on after every step; returns the step ends."""
    ends: list[int] = []
    position = request.num_computed_tokens = case.matched
    while position < case.prompt:
        armed = request.shared_prefix_boundary
        assert armed == 0 or position < armed < case.final, "armed behind the request or past the prompt"
        end = step_end(position, case.prompt, budget(), case.block, armed, case.drops_last_block)
        if end == position:
            continue
        planner.on_step({request.request_id: end - position, "somebody else": 7})
        ends.append(end)
        position = request.num_computed_tokens = end
    return ends


@always_the_same
@given(st.data())
def test_arming_one_stop_at_a_time_ends_steps_as_if_all_were_armed(data: st.DataObject) -> None:
    case = data.draw(cases())
    sizes = data.draw(st.composite(lambda draw: budgets(case, draw))())
    request, planner = case.request(), case.planner()
    plan = planner.plan(request, case.matched)
    ends = drive(case, planner, request, cycle_with_progress(case, sizes))
    assert set(plan.stops) <= set(ends)
    assert not case.final > case.matched or case.final in ends
    assert planner.stops_overrun == 0
    assert request.shared_prefix_boundary == 0
    all_armed = prefill(
        case.matched,
        case.prompt,
        case.block,
        cycle_with_progress(case, sizes),
        lambda start: min((stop for stop in plan.stops if stop > start), default=0),
        case.drops_last_block,
    )
    assert ends == all_armed


@always_the_same
@given(cases())
def test_with_unlimited_budget_steps_end_nowhere_but_at_planned_positions(case: Case) -> None:
    request, planner = case.request(), case.planner()
    plan = planner.plan(request, case.matched)
    ends = drive(case, planner, request, lambda: case.prompt)
    boundary = {(case.matched // case.block + 1) * case.block} if case.matched % case.block else set()
    assert set(ends) - boundary <= {*plan.stops, case.final, case.prompt}


@always_the_same
@given(cases())
def test_inside_the_prompt_only_planned_snapshots_and_its_end_are_kept(case: Case) -> None:
    plan = case.planner().plan(case.request(), case.matched)
    for position in range(case.block, case.final, case.block):
        assert plan.keeps(position) == (position in plan.stops)
    assert plan.keeps(case.final)
    assert plan.keeps(case.final + case.block)


@always_the_same
@given(cases(), st.floats(0, 1))
def test_planning_again_after_a_preemption_starts_from_the_new_match(case: Case, share: float) -> None:
    request, planner = case.request(), case.planner()
    planner.plan(request, case.matched)
    matched = int(case.prompt * share) // case.block * case.block
    case.matched = min(matched, case.final)
    request.shared_prefix_boundary = case.junction  # vLLM assigns it anew before every lookup
    plan = planner.plan(request, case.matched)
    assert len(planner) == 1
    assert plan is planner.get("r")
    ends = drive(case, planner, request, lambda: 3 * case.block)
    assert set(plan.stops) <= set(ends)


def test_a_failed_load_leaves_stops_over_the_part_that_must_be_computed_after_all() -> None:
    request, planner = FakeRequest("r", 1000), CapturePlanner(64, lambda _: 128)
    assert planner.plan(request, 896).stops == ()
    assert request.shared_prefix_boundary == 0
    plan = planner.plan(request, 0)
    assert plan.stops == tuple(range(128, 960, 128))
    assert request.shared_prefix_boundary == 128


def test_a_match_that_covers_everything_arms_nothing() -> None:
    request, planner = FakeRequest("r", 1000, shared_prefix_boundary=512), CapturePlanner(64, lambda _: 64)
    plan = planner.plan(request, 960)
    assert plan.stops == ()
    assert request.shared_prefix_boundary == 0


def test_the_interval_is_chosen_for_what_is_left_of_the_prompt() -> None:
    asked: list[int] = []

    def choose(length: int) -> int | None:
        asked.append(length)
        return None

    planner = CapturePlanner(64, choose)
    planner.plan(FakeRequest("a", 1000), 320)
    planner.plan(FakeRequest("b", 100), 640)
    assert asked == [960 - 320, 0]


def test_a_resumed_request_stops_at_its_prompt_end_because_vllm_no_longer_does() -> None:
    """Preempted while decoding: the answer is prefilled with the prompt, and vLLM stops only where the answer ends."""
    request, planner = FakeRequest("r", 1000, num_tokens=1200), CapturePlanner(64, lambda _: None)
    plan = planner.plan(request, 0)
    assert plan.final == 960
    assert request.shared_prefix_boundary == 960
    planner.on_step({"r": 960})
    assert request.shared_prefix_boundary == 0
    # While it is vLLM's own stop, arming it would be pointless.
    assert planner.plan(FakeRequest("s", 1000, num_tokens=1010), 0).stops == ()


@always_the_same
@given(
    block=st.sampled_from([16, 64, 528]),
    blocks=st.integers(0, 6),
    interval=st.none() | st.integers(1, 4000),
    answer=st.integers(0, 40),
    preempted_after=st.integers(0, 40),
)
def test_of_an_answer_the_newest_boundary_stays_and_kept_ones_lie_an_interval_apart(
    block: int, blocks: int, interval: int | None, answer: int, preempted_after: int
) -> None:
    request = FakeRequest("r", blocks * block + 1)
    planner = CapturePlanner(block, lambda _: interval)
    plan = planner.plan(request, 0)
    plan.took(plan.final)
    taken, dropped = [], []
    for index in range(answer):
        position = plan.final + (index + 1) * block
        assert plan.keeps(position)
        plan.took(position)
        taken.append(position)
        dropped += plan.superseded
        plan.superseded = []
        assert position not in dropped, "the newest boundary was given up"
        if index == preempted_after:
            request.num_tokens = position + 1
            plan = planner.plan(request, position)
    assert len(dropped) == len(set(dropped))
    assert set(dropped) <= set(taken)
    kept = [plan.final, *(position for position in taken if position not in dropped)]
    gaps = [later - earlier for earlier, later in pairwise(kept[:-1])]
    if interval is None:
        assert len(kept) <= 2
    else:
        assert all(interval <= gap < interval + block for gap in gaps)


def test_one_step_over_several_boundaries_reports_each_superseded_one_once() -> None:
    plan = CapturePlan(FakeRequest("r", 65), stops=(), final=64, interval=256, anchor=64)
    for position in (128, 192, 256):
        plan.took(position)
    assert plan.superseded == [128, 192]
    assert plan.tail == 256


def test_decoding_and_waiting_requests_are_not_touched() -> None:
    planner = CapturePlanner(64, lambda _: 128)
    prefilling, decoding, waiting = FakeRequest("p", 1000), FakeRequest("d", 1000), FakeRequest("w", 1000)
    planner.plan(prefilling, 0)
    planner.plan(waiting, 0)
    planner.plan(decoding, 960)
    decoding.num_computed_tokens = 1000
    decoding.shared_prefix_boundary = -1  # would be overwritten by any touch
    planner.on_step({"p": 128, "d": 1, "unknown": 5})
    assert prefilling.shared_prefix_boundary == 256
    assert waiting.shared_prefix_boundary == 128
    assert decoding.shared_prefix_boundary == -1


def test_a_step_that_runs_past_the_stop_is_counted_and_the_next_stop_armed() -> None:
    request, planner = FakeRequest("r", 1000), CapturePlanner(64, lambda _: 128)
    planner.plan(request, 0)
    planner.on_step({"r": 300})
    assert planner.stops_overrun == 1
    assert request.shared_prefix_boundary == 384


def test_finished_requests_are_forgotten_and_unknown_ones_ignored() -> None:
    planner = CapturePlanner(64, lambda _: 128)
    request = FakeRequest("r", 1000)
    planner.plan(request, 0)
    planner.forget(["r", "never seen"])
    assert len(planner) == 0
    assert planner.get("r") is None
    planner.on_step({"r": 128})
    assert request.shared_prefix_boundary == 128
