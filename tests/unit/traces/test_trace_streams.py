"""Building traces in little memory, and telling streams by their prompts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import make_trace

from lmcache_histate.replay.traces.build import mixed
from lmcache_histate.replay.traces.infer import StreamFinder
from lmcache_histate.replay.traces.model import Trace, shared_array
from lmcache_histate.replay.traces.numbering import number_blocks

PATHS = st.lists(st.integers(0, 2), max_size=9)
PROMPTS = st.lists(st.tuples(st.sampled_from("ab"), PATHS), min_size=1, max_size=30)


def reference_hashes(prompts: list[tuple[str, list[int]]]) -> list[list[int]]:
    names: dict[tuple[int, ...], int] = {}
    numbers = [
        [names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))] for _, path in prompts
    ]
    return [mixed(np.array(row, np.uint64)).tolist() for row in numbers]


@settings(deadline=None, max_examples=60)
@given(PROMPTS)
def test_sharing_arrays_changes_no_prompt(prompts: list[tuple[str, list[int]]]) -> None:
    trace = make_trace(prompts)
    assert [request.hashes.tolist() for request in trace.requests] == reference_hashes(prompts)


@settings(deadline=None, max_examples=60)
@given(PROMPTS, st.integers(1, 4))
def test_coarser_blocks_are_the_last_ones_of_each_group(prompts: list[tuple[str, list[int]]], blocks: int) -> None:
    fine = make_trace(prompts)
    coarse = fine.coarser(blocks)
    assert coarse.block_tokens == fine.block_tokens * blocks
    assert [r.hashes.tolist() for r in coarse.requests] == [
        r.hashes[blocks - 1 :: blocks].tolist() for r in fine.requests
    ]


@settings(deadline=None, max_examples=60)
@given(PROMPTS)
def test_numbers_of_blocks_are_equal_where_hashes_are(prompts: list[tuple[str, list[int]]]) -> None:
    trace = make_trace(prompts)
    blocks = number_blocks(trace)
    hashes = [number for request in trace.requests for number in request.hashes.tolist()]
    numbers = [int(number) for prompt in blocks.prompts for number in prompt]
    assert len(hashes) == len(numbers)
    assert len(set(zip(hashes, numbers, strict=True))) == len(set(hashes)) == len(set(numbers))
    assert all(0 <= number < blocks.count for number in numbers)


def test_prompts_that_extend_each_other_are_views_of_one_array() -> None:
    path = list(range(500))
    trace = make_trace([("a", path[:length]) for length in (100, 200, 150, 500)])
    assert len({id(shared_array(request.hashes)) for request in trace.requests}) == 1
    assert len({id(shared_array(request.hashes)) for request in trace.coarser(4).requests}) == 1


def test_requests_are_ordered_and_streams_keep_their_order() -> None:
    trace = make_trace([("a", [1]), ("b", [2]), ("a", [1, 1])])
    assert [r.stream for r in trace.requests] == ["a", "b", "a"]
    assert [r.think_s for r in trace.requests] == [0.0, 0.0, 2.0]
    assert trace.first(2).streams.keys() == {"a", "b"}
    assert trace.first(1).streams.keys() == {"a"}


def streams_of(paths: list[list[int]], remembered: int = 1000) -> list[str]:
    finder = StreamFinder(remembered)
    rows = reference_hashes([("", path) for path in paths])
    return [finder.stream_of(np.array(row, np.uint64)) for row in rows]


def test_a_prompt_continues_the_stream_that_it_extends_or_edits() -> None:
    long = [0, 1, 2, 3, 4, 5]
    streams = streams_of(
        [
            long,
            [*long, 6, 7],  # extends
            [*long, 6, 8, 9],  # edits its last message
            [0, 20, 21, 22],  # shares a system prompt
            [0, 30, 31, 32],
            [0, 20, 21, 22, 23],
            [],
            [],
        ]
    )
    assert streams[0] == streams[1] == streams[2]
    assert streams[3] == streams[5]
    assert len({streams[0], streams[3], streams[4], streams[6], streams[7]}) == 5


def test_streams_of_short_prompts_do_not_swallow_what_shares_a_system_prompt() -> None:
    assert len(set(streams_of([[0, 1], [0, 2], [0, 3], [0, 4]]))) == 4
    # A prompt that is the system prompt alone can be continued once, by whoever comes first; then it is known as shared.
    assert len(set(streams_of([[0], [0, 1], [0, 2], [0], [0, 3], [0, 4]]))) == 5


@settings(deadline=None, max_examples=60)
@given(st.lists(PATHS, max_size=40), st.integers(1, 12))
def test_forgetting_keeps_to_the_limit_and_to_whole_prefixes(paths: list[list[int]], limit: int) -> None:
    finder = StreamFinder(limit)
    rows = reference_hashes([("", path) for path in paths])
    parents = {row[end]: row[end - 1] for row in rows for end in range(1, len(row))}
    for row in rows:
        finder.stream_of(np.array(row, np.uint64))
        owner = finder._owner
        assert all(parents[block] in owner for block in owner if block in parents)
        assert len(owner) <= limit or len(finder._streams) == 1
        assert all(owner[block] in finder._streams for block in owner)


def test_a_trace_keeps_its_notes() -> None:
    trace = Trace("t", 16, [], {}, ("assumed",))
    assert trace.coarser(2).notes == trace.first(1).notes == ("assumed",)
