"""What can be wrong with files, and what is said about it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from trace_files import weka_request, weka_session, write_lines

from lmcache_histate.replay.traces.load import load_trace
from lmcache_histate.replay.traces.source import TraceError, find_files

GOOD = {"session": "a", "time": 0, "tokens": [1] * 40}


def test_bad_lines_are_named_and_skipped(tmp_path: Path) -> None:
    bad = [
        "{not json",
        {"session": "a", "time": 1},
        {"session": "a", "time": 1, "tokens": [1], "hashes": [2]},
        {"session": "a", "time": 1, "tokens": [-1]},
        {"session": "a", "time": 1, "hashes": [2]},
        {"session": "a", "time": 1, "hashes": [2], "block_tokens": 16, "prompt_tokens": 40},
        {"session": "a", "time": "yesterday", "tokens": []},
        b'{"session": "\xff", "time": 1, "tokens": []}',
        "[]",
    ]
    path = write_lines(tmp_path / "log.jsonl", [GOOD, "", *bad, GOOD])
    messages: list[str] = []
    trace = load_trace(path, on_bad_line=messages.append)
    assert len(trace.requests) == 2
    # The blank second line counts as a line, but not as a bad one.
    assert [message.split(": skipped")[0] for message in messages] == [f"{path}, line {n}" for n in range(3, 12)]
    with pytest.raises(TraceError, match=r"line 11: 9 bad lines.*more than the limit of 8"):
        load_trace(path, bad_lines=8, on_bad_line=messages.append)
    assert len(load_trace(path, bad_lines=9, on_bad_line=messages.append).requests) == 2


def test_messages_never_show_token_ids(tmp_path: Path) -> None:
    secret = 31337
    lines = [
        GOOD,
        {"session": "a", "time": 1, "tokens": [secret, "31337"]},
        {"session": "a", "time": 1, "tokens": [secret, -31337]},
        {"session": "a", "time": 1, "tokens": [secret, 3133731337]},
        {"session": "a", "time": 1, "tokens": [secret], "hashes": [31337]},
        '{"session": "a", "time": 1, "tokens": [31337, 31337',
    ]
    messages: list[str] = []
    load_trace(write_lines(tmp_path / "log.jsonl", lines), on_bad_line=messages.append)
    assert len(messages) == 5 - 1  # 3,133,731,337 is a token id like any other below 2^32
    assert not any(str(secret) in message for message in messages)
    with pytest.raises(TraceError) as error:
        load_trace(write_lines(tmp_path / "other.jsonl", [{"when": 1, "ids": [secret]}]))
    assert str(secret) not in str(error.value)
    assert "the keys when, ids" in str(error.value)


def test_token_ids_are_hashed_with_a_key_that_differs_from_trace_to_trace(tmp_path: Path) -> None:
    one = load_trace(write_lines(tmp_path / "one.jsonl", [GOOD]))
    again = load_trace(write_lines(tmp_path / "again.jsonl", [GOOD]))
    other = load_trace(write_lines(tmp_path / "other.jsonl", [{**GOOD, "output_tokens": 2}]))
    assert one.requests[0].hashes.tolist() == again.requests[0].hashes.tolist()
    assert not set(one.requests[0].hashes.tolist()) & set(other.requests[0].hashes.tolist())


def test_a_bad_weka_session_is_one_bad_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.json", [weka_session("a", [weka_request(0.0, 64, 1, [-1])])])
    write_lines(tmp_path / "b.json", [weka_session("b", [weka_request(0.0, 64, 1, [1])])])
    messages: list[str] = []
    assert [r.stream for r in load_trace(tmp_path, on_bad_line=messages.append).requests] == ["b"]
    assert messages[0].startswith(f"{tmp_path / 'a.json'}, line 1: skipped: not a session")


def test_a_packed_file_that_was_cut_is_read_up_to_the_cut(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"session": %d, "time": 1, "tokens": [%d]}\n' % (n, n) for n in range(20_000)))
    (tmp_path / "log.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    messages: list[str] = []
    trace = load_trace(tmp_path, on_bad_line=messages.append)
    assert 5_000 < len(trace.requests) < 20_000
    assert len(messages) <= 2  # the line that was cut may be one
    assert "cannot be unpacked" in messages[-1]


def test_several_files_are_one_trace_but_not_of_several_formats(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "1.jsonl", [{**GOOD, "time": 7}])
    two = write_lines(tmp_path / "2.jsonl", [{**GOOD, "session": "b"}, {**GOOD, "session": "b", "time": 9}])
    (tmp_path / "3.jsonl").write_bytes(b"")
    assert [r.stream for r in load_trace([one, two]).requests] == ["b", "a", "b"]
    assert find_files([one, tmp_path]) == [one, two, tmp_path / "3.jsonl"]
    write_lines(tmp_path / "4.jsonl", [{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}])
    with pytest.raises(TraceError, match=r"several formats.*4\.jsonl \(mooncake\).*1\.jsonl \(plain\)"):
        load_trace(tmp_path)


def test_block_sizes_do_not_mix(tmp_path: Path) -> None:
    hashed = [{"time": 0, "hashes": ["a"], "block_tokens": 256}, {"time": 0, "hashes": ["a"], "block_tokens": 512}]
    with pytest.raises(TraceError, match="blocks of 512 tokens, but of 256 before"):
        load_trace(write_lines(tmp_path / "plain.jsonl", hashed))
    sessions = [weka_session("a", [], 64), weka_session("b", [], 16)]
    with pytest.raises(TraceError, match="block_size 16, but 64"):
        load_trace(write_lines(tmp_path / "weka.jsonl", sessions))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "every file is empty"),
        (b"hello\n", "not a JSON object"),
        (b"\x1f\x8bx", "cannot be read"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load_trace(path)


def test_an_empty_folder_and_no_usable_request(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(TraceError, match="no file in this folder"):
        load_trace(tmp_path)
    bad = write_lines(tmp_path / "bad.jsonl", [{"time": 1, "tokens": "no"}])
    with pytest.raises(TraceError, match="no request in it could be used \\(1 bad lines\\)"):
        load_trace(bad, on_bad_line=lambda message: None)


def test_limit_and_progress(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "log.jsonl.gz", [{**GOOD, "time": n} for n in range(1000)])
    seen: list[int] = []
    assert len(load_trace(path, on_progress=seen.append).requests) == 1000
    assert sum(seen) == path.stat().st_size
    assert [r.arrival_s for r in load_trace(path, limit=3).requests] == [0.0, 1.0, 2.0]
