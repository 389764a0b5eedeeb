"""What `histate analyze` says, on traces small enough to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import make_trace, write_lines
from typer.testing import CliRunner

from lmcache_histate.cli.main import app
from lmcache_histate.config import load_config
from lmcache_histate.geometry import GIB, CacheGeometry
from lmcache_histate.replay.analysis import analyze, engine_trace
from lmcache_histate.replay.analysis_advice import advise, to_yaml
from lmcache_histate.replay.traces.generate import AgentSpec, generate_trace

BLOCK = 100
GEOMETRY = CacheGeometry(BLOCK, 10.0, 5000.0)
"""A block of KV is 1,000 bytes, a snapshot 5,000."""

HISTORY = list(range(1, 11))
EDITED = [*HISTORY[:6], 20, 21]
"""Leaves the first prompt inside: 600 tokens match, and no snapshot stands there."""
PROMPTS = [
    ("a", HISTORY),
    ("a", [*HISTORY, 11, 12]),  # an append
    ("b", [30, 31]),  # shares nothing
    ("a", EDITED),  # inside a turn
    ("c", [*HISTORY[:6], 40]),  # the junction is known now
    ("a", [*HISTORY, 11, 12]),  # back to an end
]


def test_hits_are_told_apart() -> None:
    result = analyze(make_trace(PROMPTS, BLOCK), GEOMETRY)
    hits = result.hits
    # The fifth finds KV up to 600, with ends alone no snapshot, and with junctions one.
    assert (hits.none, hits.append, hits.inside, hits.other_end) == (2, 1, 2, 1)
    assert hits.matched_tokens == 1000 + 600 + 600 + 1200
    assert hits.recomputed_ends == 600 + 600
    assert hits.recomputed_junctions == 600
    assert result.prompt_tokens == 5100
    assert result.bounds["every block"] == pytest.approx(3400 / 5100)
    assert result.bounds["ends and junctions"] == pytest.approx(2800 / 5100)
    # a: 0, 600 back, then EDITED is left after 600 of its 800.
    assert {(entry.low, entry.high): entry.count for entry in result.distances if entry.count} == {
        (0.0, 1.0): 1,
        (1.0, 1024.0): 2,
    }
    assert result.rewind_tokens.most == 600


def test_the_working_set_is_what_a_later_request_still_needs() -> None:
    need = analyze(make_trace(PROMPTS, BLOCK), GEOMETRY).working_set
    # After the second request, 12 blocks of it are used again by the last one; a lives from the first to the last.
    assert need.kv.most == 12 * 1000
    assert need.live_streams.most == 1
    assert need.final_snapshots.most == 5000
    assert need.all_kv == (12 + 2 + 2 + 1) * 1000
    assert need.interval_tokens % BLOCK == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=8)), min_size=1, max_size=15))
def test_the_working_set_agrees_with_counting(prompts: list[tuple[str, list[int]]]) -> None:
    need = analyze(make_trace(prompts, BLOCK), GEOMETRY).working_set
    prefixes = [{tuple(path[:end]) for end in range(1, len(path) + 1)} for _, path in prompts]
    alive = [
        len(set().union(*prefixes[: index + 1]) & set().union(*prefixes[index + 1 :])) for index in range(len(prompts))
    ]
    assert need.kv.most == max(alive) * 1000
    assert need.all_kv == len(set().union(*prefixes)) * 1000


def test_an_engines_block_is_the_nearest_multiple_of_the_traces() -> None:
    trace = make_trace(PROMPTS, 64)
    assert [engine_trace(trace, block).block_tokens for block in (528, 576, 64, 16)] == [512, 576, 64, 64]


def test_the_recommendation_is_a_configuration_that_loads(tmp_path: Path) -> None:
    trace = generate_trace(AgentSpec(sessions=12))
    geometry = CacheGeometry(528, 32 * 1024, 49.1 * (1 << 20))
    result = analyze(trace, geometry)
    settings = advise(result, geometry)
    path = tmp_path / "cache.yaml"
    path.write_text(to_yaml(settings, "title"))
    config = load_config({"LMCACHE_CONFIG": str(path)})
    assert config is not None
    hot = result.working_set.kv.p90 + result.working_set.final_snapshots.p90
    assert config.max_local_cpu_size * GIB * config.histate.cpu_high_watermark >= hot
    assert (config.max_local_cpu_size - 1) * GIB * config.histate.cpu_high_watermark < hot
    assert config.max_local_disk_size * GIB > result.working_set.historical_snapshots.p90
    assert config.histate.interval == "adaptive"
    assert all(setting.reason for setting in settings)

    tight = {setting.key: setting.value for setting in advise(result, geometry, cpu_budget=2 * GIB)}
    assert tight["max_local_cpu_size"] == 2
    assert int(tight["max_local_disk_size"]) > config.max_local_disk_size


def test_without_rewinds_no_snapshots_are_wanted_inside_turns() -> None:
    path: list[int] = []
    appends = []
    for _ in range(30):
        path = [*path, len(path)]
        appends.append(("a", path))
    result = analyze(make_trace(appends, BLOCK), GEOMETRY)
    assert result.hits.inside == 0
    assert {setting.key: setting.value for setting in advise(result, GEOMETRY)}["histate.interval"] == "final-only"


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["analyze", *arguments], env={"LMCACHE_CONFIG": "", "COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def log(tmp_path: Path) -> Path:
    tokens = list(range(4000))
    lines: list[object] = [
        {"session": "a", "time": 0, "tokens": tokens[:2000], "output_tokens": 5},
        {"session": "a", "time": 9, "tokens": tokens, "output_tokens": 5},
        "broken",
        {"session": "a", "time": 99, "tokens": [*tokens[:3000], *range(9000, 9900)], "output_tokens": 5},
    ]
    return write_lines(tmp_path / "requests.jsonl.gz", lines)


def test_the_command_prints_everything(log: Path, tmp_path: Path) -> None:
    saved = tmp_path / "out.yaml"
    code, output, errors = run(str(log), "--cpu", "96", "--disk", "150GiB", "--save", str(saved))
    assert code == 0
    for text in (
        "3 requests in 1 sessions",
        "inside a turn",
        "blocks of 528",
        "working set",
        "cpu: 96.0 GiB",
        "disk: ",
    ):
        assert text in output
    assert saved.read_text() in output
    assert f"{log}, line 3: skipped" in errors


def test_the_command_as_json(log: Path, tmp_path: Path) -> None:
    config = tmp_path / "cache.yaml"
    config.write_text("chunk_size: 1056\nmax_local_cpu_size: 1\nhistate:\n  interval: adaptive\n")
    code, output, _ = run(str(log), "--json", "-c", str(config), "--limit", "2")
    assert code == 0
    found = json.loads(output)
    assert (found["requests"], found["block_tokens"], found["trace_block_tokens"]) == (2, 1056, 16)
    assert found["tiers"]["cpu"]["bytes"] == GIB
    assert [setting["key"] for setting in found["recommended"]][1] == "max_local_cpu_size"
    assert "9000" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "there is no such file"),
        (["builtin:agent"], "there are only"),
        (["builtin:agents,sessions=1", "--model", "gpt"], "--kv-bytes and --snapshot-bytes"),
        (["builtin:agents,sessions=1", "--model", "qwen3-next-80b-a3b"], "--block-size"),
        (["builtin:agents,sessions=1", "--cpu", "lots"], "--cpu lots"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], message: str) -> None:
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors


def test_too_many_bad_lines_are_an_error(log: Path) -> None:
    code, _, errors = run(str(log), "--bad-lines", "0")
    assert code == 2
    assert "more than the limit of 0" in errors
