import json

import pytest

from lmcache_histate.replay.outcome import RequestOutcome, RunOutcome, compare_outputs, output_difference


def outcome(tokens, logprobs=None, index=0, kind="append", prompt=100, hit=60, ttft=0.5):
    if logprobs is None:
        logprobs = [{token: -0.1, 999: -3.0} for token in tokens]
    return RequestOutcome(index, "s", kind, prompt, prompt, hit, ttft, 1.0, tuple(tokens), tuple(logprobs))


def test_equal_outputs_are_equal():
    verdict = compare_outputs([outcome([1, 2, 3])], [outcome([1, 2, 3])])
    assert (verdict.equal, verdict.rounding, verdict.wrong) == (1, (), ())
    assert verdict.largest_difference == 0


def test_equal_tokens_with_other_probabilities_are_wrong():
    # A wrong state can hit the same token by chance; its distribution gives it away.
    run = outcome([1], [{1: -0.1, 2: -4.0}])
    reference = outcome([1], [{1: -0.1, 2: -2.5}])
    assert compare_outputs([run], [reference]).wrong == (0,)


def test_a_flip_between_two_equally_likely_tokens_is_rounding():
    run = outcome([1, 2, 50], [{1: -0.1}, {2: -1.0, 3: -1.05}, {50: -0.1}])
    reference = outcome([1, 3, 60], [{1: -0.1}, {3: -1.0, 2: -1.02}, {60: -0.1}])
    verdict = compare_outputs([run], [reference])
    assert (verdict.equal, verdict.rounding, verdict.wrong) == (0, (0,), ())


def test_behind_the_first_difference_nothing_is_compared():
    run = outcome([2, 9], [{2: -1.0, 3: -1.0}, {9: -0.1, 8: -0.1}])
    reference = outcome([3, 8], [{2: -1.0, 3: -1.0}, {8: -5.0, 9: -5.0}])
    assert output_difference(run, reference) == 0


def test_a_token_that_the_reference_finds_unlikely_is_wrong():
    run = outcome([2], [{2: -1.0, 3: -1.1}])
    reference = outcome([3], [{3: -1.0, 2: -2.0}])
    assert compare_outputs([run], [reference]).wrong == (0,)


def test_a_token_outside_the_reference_is_infinitely_wrong():
    assert output_difference(outcome([2], [{2: -1.0}]), outcome([3], [{3: -1.0}])) == float("inf")


def test_missing_tokens_are_wrong():
    assert compare_outputs([outcome([1])], [outcome([1, 2])]).wrong == (0,)


def test_requests_are_matched_by_step_not_by_order():
    first, second = outcome([1], index=0), outcome([2], index=1)
    assert compare_outputs([second, first], [first, second]).equal == 2


def test_a_step_that_the_reference_lacks_is_an_error():
    with pytest.raises(KeyError):
        compare_outputs([outcome([1], index=5)], [outcome([1], index=0)])


def test_a_run_becomes_json_without_probabilities():
    run = RunOutcome("vllm", (outcome([1]),), 1.0, 2.0, {"import_s": 3.0})
    value = json.loads(json.dumps(run.to_json()))
    assert value["backend"] == "vllm"
    assert value["facts"] == {"import_s": 3.0}
    assert "logprobs" not in value["requests"][0]
    assert outcome([1]).recomputed_tokens == 40
