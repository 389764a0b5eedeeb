from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_histate.replay.workload import (
    FIRST_TOKEN,
    LAST_TOKEN,
    MINIATURE,
    Kind,
    Transcripts,
    WorkloadSpec,
    make_script,
    ready_steps,
)

specs = st.builds(
    WorkloadSpec,
    seed=st.integers(0, 1000),
    sessions=st.integers(1, 5),
    turns=st.integers(1, 8),
    system_tokens=st.integers(1, 40),
    first_tokens=st.just((3, 50)),
    turn_tokens=st.just((1, 20)),
    answer_tokens=st.integers(1, 9),
    rewind_share=st.floats(0, 1),
    forks=st.integers(0, 4),
    fork_turns=st.integers(1, 4),
    resets=st.integers(0, 3),
)


def play(script, answer=lambda step: [7] * step.answer_tokens):
    transcripts = Transcripts()
    prompts = []
    for step in script:
        prompt = transcripts.prompt(step)
        transcripts.answered(step, prompt, answer(step))
        prompts.append(prompt)
    return prompts


def test_a_script_is_fixed_by_its_seed():
    assert make_script(WorkloadSpec(seed=3)) == make_script(WorkloadSpec(seed=3))
    assert make_script(WorkloadSpec(seed=3)) != make_script(WorkloadSpec(seed=4))


def test_the_default_workload_has_every_kind_of_request():
    kinds = Counter(step.kind for step in make_script(WorkloadSpec()))
    assert set(kinds) == set(Kind)
    assert kinds[Kind.REWIND] >= 10


@settings(max_examples=60, deadline=None)
@given(specs)
def test_every_step_can_be_sent_when_those_before_it_are_answered(spec):
    script = make_script(spec)
    prompts = play(script)
    assert [step.index for step in script] == list(range(len(script)))
    for step, prompt in zip(script, prompts, strict=True):
        assert len(prompt) == step.prompt_tokens
        assert 0 <= step.known <= step.prompt_tokens
        assert len(step.new) > 0
        assert all(FIRST_TOKEN <= token <= LAST_TOKEN for token in step.new)


@settings(max_examples=60, deadline=None)
@given(specs)
def test_known_tokens_were_seen_before_and_the_next_token_was_not_promised(spec):
    script = make_script(spec)
    answers = {step.index: [100 + (step.index + place) % 100 for place in range(step.answer_tokens)] for step in script}
    prompts = play(script, lambda step: answers[step.index])
    seen: list[list[int]] = []
    for step, prompt in zip(script, prompts, strict=True):
        if step.known:
            assert any(text[: step.known] == prompt[: step.known] for text in seen)
        seen.append(prompt + answers[step.index])


def test_appends_contain_the_last_answer_and_rewinds_drop_the_tail():
    script = make_script(WorkloadSpec(forks=0, resets=0))
    lengths: dict[str, int] = {}
    for step in script:
        if step.kind is Kind.APPEND:
            assert step.keep == lengths[step.session]
        if step.kind is Kind.REWIND:
            assert step.keep < lengths[step.session]
        lengths[step.session] = step.prompt_tokens + step.answer_tokens


def test_forks_share_a_prefix_with_another_session_and_live_on():
    script = make_script(WorkloadSpec())
    forks = [step for step in script if step.kind is Kind.FORK]
    assert len(forks) == WorkloadSpec().forks
    for fork in forks:
        assert fork.source != fork.session
        assert fork.keep > WorkloadSpec().system_tokens
        assert [step for step in script if step.session == fork.session and step.index > fork.index]


def test_a_reset_keeps_nothing_but_the_system_prompt():
    (reset,) = [step for step in make_script(WorkloadSpec(resets=1)) if step.kind is Kind.RESET]
    assert reset.keep == 0
    assert reset.known == WorkloadSpec().system_tokens


def test_an_answer_of_another_length_is_refused():
    step = make_script(MINIATURE)[0]
    transcripts = Transcripts()
    with pytest.raises(ValueError, match="answered with 1 tokens"):
        transcripts.answered(step, transcripts.prompt(step), [5])


def test_a_step_whose_source_was_not_answered_is_refused():
    script = make_script(MINIATURE)
    append = next(step for step in script if step.keep)
    with pytest.raises(ValueError, match="keeps"):
        Transcripts().prompt(append)


@settings(max_examples=40, deadline=None)
@given(specs, st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_number_in_flight_keeps_the_order_within_sessions(spec, in_flight, source):
    script = make_script(spec)
    waiting, running, done = list(script), [], []
    transcripts = Transcripts()
    while waiting or running:
        busy = {step.session for step, _ in running}
        step = ready_steps(waiting, busy)
        if step is not None and len(running) < in_flight:
            waiting.remove(step)
            running.append((step, transcripts.prompt(step)))
            continue
        step, prompt = running.pop(source.randrange(len(running)))
        transcripts.answered(step, prompt, [7] * step.answer_tokens)
        done.append(step)
    assert sorted(step.index for step in done) == [step.index for step in script]
    for name in {step.session for step in script}:
        order = [step.index for step in done if step.session == name]
        assert order == sorted(order)
