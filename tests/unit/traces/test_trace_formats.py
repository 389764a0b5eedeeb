"""Every format is recognised by its content and read into the one model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from trace_files import weka_request, weka_session, write_lines

from lmcache_histate.replay.traces.load import detect_format, load_trace
from lmcache_histate.replay.traces.model import Trace


def shared(trace: Trace, one: int, other: int) -> int:
    """Leading blocks that two requests of a trace have in common."""
    first, second = trace.requests[one].hashes, trace.requests[other].hashes
    count = min(len(first), len(second))
    equal = first[:count] == second[:count]
    assert not np.any(np.diff(equal.astype(int)) > 0), "hashes must name prefixes"
    return int(equal.sum())


def test_weka_sessions_have_name_spaces_of_their_own_and_sub_agents_share_their_sessions(tmp_path: Path) -> None:
    agent = [weka_request(0.0, 130, 5, [1, 7], api_time=2.0, think_time=0.0), weka_request(4.0, 200, 5, [1, 7, 8])]
    requests = [
        weka_request(0.0, 200, 10, [1, 2, 3], api_time=3.0, think_time=0.0),
        {"t": 10.0, "type": "subagent", "agent_id": "a1", "duration_ms": 6000, "requests": agent},
        weka_request(20.0, 300, 10, [1, 2, 3, 4], api_time=3.0, think_time=17.0),
    ]
    (tmp_path / "LICENSE").write_text("not a trace")
    write_lines(tmp_path / "one.json.gz", [weka_session("one", requests)])
    write_lines(tmp_path / "two.json.gz", [weka_session("two", requests[:1])])
    trace = load_trace(tmp_path)

    assert trace.block_tokens == 64
    assert [(r.stream, r.arrival_s, r.prompt_tokens) for r in trace.requests] == [
        ("one", 0.0, 200),
        ("one/a1", 4.0, 130),  # an agent's `t` is its end: it began 10 - 6 seconds after the session
        ("one/a1", 8.0, 200),
        ("one", 20.0, 300),
        ("two", 300.0, 200),
    ]
    assert trace.streams["one/a1"].session == "one"
    assert trace.streams["one/a1"].after == 0
    assert [r.think_s for r in trace.requests] == [0.0, 1.0, 2.0, 17.0, 0.0]
    assert shared(trace, 0, 3) == 3
    assert shared(trace, 0, 1) == 1
    assert shared(trace, 0, 4) == 0
    assert "300 s apart" in trace.notes[0]


def test_weka_documents_may_stand_on_lines_or_be_indented(tmp_path: Path) -> None:
    sessions = [weka_session(name, [weka_request(0.0, 128, 1, [1, 2])]) for name in ("a", "b")]
    write_lines(tmp_path / "lines.jsonl", sessions)
    (tmp_path / "pretty.json").write_text(json.dumps(weka_session("c", sessions[0]["requests"]), indent=2))
    trace = load_trace(tmp_path)
    assert [r.stream for r in trace.requests] == ["a", "b", "c"]


def test_weka_sessions_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    session = weka_session("a", [weka_request(0.0, 128, 1, [1, 2])])
    trace = load_trace(write_lines(tmp_path / "lines.jsonl", [session, session]))
    assert len(trace.streams) == 2
    assert shared(trace, 0, 1) == 0


def test_a_sub_agent_never_comes_before_what_starts_it(tmp_path: Path) -> None:
    agent = {"t": 5.0, "type": "subagent", "duration_ms": 1e6, "requests": [weka_request(0.0, 64, 1, [9])]}
    requests = [weka_request(0.0, 64, 1, [1]), weka_request(3.0, 128, 1, [1, 2]), agent]
    trace = load_trace(write_lines(tmp_path / "one.json", [weka_session("a", requests)]))
    assert [r.stream for r in trace.requests] == ["a", "a", "a/1"]
    assert trace.streams["a/1"].after == 1


def test_mooncake_streams_are_found_and_the_broken_last_block_is_dropped(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 2100, "output_length": 7, "hash_ids": [0, 10, 11, 12, 13]},
        {"timestamp": 9000, "input_length": 1800, "output_length": 7, "hash_ids": [0, 1, 20, 21]},
    ]
    trace = load_trace(write_lines(tmp_path / "trace.jsonl.gz", lines))
    assert trace.block_tokens == 512
    assert [len(r.hashes) for r in trace.requests] == [2, 4, 3]
    first, second, third = (r.stream for r in trace.requests)
    assert first == third != second
    assert trace.requests[2].think_s == pytest.approx(9.0 - 50 / 50)
    assert shared(trace, 0, 2) == 2
    assert shared(trace, 0, 1) == 1


def _round(session: str, total: int, prefix: int, minute: int, output: int = 100, **more: object) -> dict[str, object]:
    events = [
        {"event_type": "user_message", "timestamp": f"2026-06-01T05:{minute:02}:00.000Z"},
        {"event_type": "text", "timestamp": f"2026-06-01T05:{minute:02}:10.500Z"},
    ]
    return {
        "provider": "claude",
        "session_id": session,
        "model": "m",
        "input_tokens_total": total,
        "prefix_tokens": prefix,
        "newly_append_tokens": total - prefix,
        "output_tokens": output,
        "timing_events": events,
        **more,
    }


def test_tracelab_shows_rewrites_by_what_the_provider_had_cached(tmp_path: Path) -> None:
    lines = [
        _round("s", 6400, 3200, 0, claude_uncached_input_tokens=1000),
        _round("s", 7040, 5400, 1),  # all that could be cached: an append
        _round("s", 7680, 6912, 2),  # less by the provider's rounding: still one
        _round("s", 8000, 3264, 3),  # a rewrite from token 3,264 on
        _round("t", 6400, 3200, 4),  # another session with the same cached prefix
    ]
    trace = load_trace(write_lines(tmp_path / "rounds.jsonl", lines))
    assert [shared(trace, 0, 1), shared(trace, 1, 2), shared(trace, 2, 3)] == [100, 110, 51]
    assert shared(trace, 0, 4) == 50
    assert trace.requests[1].think_s == pytest.approx(49.5)
    assert [r.prompt_tokens for r in trace.requests] == [6400, 7040, 7680, 8000, 6400]


@pytest.mark.slow  # lmcache brings torch along
def test_the_log_that_lmcache_itself_writes(tmp_path: Path) -> None:
    hashed = pytest.importorskip("lmcache.v1.mp_observability.subscribers.logging.lookup_hash")
    events = pytest.importorskip("lmcache.v1.mp_observability.event")

    log = hashed.LookupHashLoggingSubscriber(hashed.LookupHashLogConfig(output_dir=str(tmp_path)))
    write = log.get_subscriptions()[events.EventType.MP_LOOKUP]
    chunks = [bytes([number]) * 32 for number in range(8)]
    # Request r1 is looked up twice; r3 is another model's, with the same hashes; r4 has integer hashes.
    for request, model, hashes, tokens in (
        ("r1", "m", chunks[:3], 1600),
        ("r1", "m", chunks[:3], 1600),
        ("r2", "m", chunks[:5], 2700),
        ("r3", "other", chunks[:3], 1600),
        ("r4", "m", [1 << 60, 1 << 61], 1100),
    ):
        metadata = {
            "request_id": request,
            "chunk_hashes": hashes,
            "model_name": model,
            "chunk_size": 528,
            "seq_len": tokens,
            "dtypes": ["torch.bfloat16"],
            "shapes": [[2, 8, 528, 512]],
        }
        write(events.Event(event_type=events.EventType.MP_LOOKUP, session_id=request, metadata=metadata))
    log.shutdown()

    trace = load_trace(tmp_path)
    assert trace.block_tokens == 528
    assert [(r.prompt_tokens, len(r.hashes)) for r in trace.requests] == [(1600, 3), (2700, 5), (1600, 3), (1100, 2)]
    streams = [r.stream for r in trace.requests]
    assert streams[0] == streams[1]
    assert len(set(streams)) == 3
    assert shared(trace, 0, 1) == 3
    assert shared(trace, 0, 2) == 0


def test_plain_token_ids(tmp_path: Path) -> None:
    tokens = list(range(100, 140))
    lines = [
        {"session": "a", "time": 5.0, "tokens": tokens, "output_tokens": 3},
        {"session": "b", "time": 6.0, "tokens": [1, *tokens[1:]], "output_tokens": 3},
        {"session": "a", "time": 9.5, "answered": 12.0, "tokens": [*tokens[:20], 7, *tokens[21:]]},
        {"session": "a", "time": "1970-01-01T00:00:15Z", "tokens": tokens},
    ]
    trace = load_trace(write_lines(tmp_path / "log.jsonl", lines))
    assert trace.block_tokens == 16
    assert [r.arrival_s for r in trace.requests] == [0.0, 1.0, 4.5, 10.0]
    assert [len(r.hashes) for r in trace.requests] == [2, 2, 2, 2]
    assert [shared(trace, 0, other) for other in (1, 2, 3)] == [0, 1, 2]
    assert trace.requests[3].think_s == pytest.approx(3.0)
    assert trace.requests[2].output_tokens == 1
    assert [(key, stream.session) for key, stream in trace.streams.items()] == [("a", "a"), ("b", "b")]


def test_plain_hashes_of_single_blocks_become_hashes_of_prefixes(tmp_path: Path) -> None:
    lines = [
        {"session": "a", "time": 0, "hashes": ["x", "y", "z"], "block_tokens": 256, "prompt_tokens": 800},
        {"session": "b", "time": 1, "hashes": ["w", "y", "z"], "block_tokens": 256},
        {"session": "a", "stream": "helper", "time": 2, "hashes": ["x", "y", 3], "block_tokens": 256},
    ]
    trace = load_trace(write_lines(tmp_path / "log.jsonl", lines))
    assert trace.block_tokens == 256
    assert [shared(trace, 0, 1), shared(trace, 0, 2)] == [0, 2]
    assert [r.prompt_tokens for r in trace.requests] == [800, 768, 768]
    assert trace.streams["a/helper"].session == "a"


def test_plain_lines_without_a_session_are_assigned_by_their_prompts(tmp_path: Path) -> None:
    lines = [{"time": t, "tokens": [*range(48)] if t % 2 else [*range(500, 548)]} for t in range(4)]
    trace = load_trace(write_lines(tmp_path / "log.jsonl", lines))
    streams = [r.stream for r in trace.requests]
    assert streams[0] == streams[2] != streams[1] == streams[3]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (weka_session("s", []), "weka"),
        ({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}, "mooncake"),
        (_round("s", 1, 0, 0), "tracelab"),
        ({"timestamp": 1.0, "chunk_size": 8, "seq_len": 1, "chunk_hashes": []}, "lmcache-lookup"),
        ({"session": 1, "time": 1, "tokens": []}, "plain"),
        ({"time": 1, "hashes": []}, "plain"),
        ({"tokens": list(range(60_000)), "time": 1}, "plain"),  # the key that tells it stands far behind
    ],
)
def test_formats_are_detected_by_content(tmp_path: Path, line: object, name: str) -> None:
    assert detect_format(write_lines(tmp_path / "any.txt", [line])) == name
    assert detect_format(write_lines(tmp_path / "packed.gz", [line])) == name


@pytest.mark.skipif(not os.environ.get("TEST_TRACES"), reason="TEST_TRACES names no folder of traces")
def test_the_public_traces_are_read_whole() -> None:
    folder = Path(os.environ["TEST_TRACES"])
    bad: list[str] = []
    mooncake = load_trace(folder / "mooncake", on_bad_line=bad.append)
    tracelab = load_trace(folder / "tracelab", on_bad_line=bad.append)
    assert (len(mooncake.requests), len(tracelab.requests), bad) == (12_031, 38, [])
    assert len(tracelab.streams) == 4
    assert 5_000 < len(mooncake.streams) < 10_000
