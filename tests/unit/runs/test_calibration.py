import math

import pytest
from openai_server import OpenAiServer, with_server

from lmcache_histate.replay.calibration import (
    DECODE_BATCH,
    Measurement,
    calibrate,
    fit_seconds,
    ladder,
    request_count,
    step_times,
)
from lmcache_histate.replay.cost_model import CostModel, CostModelError, read_cost_model, write_cost_model
from lmcache_histate.replay.endpoint_client import EndpointClient, EndpointError
from lmcache_histate.replay.simulator import SimulationSettings
from lmcache_histate.replay.simulator.hardware import StepTimes

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def test_a_fit_finds_what_the_numbers_were_made_of():
    made = [0.004 + 2e-5 * n + 3e-10 * n * n for n in LENGTHS]
    fit = fit_seconds(LENGTHS, made, 2)
    assert fit.coefficients == pytest.approx((0.004, 2e-5, 3e-10), rel=1e-6)
    assert fit.error < 1e-9
    assert fit.at(1000) == pytest.approx(0.0243)


def test_terms_that_are_not_there_are_zero_and_never_negative():
    linear = [0.01 + 1e-4 * n for n in LENGTHS]
    assert fit_seconds(LENGTHS, linear, 2).coefficients[2] == pytest.approx(0.0, abs=1e-13)
    concave = [math.sqrt(n) for n in LENGTHS]
    assert min(fit_seconds(LENGTHS, concave, 2).coefficients) >= 0.0
    flat = fit_seconds(LENGTHS, [0.5] * len(LENGTHS), 2)
    assert flat.coefficients == pytest.approx((0.5, 0.0, 0.0))


def test_a_fit_needs_two_lengths():
    with pytest.raises(ValueError, match="two different lengths"):
        fit_seconds([100, 100], [1.0, 1.0], 1)


def test_step_times_invert_what_the_simulator_would_take():
    true = StepTimes(step_s=0.004, weights_s=0.006, token_s=2e-5, attention_s=6e-10, context_s=1.2e-8, state_s=3e-5)
    prefill = fit_seconds(LENGTHS, [true.step_s + n * true.token_s + true.prefill(0, n) for n in LENGTHS], 2)
    decode = [Measurement(n, true.step(1, 0.0, 1, n)) for n in (LENGTHS[0], LENGTHS[-1])]
    batch = true.step(DECODE_BATCH, 0.0, DECODE_BATCH, DECODE_BATCH * LENGTHS[0])
    found = step_times(prefill, decode, batch)
    for name in ("step_s", "weights_s", "token_s", "attention_s", "context_s", "state_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name


def test_noise_never_makes_a_negative_cost():
    fit = fit_seconds(LENGTHS, [0.05 + 1e-5 * n for n in LENGTHS], 2)
    found = step_times(fit, [Measurement(512, 0.02), Measurement(16384, 0.018)], 0.019)
    assert min(found.step_s, found.weights_s, found.token_s, found.attention_s, found.context_s, found.state_s) >= 0.0
    assert found.step(1, 0.0, 1, 512) == pytest.approx(0.02, rel=0.01)


def test_a_ladder_grows_by_a_factor():
    assert ladder(500, 32000, 7) == [500, 1000, 2000, 4000, 8000, 16000, 32000]
    with pytest.raises(ValueError, match="at least twice"):
        ladder(500, 800, 7)


def measure(server, lengths=(32, 64, 128, 256), repeats=1):
    requests = []

    async def use(url):
        async with EndpointClient(url, timeout_s=20) as client:
            served = await client.model()
            return await calibrate(client, served, lengths, repeats, seed=1, on_request=lambda: requests.append(1))

    result = with_server(server, use)
    assert len(requests) == len(server.bodies)
    assert len(requests) == request_count(lengths, repeats) or not server.report_cached
    return result


def test_prompts_are_cold_then_hit():
    result = measure(OpenAiServer(token_s=1e-4, resets=False))
    assert [m.tokens for m in result.prefill] == [32, 64, 128, 256]
    assert [m.cached_tokens for m in result.hits] == [32, 64, 128, 256]
    assert result.prefill[-1].seconds > result.hits[-1].seconds
    assert any("vLLM's own cache, which restores nothing" in note for note in result.notes)
    assert result.model.restore_token_s is None


def test_a_server_that_never_hits_or_does_not_say_so_gives_no_restore_cost():
    none = measure(OpenAiServer(resets=True))  # resetting empties all that it has
    assert none.model.restore_token_s is None
    assert any("No prompt that was sent again hit" in note for note in none.notes)

    silent = measure(OpenAiServer(report_cached=False))
    assert silent.hits == []
    assert any("--enable-prompt-tokens-details" in note for note in silent.notes)


def test_a_server_that_refuses_ends_the_calibration():
    with pytest.raises(EndpointError, match="did not answer a prompt of 32 tokens: status 400: too long"):
        measure(OpenAiServer(refuse=lambda body: "too long"))


TIMES = StepTimes(0.004, 0.006, 2e-5, 6e-10, 1.2e-8, 3e-5)


@pytest.mark.parametrize("restore", [(None, None), (1e-6, 0.01)])
def test_a_cost_model_survives_its_file(tmp_path, restore):
    model = CostModel(TIMES, *restore, "tiny at http://localhost")
    write_cost_model(tmp_path / "m.yaml", model)
    assert read_cost_model(tmp_path / "m.yaml") == model


def test_a_cost_model_becomes_settings_of_the_simulator():
    settings = SimulationSettings(**CostModel(TIMES, 1e-6).settings(32768))
    assert settings.times == TIMES
    assert settings.pcie_bytes_per_second == pytest.approx(32.768e9)
    assert CostModel(TIMES).settings(32768) == {"times": TIMES}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("histate-cost-model-1", "else"), "not a cost model"),
        (lambda t: t.replace("  token_s", "  tokens_s"), r"times.tokens_s: no such figure"),
        (
            lambda t: t.replace("  token_s: 2.00000e-05", "  token_s: fast"),
            "times.token_s: must be a number .* found 'fast'",
        ),
        (lambda t: t.replace("  token_s: 2.00000e-05", "  token_s: -1"), "times.token_s: must be a number"),
        (lambda t: t.replace("times:", "time:"), "times: is missing"),
        (lambda t: "a: [", "m.yaml"),
    ],
)
def test_a_broken_cost_model_is_named(tmp_path, change, message):
    file = tmp_path / "m.yaml"
    write_cost_model(file, CostModel(TIMES))
    file.write_text(change(file.read_text()))
    with pytest.raises(CostModelError, match=message):
        read_cost_model(file)
