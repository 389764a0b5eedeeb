"""HiState's connector inside vLLM's real `Scheduler` and `AsyncScheduler`, with a modelled worker and server.

`Engine.run` checks on every step that the worker reads the right bytes, on every copy that the server stores the right
ones, that every answer is what a run without a cache gives, that no request starves and that no block leaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_model import STOCK, Engine, Server, Step, tokens

from lmcache_histate.protocol import PlacementFacts

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
SIZES = pytest.mark.parametrize(("block", "budget"), [(b, t) for b in (64, 528, 1056) for t in (2048, 8192)])

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model configuration lies."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> MakeEngine:
    """Builds engines; `interval` is the setting ``histate.interval``."""

    def make(interval: int | str = "final-only", **options: Any) -> Engine:
        monkeypatch.setenv("HISTATE_INTERVAL", str(interval))
        return Engine(monkeypatch, folder, **options)

    return make


def last_boundary(count: int, block: int) -> int:
    return (count - 1) // block * block


def check_prefill(made: Engine, request_id: str) -> None:
    """Every stop of the request's last plan ended a step, no step ran past an armed one, and the state was there."""
    request, steps = made.requests[request_id], made.prefill_steps(request_id)
    ends = {step.end: step for step in steps}
    final = last_boundary(request.num_prompt_tokens, made.block)
    for step in steps:
        assert not step.start < step.armed < step.end, "a step ran past an armed stop"
        assert step.armed == 0 or step.armed < request.num_prompt_tokens
        assert step.end % made.block == 0 or step.end >= request.num_prompt_tokens
    for stop in made.planned[request_id][-1]:
        assert stop in ends
        assert ends[stop].state_block, "nothing to store"
        assert stop in made.snapshots(request_id)
    if steps[0].start < final:
        assert final in ends
        assert final in made.snapshots(request_id)


@BOTH
@SIZES
def test_steps_end_at_every_planned_stop_and_only_planned_snapshots_are_stored(
    engine: MakeEngine, block: int, budget: int, asynchronous: bool
) -> None:
    made = engine(interval=3 * block, block=block, budget=budget, asynchronous=asynchronous)
    for index, blocks in enumerate((11, 7, 3)):
        made.submit(f"r{index}", tokens(index, blocks * block + 17 * index + 1), answer=3)
    made.run()
    for request_id, request in made.requests.items():
        check_prefill(made, request_id)
        final = last_boundary(request.num_prompt_tokens, block)
        assert made.planned[request_id][-1] == tuple(range(3 * block, final, 3 * block))
        assert made.snapshots(request_id) == sorted({*made.planned[request_id][-1], final})
    assert made.connector._planner.stops_overrun == 0
    assert len(made.connector._planner) == 0


@BOTH
@pytest.mark.parametrize(("block", "answer"), [(64, 331), (528, 1100)])
def test_the_next_turn_resumes_after_the_answer(
    engine: MakeEngine, block: int, answer: int, asynchronous: bool
) -> None:
    first = engine(interval=2 * block, block=block, asynchronous=asynchronous)
    prompt = tokens(1, 5 * block + 9)
    turn = first.submit("turn", prompt, answer)
    first.run()
    # The answer's last token is returned, never computed.
    end = last_boundary(len(turn), block)
    held = first.snapshots("turn")
    assert end in held
    answered = [position for position in held if position > last_boundary(len(prompt), block)]
    gaps = [later - earlier for earlier, later in pairwise(answered[:-1])]
    assert all(gap >= 2 * block for gap in gaps), "snapshots inside the answer that a later one replaced"
    # A restarted engine has only the server to go by.
    restarted = engine(interval=2 * block, block=block, asynchronous=asynchronous, server=first.server)
    restarted.submit("next", turn + tokens(2, 3 * block), answer=2)
    restarted.run()
    assert restarted.steps["next"][0].start == end
    check_prefill(restarted, "next")


@BOTH
def test_a_rewind_resumes_at_the_nearest_stop_before_it(engine: MakeEngine, asynchronous: bool) -> None:
    first = engine(interval=192, asynchronous=asynchronous)
    turn = first.submit("turn", tokens(1, 2000), answer=5)
    first.run()
    held = first.snapshots("turn")
    for cut in (100, 191, 192, 193, 700, 1151, 1152, 1990):
        other = engine(interval=192, asynchronous=asynchronous, server=first.server)
        other.submit("rewind", turn[:cut] + tokens(cut, 150), answer=2)
        other.run()
        assert other.steps["rewind"][0].start == max((position for position in held if position <= cut), default=0)


@BOTH
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("deaf", [False, True], ids=["server", "no server"])
def test_preempted_requests_are_planned_again_and_finish(
    engine: MakeEngine, asynchronous: bool, policy: str, deaf: bool
) -> None:
    made = engine(interval=128, num_blocks=40, budget=512, asynchronous=asynchronous, policy=policy)
    made.server.deaf = deaf
    for index in range(4):
        made.submit(f"r{index}", tokens(index, 420 + 64 * index), answer=400, priority=4 - index)
    made.run()
    preempted = [name for name, request in made.requests.items() if request.num_preemptions]
    assert preempted
    for name in preempted:
        assert len(made.planned[name]) > 1
    assert made.connector._planner.stops_overrun == 0
    for name, request in made.requests.items():
        final = last_boundary(request.num_prompt_tokens, 64)
        if not deaf:
            assert {*made.planned[name][0], final} <= set(made.snapshots(name))
        for step in made.steps[name]:
            assert not step.start < step.armed < step.end


@BOTH
def test_a_request_preempted_while_decoding_leaves_its_prompt_end_again(engine: MakeEngine, asynchronous: bool) -> None:
    """Everything was lost: the prompt's end is no stop of vLLM's any more, because the answer follows it."""
    made = engine(asynchronous=asynchronous)
    made.server.deaf = True
    made.submit("r", tokens(1, 500), answer=300)
    while made.requests["r"].num_tokens < 600:
        made.step()
    made.server.deaf = False
    before = made.count
    made.preempt_and_lose_everything()
    made.run()
    assert made.requests["r"].num_preemptions == 1
    assert [step.end for step in made.steps["r"] if step.index > before][:2] == [448, 576]
    assert 448 in made.snapshots("r")


@BOTH
def test_two_requests_that_share_a_prefix_in_one_step(engine: MakeEngine, asynchronous: bool) -> None:
    made = engine(interval=256, asynchronous=asynchronous)
    shared = tokens(1, 1000)
    made.submit("a", shared + tokens(2, 600), answer=80)
    made.submit("b", shared + tokens(3, 900), answer=80)
    made.submit("c", tokens(4, 300), answer=80)
    made.run()
    for name in made.requests:
        check_prefill(made, name)
    assert made.steps["b"][0].start > 0, "the second one did not use what the first computed"


@BOTH
def test_vllms_own_junction_is_kept_beside_our_stops(engine: MakeEngine, asynchronous: bool) -> None:
    made = engine(interval=512, asynchronous=asynchronous)
    made.server.deaf = True
    prompt = tokens(1, 1500)
    made.submit("a", prompt, answer=2)
    made.run()
    # Hits at 512, but the KV of 768 tokens is there: vLLM wants a state where the two prompts part.
    made.submit("b", prompt[:800] + tokens(2, 1500), answer=2)
    made.run()
    assert made.steps["b"][0].start == 512
    assert 768 in made.planned["b"][-1]
    assert set(made.planned["b"][-1]) <= {step.end for step in made.prefill_steps("b")}
    made.submit("c", prompt[:800] + tokens(3, 500), answer=2)
    made.run()
    assert made.steps["c"][0].start == 768


@BOTH
def test_slow_lookups_and_failed_loads_delay_nothing_for_ever(engine: MakeEngine, asynchronous: bool) -> None:
    first = engine(interval=128, asynchronous=asynchronous)
    turn = first.submit("turn", tokens(1, 1500), answer=2)
    first.run()
    other = engine(interval=128, asynchronous=asynchronous, server=first.server)
    first.server.lookup_delay = 3
    other.worker.fail_loads = True
    other.submit("fails", turn[:1400] + tokens(2, 700), answer=2)
    other.submit("misses", tokens(3, 700), answer=2)
    other.run()
    # Planned for the hit, then for the whole prompt once the load had failed.
    assert other.planned["fails"][0][0] > 1300
    assert other.planned["fails"][-1][0] == 128
    assert other.steps["fails"][0].start == 0
    check_prefill(other, "fails")
    other.worker.fail_loads = False
    restarted = engine(interval=128, asynchronous=asynchronous, server=first.server)
    restarted.submit("works", turn[:1400] + tokens(4, 300), answer=2)
    restarted.run()
    assert restarted.steps["works"][0].start == 1280


def shape(steps: list[Step]) -> list[tuple[int, int, int]]:
    return [(step.index, step.start, step.end) for step in steps]


@BOTH
@SIZES
def test_switched_off_it_schedules_as_stock_lmcache_does(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, block: int, budget: int, asynchronous: bool
) -> None:
    seen = []
    for connector, enabled, interval in (
        (STOCK, "true", "final-only"),
        ("HiStateConnector", "false", 2 * block),
        ("HiStateConnector", "true", "final-only"),
    ):
        monkeypatch.setenv("HISTATE_ENABLED", enabled)
        made = engine(
            interval=interval, block=block, budget=budget, asynchronous=asynchronous, connector=connector, num_blocks=60
        )
        for index in range(3):
            made.submit(f"r{index}", tokens(index, 9 * block + 5 * index), answer=5)
        made.run()
        seen.append({name: shape(steps) for name, steps in made.steps.items()})
        assert (getattr(made.connector, "_planner", None) is not None) == (connector != STOCK and enabled == "true")
    assert seen[0] == seen[1]
    assert seen[0] == seen[2]


@BOTH
def test_without_a_connector_the_model_itself_holds(engine: MakeEngine, asynchronous: bool) -> None:
    made = engine(connector=None, num_blocks=40, budget=512, asynchronous=asynchronous)
    for index in range(4):
        made.submit(f"r{index}", tokens(index, 500), answer=300)
    made.run()
    assert any(request.num_preemptions for request in made.requests.values())


@BOTH
def test_the_adaptive_interval_places_stops_that_are_honoured(engine: MakeEngine, asynchronous: bool) -> None:
    server = Server(64, facts=PlacementFacts(residence_ratio=1.0, snapshot_tokens=20.0))
    made = engine(interval="adaptive", asynchronous=asynchronous, server=server)
    made.submit("first", tokens(0, 100), answer=1)
    made.run()
    made.submit("second", tokens(1, 4000), answer=2)
    made.run()
    check_prefill(made, "second")
    assert made.planned["second"][-1]


def test_the_fence_is_what_keeps_a_late_copy_right(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a copy that is two steps late stores another request's bytes: the model must see that."""
    made = engine(interval=64, num_blocks=24, budget=512)
    monkeypatch.setattr(made.worker.fence, "before_forward", lambda: None)
    for index in range(3):
        made.submit(f"r{index}", tokens(index, 600), answer=5)
    with pytest.raises(AssertionError, match="wrong bytes"):
        made.run()


def test_running_past_a_stop_is_noticed_and_reported(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(interval=128)
    split = type(made.scheduler)._mamba_block_aligned_split

    def deaf_split(self: Any, request: Any, *arguments: Any) -> int:
        stop, request.shared_prefix_boundary = request.shared_prefix_boundary, 0
        try:
            return split(self, request, *arguments)
        finally:
            request.shared_prefix_boundary = stop

    monkeypatch.setattr(type(made.scheduler), "_mamba_block_aligned_split", deaf_split)
    errors: list[str] = []
    monkeypatch.setattr(
        "lmcache_histate.connector.histate_connector.logger.error", lambda text, *_: errors.append(text)
    )
    made.submit("r", tokens(1, 1000), answer=80)
    made.run()
    assert made.connector._planner.stops_overrun > 0
    assert len(errors) == 1
    assert "does not honour" in errors[0]


def mixed_load(made: Engine, seed: int) -> None:
    """Sessions that append, rewind and fork, arriving while others run; some are aborted; some loads fail."""
    generator = random.Random(seed)
    longest = int((made.config.cache_config.num_gpu_blocks - 8) * made.block * 0.9)
    history: list[list[int]] = []
    for index in range(generator.randint(3, 8)):
        base: list[int] = []
        if history and generator.random() < 0.7:
            base = generator.choice(history)
            base = base[: generator.randint(1, len(base))]
        prompt = base + tokens(100 * seed + index, generator.randint(1, 12 * made.block))
        prompt = prompt[: int(longest * 0.8)]
        answer = generator.choice([1, 3, made.block // 2, made.block + 3] + [5 * made.block] * (made.block == 64))
        if len(prompt) + answer > longest:
            continue
        history.append(made.submit(f"r{index}", prompt, answer, priority=generator.randint(0, 3)))
        for _ in range(generator.choice([0, 0, 1, 5, 30])):
            # A failed load of a preempted request that fills most of the pool can block vLLM's admission for good.
            preempted = any(request.num_preemptions for request in made.requests.values())
            made.worker.fail_loads = not preempted and generator.random() < 0.1
            if made.scheduler.has_requests():
                made.step()
    made.worker.fail_loads = False
    made.run()


@pytest.mark.parametrize("seed", range(24))
def test_mixed_load(engine: MakeEngine, seed: int) -> None:
    generator = random.Random(1000 + seed)
    block = generator.choice([64, 64, 64, 528])
    made = engine(
        interval=generator.choice([block, 2 * block, 5 * block, block + 7, "final-only", "adaptive"]),
        block=block,
        budget=generator.choice([2048, 8192] if block > 64 else [256, 512, 2048]),
        num_blocks=generator.choice([24, 32, 48, 90]),
        asynchronous=seed % 2 == 1,
        policy=generator.choice(["fcfs", "priority"]),
        max_num_seqs=generator.choice([2, 4, 64]),
        server=Server(block, lookup_delay=generator.choice([0, 0, 1, 3]), facts=PlacementFacts(1.0, 3.0 * block, 0.3)),
    )
    mixed_load(made, seed)
    assert made.connector._planner.stops_overrun == 0
    assert len(made.connector._planner) == 0
