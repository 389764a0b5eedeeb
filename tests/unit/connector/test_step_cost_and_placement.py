"""What a step costs, learned from a synthetic engine, and how placement asks for the server's facts."""

from __future__ import annotations

import random

import pytest

from lmcache_histate.connector import placement as placement_module
from lmcache_histate.connector.placement import ANSWER_SECONDS, ASK_SECONDS, Placement
from lmcache_histate.connector.step_cost import StepCost
from lmcache_histate.protocol import PlacementFacts, PrefillTime


def feed(cost: StepCost, sizes: list[int], fixed: float, per_token: float, noise: float = 0.0, ahead: int = 0) -> None:
    """Run an engine whose steps take `fixed + per_token * tokens` seconds, scheduled `ahead` steps before they start."""
    generator = random.Random(7)
    now, done = 100.0, []
    for index, tokens in enumerate(sizes):
        if index > ahead:
            now = max(now, done[index - ahead - 1])
        cost.on_step(now, tokens)
        start = max(now, done[-1]) if done else now
        done.append(start + (fixed + per_token * tokens) * (1 + generator.uniform(-noise, noise)))


def sizes(count: int, seed: int = 3) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice([64, 200, 700, 2048, 8192]) for _ in range(count)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(("fixed", "per_token"), [(0.010, 0.0001), (0.002, 0.00002), (0.030, 0.001)])
def test_recovers_the_fixed_cost_of_an_engine(fixed: float, per_token: float, ahead: int) -> None:
    cost = StepCost(steps_ahead=ahead)
    feed(cost, sizes(400), fixed, per_token, ahead=ahead)
    assert cost.tokens == pytest.approx(fixed / per_token, rel=1e-6)


@pytest.mark.parametrize("ahead", [0, 1])
def test_noise_blurs_it_without_moving_it_far(ahead: int) -> None:
    cost = StepCost(forget=0.995, steps_ahead=ahead)
    feed(cost, sizes(2000), 0.050, 0.0001, noise=0.05, ahead=ahead)
    assert cost.tokens == pytest.approx(500, rel=0.25)


def test_follows_an_engine_that_becomes_slower() -> None:
    cost = StepCost()
    now = 0.0
    for fixed in (0.010, 0.040):
        for tokens in sizes(600):
            cost.on_step(now, tokens)
            now += fixed + 0.0001 * tokens
    assert cost.tokens == pytest.approx(400, rel=0.05)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_time_of_a_prefill_is_told_once(ahead: int) -> None:
    cost = StepCost(steps_ahead=ahead)
    assert cost.take_prefill() is None
    steps = [(2048, (0, 2000)), (2048, (2000, 4000)), (1000, (4000, 4500)), (1000, None)]
    now = 0.0
    for index, (tokens, chunk) in enumerate([*steps, *[(1, None)] * (ahead + 1)]):
        cost.on_step(now, tokens, chunk)
        now += 0.5 if index >= ahead else 0.001
    # The third step was half somebody else's.
    assert cost.take_prefill() == PrefillTime(2000, 4000, pytest.approx(500 * 2000 / 2048))
    assert cost.take_prefill() is None


def test_what_prefill_costs_goes_to_the_server_with_the_next_question(clock: Clock) -> None:
    source = Source()
    placement = adaptive(source)
    placement.on_request()
    for start in (0, 2048):
        placement.on_step(2048, (start, start + 2048))
        clock.now += 0.25
    clock.now += ASK_SECONDS
    source.answer = PlacementFacts()
    placement.on_request()
    assert source.told == [None, PrefillTime(0, 2048, pytest.approx(250.0))]


def test_idle_gaps_and_stalls_are_no_steps() -> None:
    busy, interrupted = StepCost(), StepCost()
    feed(busy, sizes(400), 0.010, 0.0001)
    now = 0.0
    for index, tokens in enumerate(sizes(400)):
        interrupted.on_step(now, tokens)
        now += 0.010 + 0.0001 * tokens
        if index % 10 == 0:
            interrupted.on_step(now, 0)  # vLLM's last, empty step before it goes idle
            now += 3.0
        if index % 37 == 0:
            now += 60.0
    assert interrupted.tokens == pytest.approx(busy.tokens, rel=0.02)


def test_answers_the_default_until_steps_of_different_sizes_were_seen() -> None:
    cost = StepCost(default_tokens=32.0)
    assert cost.tokens == 32.0
    feed(cost, [8] * 500, 0.010, 0.0001)
    assert cost.tokens == 32.0


@pytest.mark.parametrize("seed", range(20))
def test_is_never_negative(seed: int) -> None:
    generator = random.Random(seed)
    cost, now = StepCost(), 0.0
    for _ in range(100):
        cost.on_step(now, generator.randint(0, 9000))
        now += generator.choice([0.0, 1e-6, generator.random(), 10.0])
        assert 0.0 <= cost.tokens < float("inf")


class Source:
    """A server whose answers the test gives; a second question while one is open is a mistake."""

    def __init__(self) -> None:
        self.asked = self.given_up = 0
        self.told: list[PrefillTime | None] = []
        self.open = False
        self.answer: PlacementFacts | None = None

    def poll_placement(self) -> PlacementFacts | None:
        answer, self.answer = self.answer, None
        self.open = self.open and answer is None
        return answer

    def ask_placement(self, prefill: PrefillTime | None) -> bool:
        if self.open:
            return False
        self.told.append(prefill)
        self.open = True
        self.asked += 1
        return True

    def forget_placement(self) -> None:
        self.given_up += self.open
        self.open = False


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(placement_module, "time", fake)
    return fake


def adaptive(source: Source) -> Placement:
    return Placement("adaptive", 64, 2048, source, PlacementFacts(snapshot_tokens=192.0))


def test_asks_at_most_once_a_second(clock: Clock) -> None:
    source = Source()
    placement = adaptive(source)
    for _ in range(100):
        placement.on_request()
        source.answer = PlacementFacts(snapshot_tokens=100.0)
        clock.now += ASK_SECONDS / 20
    assert source.asked == 5


def test_keeps_the_last_facts_while_there_is_no_answer(clock: Clock) -> None:
    source = Source()
    placement = adaptive(source)
    assert placement.facts.snapshot_tokens == 192.0
    placement.on_request()
    source.answer = PlacementFacts(residence_ratio=4.0, snapshot_tokens=100.0)
    placement.on_request()
    for _ in range(50):
        clock.now += 1.5
        placement.on_request()
    assert placement.facts == PlacementFacts(residence_ratio=4.0, snapshot_tokens=100.0)


def test_a_lost_question_is_given_up_under_steady_traffic(clock: Clock) -> None:
    source = Source()
    placement = adaptive(source)
    for _ in range(int(2.5 * ANSWER_SECONDS / 0.5)):
        placement.on_request()
        clock.now += 0.5
    assert source.given_up == 2
    assert source.asked == 3


@pytest.mark.parametrize("setting", ["final-only", 640])
def test_a_fixed_interval_does_not_follow_the_server(clock: Clock, setting: str | int) -> None:
    source = Source()
    placement = Placement(setting, 64, 2048, source)
    source.answer = PlacementFacts(residence_ratio=4.0, snapshot_tokens=100.0)
    placement.on_request()
    assert placement.interval(100_000) == (640 if setting == 640 else None)


def test_unknown_snapshot_size_means_no_stops(clock: Clock) -> None:
    assert Placement("adaptive", 64, 2048, Source()).interval(100_000) is None


def test_the_adaptive_interval_is_a_block_multiple_that_follows_pressure_and_the_price_of_a_step(clock: Clock) -> None:
    placement = adaptive(Source())

    def interval(**facts: float) -> int:
        placement.facts = PlacementFacts(**{"snapshot_tokens": 192.0, "internal_hits_per_token": 1 / 64_000} | facts)
        found = placement.interval(64_000)
        assert found is not None
        assert found % 64 == 0
        return found

    relaxed = interval()
    assert interval(residence_ratio=8.0) > relaxed
    assert interval(internal_hits_per_token=1 / 1_000_000) > relaxed
    assert interval(internal_hits_per_token=1 / 6_400) < relaxed
    dense = interval(internal_hits_per_token=1 / 6_400)
    assert dense < 2048
    for index, tokens in enumerate(sizes(400)):
        clock.now += 0.1 + 0.0001 * ([*sizes(400)][index - 1] if index else 0)
        placement.on_step(tokens)
    assert placement.step_cost.tokens == pytest.approx(1000, rel=0.05)
    assert interval(internal_hits_per_token=1 / 6_400) == 2048, "a stop where a step ends anyway is free"


def test_a_segment_shorter_than_its_best_interval_gets_its_end_only(clock: Clock) -> None:
    placement = adaptive(Source())
    assert placement.interval(0) is None
    assert placement.interval(64) is None
    assert placement.interval(300) is None
