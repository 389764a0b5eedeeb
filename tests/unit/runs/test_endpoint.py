"""The live replay over real HTTP: order, prompts, figures, and every way in which a server can fail."""

import asyncio
import re

import numpy as np
import pytest
from openai_server import OpenAiServer, with_server

from lmcache_histate.replay.comparison import CACHED_TOKENS_REPORTED
from lmcache_histate.replay.endpoint import LOST_IN_A_ROW, EndpointSettings, Prompts, Replay, fit
from lmcache_histate.replay.endpoint_client import EndpointClient, EndpointError, RequestFailed
from lmcache_histate.replay.traces.model import Stream, Trace, TraceRequest

BLOCK = 8


def request(stream, hashes, tail=3, output=4, think=0.0, arrival=0.0):
    return TraceRequest(stream, arrival, think, len(hashes) * BLOCK + tail, output, np.array(hashes, np.uint64))


def trace(requests, streams=None):
    keys = dict.fromkeys(item.stream for item in requests)
    return Trace("t", BLOCK, requests, {key: Stream(key) for key in keys} | (streams or {}))


def replay(server, requests, streams=None, model=None, on_result=None, **settings):
    """The run, and the replay that made it."""

    async def use(url):
        async with EndpointClient(url, timeout_s=20) as client:
            served = await client.model(model)
            made = Replay(trace(requests, streams), client, served, EndpointSettings(**settings), on_result)
            try:
                return await made.run(), made
            except EndpointError as error:
                return error, made

    return with_server(server, use)


APPENDS = [
    request("a", [1, 2]),
    request("b", [7]),
    request("a", [1, 2, 3]),
    request("a", [1, 2, 3, 4]),
    request("b", [7, 8]),
    request("a", [1, 2, 9, 10]),
]


def test_prompts_share_exactly_the_prefixes_that_the_trace_shares():
    prompts = Prompts(BLOCK, EndpointSettings())
    texts = [prompts.tokens(item, number) for number, item in enumerate(APPENDS)]
    assert [len(text) for text in texts] == [item.prompt_tokens for item in APPENDS]
    assert all(260 <= token <= 500 for text in texts for token in text)

    def shared(left, right):
        return next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)

    assert shared(texts[0], texts[2]) == 2 * BLOCK  # behind it one's tail meets the other's block
    assert shared(texts[3], texts[5]) == 2 * BLOCK
    assert shared(texts[0], texts[1]) == 0
    assert texts == [Prompts(BLOCK, EndpointSettings()).tokens(item, number) for number, item in enumerate(APPENDS)]
    assert Prompts(BLOCK, EndpointSettings(seed=1)).tokens(APPENDS[0], 0) != texts[0]


@pytest.mark.parametrize(("scale", "block", "length"), [(1 / 4, 2, 5), (2.0, 16, 38), (1 / 64, 1, 2)])
def test_lengths_are_scaled_and_prefixes_stay(scale, block, length):
    prompts = Prompts(BLOCK, EndpointSettings(scale=scale))
    first, longer = (prompts.tokens(item, 0) for item in (request("a", [1, 2]), request("a", [1, 2, 3])))
    assert prompts.block_tokens == block
    assert len(first) == prompts.length(request("a", [1, 2])) == length
    assert first[: 2 * block] == longer[: 2 * block]


def test_hits_are_what_the_server_says_and_the_rest_is_recomputed():
    run, _ = replay(OpenAiServer(), APPENDS, name="stock")
    found = {}
    for result in run.requests:
        found.setdefault(result.stream, []).append(
            (result.hit_tokens, result.reusable_tokens, result.recomputed_unknown)
        )
    # The server's blocks are of 4 tokens: all blocks of 8 that were sent before hit.
    assert found == {"a": [(0, 0, 0), (16, 16, 0), (24, 24, 0), (16, 16, 0)], "b": [(0, 0, 0), (8, 8, 0)]}
    assert run.facts.policy == "stock"
    assert not run.facts.simulated
    assert run.facts.settings[CACHED_TOKENS_REPORTED]
    assert all(result.output_tokens == 4 and 0 < result.ttft_s < result.seconds for result in run.requests)
    assert all(re.fullmatch(r"(\d+\.\d ){4}", result.answer) for result in run.requests)


def test_a_server_that_caches_nothing_recomputes_what_was_sent_before():
    run, _ = replay(OpenAiServer(block=1000), APPENDS)
    assert sum(result.recomputed_unknown for result in run.requests) == 16 + 24 + 16 + 8


def test_requests_ask_for_a_stream_of_the_right_length():
    server = OpenAiServer()
    replay(server, APPENDS[:1])
    (body,) = server.bodies
    assert body["model"] == "tiny"
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (4, 0.0, True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_a_stream_waits_for_its_answers_and_its_think_times():
    rows = [request("a", [1]), request("a", [1, 2], think=0.2), request("a", [1, 2, 3], think=0.4)]
    run, _ = replay(OpenAiServer(token_s=0.002), rows, speedup=2.0)
    for before, after, think in zip(run.requests, run.requests[1:], (0.1, 0.2), strict=False):
        assert after.sent_s >= before.sent_s + before.seconds + think - 0.01


def test_sub_agents_start_after_the_answer_that_started_them():
    rows = [request("main", [1]), request("sub", [5], think=0.1), request("main", [1, 2])]
    run, _ = replay(OpenAiServer(), rows, {"main": Stream("s"), "sub": Stream("s", after=0)})
    first, sub = (next(r for r in run.requests if r.stream == key) for key in ("main", "sub"))
    assert sub.sent_s >= first.sent_s + first.seconds + 0.09
    assert {result.session for result in run.requests} == {"s"}


def test_no_more_sessions_than_allowed_run_at_once():
    server = OpenAiServer(token_s=0.001)
    rows = [request(key, [number * 10 + turn]) for turn in range(2) for number, key in enumerate("abcdef")]
    replay(server, rows, sessions=2)
    assert len(server.bodies) == 12
    assert server.most_at_once == 2


def test_streams_end_at_the_first_request_that_is_too_long():
    rows = [request("a", [1]), request("sub", [6]), request("a", [1, 2, 3]), request("late", [7]), request("a", [1, 2])]
    streams = {"a": Stream("s"), "sub": Stream("s", after=0), "late": Stream("s", after=2)}
    fitting, sent = fit(trace(rows, streams), Prompts(BLOCK, EndpointSettings()), max_model_len=20)
    assert sent == {0, 1}  # neither what follows in `a`, nor the stream that its long request would have started
    assert (fitting.requests, fitting.streams_cut, fitting.left_out, fitting.longest) == (2, 1, 3, 31)
    assert fit(trace(rows, streams), Prompts(BLOCK, EndpointSettings()), None)[0].left_out == 0
    server = OpenAiServer(max_model_len=20)
    run, _ = replay(server, rows, streams)
    assert len(run.requests) == len(server.bodies) == 2
    assert run.facts.settings["requests_left_out"] == 3


def test_a_trace_of_which_nothing_fits_is_refused():
    with pytest.raises(EndpointError, match=r"no request of t fits the server's 10 tokens.*smaller --scale"):
        replay(OpenAiServer(max_model_len=10), [request("a", [1, 2])])


def test_a_request_that_is_refused_is_recorded_and_the_others_go_on():
    server = OpenAiServer(refuse=lambda body: "no such token" if len(body["prompt"]) == 27 else "")
    run, _ = replay(server, APPENDS)
    failed = [result for result in run.requests if result.error]
    assert [result.error for result in failed] == ["status 400: no such token"]
    assert len(run.requests) == len(APPENDS)


def test_a_server_that_goes_away_ends_the_run_and_keeps_what_was_measured():
    rows = [request("a", [number]) for number in range(40)]
    error, made = replay(OpenAiServer(hang_up_after=5), rows)
    assert isinstance(error, EndpointError)
    assert "is gone" in str(error)
    results = made.result().requests
    assert sum(not result.error for result in results) == 5
    assert sum(bool(result.error) for result in results) == LOST_IN_A_ROW
    assert made.result().facts.settings["requests_not_reached"] == 40 - 5 - LOST_IN_A_ROW


def test_a_server_that_does_not_report_cached_tokens_is_noticed():
    run, _ = replay(OpenAiServer(report_cached=False), APPENDS)
    assert run.facts.settings[CACHED_TOKENS_REPORTED] is False


def test_no_server_and_the_wrong_model_are_said():
    async def absent():
        async with EndpointClient("http://127.0.0.1:9") as client:
            await client.model()

    with pytest.raises(EndpointError, match=r"no server answers at http://127\.0\.0\.1:9"):
        asyncio.run(absent())
    with pytest.raises(EndpointError, match="does not serve 'big'; it serves tiny"):
        replay(OpenAiServer(), APPENDS, model="big")
    with pytest.raises(EndpointError, match="is not a URL"):
        EndpointClient("localhost:8000")
    assert EndpointClient("http://h:1/v1/").url == "http://h:1"


def test_an_answer_that_breaks_off_is_a_failed_request():
    async def use(url):
        async with EndpointClient(url) as client:
            await client.complete("tiny", [1, 2, 3], 0)

    with pytest.raises(RequestFailed, match="before its first token"):
        with_server(OpenAiServer(), use)
