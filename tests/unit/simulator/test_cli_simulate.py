"""``histate simulate`` on a built-in workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_histate.cli.main import app
from lmcache_histate.replay.results import read_run
from lmcache_histate.replay.simulator import POLICIES

ARGUMENTS = ["simulate", "builtin:agents", "--requests", "120", "--cpu", "6GiB", "--disk", "8GiB", "--gpu-memory", "20"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.output


def test_a_table_of_the_policies_and_result_files(tmp_path: Path) -> None:
    names = ("cpu-disk", "histate", "histate-no-disk-snapshots", "unlimited")
    told = run(*ARGUMENTS, *(f"--policy={name}" for name in names), "-o", str(tmp_path / "runs"))
    rows = [row for line in told.splitlines() if (row := line.split()) and row[0] in names]
    # Two tables, of all and of reuse-sensitive requests; nothing is shortened in a terminal of 80 characters.
    assert [row[0] for row in rows] == [*names, *names]
    assert rows[3][2] == rows[7][1] == "100.0%"
    assert "…" not in told
    assert "GPU 20 GiB, CPU 6 GiB, disk 8 GiB" in " ".join(told.split())
    for name in names:
        written = read_run(tmp_path / "runs" / f"{name}-seed0.jsonl.gz")
        assert written.facts.policy == name
        assert len(written.requests) == 120


def test_json_for_programs() -> None:
    told = json.loads(run(*ARGUMENTS, "--policy", "vllm", "--policy", "cpu-disk", "--json", "--seed", "2"))
    assert told["requests"] == 120
    vllm, cpu_disk = told["policies"]
    assert 0 <= vllm["hit_rate"] <= cpu_disk["hit_rate"] <= 1
    assert vllm["ttft_s"]["p50"] <= vllm["ttft_s"]["p95"] <= vllm["ttft_s"]["p99"]
    assert sum(cpu_disk["recomputed_tokens"].values()) > 0
    assert cpu_disk["disk_bytes_written"] > vllm["disk_bytes_written"] == 0


def test_the_policies_are_listed() -> None:
    told = run("simulate", "--list-policies")
    assert [line.split()[0] for line in told.splitlines()] == list(POLICIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "--policy: no policy 'best'; there are vllm, cpu"),
        (["--cpu", "much"], "--cpu: "),
        (["--gpu", "h900"], "no gpu 'h900'; there are a100"),
        (["--block-size", "100"], "block_tokens 100 is no multiple of"),
        (["--gpu-memory", "0.5"], "Give the GPU more memory"),
        (["--cost-model", "/nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.output + result.stderr


def test_a_missing_trace_is_explained() -> None:
    assert "/no/such/trace" in run("simulate", "/no/such/trace", code=2)
