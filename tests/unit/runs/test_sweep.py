"""Sweeps: what is run, what is kept, and what survives failures, dead processes and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmcache_histate.cli.main import app
from lmcache_histate.cli.sweep_command import _policies
from lmcache_histate.geometry import GIB
from lmcache_histate.replay import sweep as sweep_module
from lmcache_histate.replay.comparison import CAPACITY_FACTOR
from lmcache_histate.replay.results import read_run
from lmcache_histate.replay.simulator import POLICIES, SimulationSettings, simulate
from lmcache_histate.replay.sweep import (
    ASIDE,
    CPU_SHARE,
    Capacity,
    Sweep,
    SweepPoint,
    TraceSource,
    capacity_of_factor,
    points_of,
    trace_digest,
    working_set_bytes,
)

TRACE = "builtin:rewriting-10,sessions=3,turns=4"
SOURCE = TraceSource((TRACE,))
SETTINGS = SimulationSettings(sessions=2)
ROOM = Capacity(4 * GIB, 6 * GIB)


def open_sweep(root: Path, **changes) -> Sweep:
    return Sweep(root, SOURCE, SOURCE.load(), replace(SETTINGS, **changes))


def run_cli(root: Path, *options: str):
    arguments = ["sweep", TRACE, "--output", str(root), "--sessions", "2", "--workers", "1", *options]
    return CliRunner().invoke(app, arguments)


def results(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.jsonl.gz"))


def test_points_are_a_product_and_the_long_ones_come_first():
    points = points_of(["vllm", "histate", "cpu"], [ROOM, capacity_of_factor(0.5, GIB)], range(2))
    assert len(points) == len(set(points)) == 12
    assert {point.policy for point in points[:4]} == {"histate"}
    assert points[0].label == "histate-4+6GiB-seed0"
    assert points[2].label == "histate-0.5x-seed0"


def test_a_factor_is_shared_between_memory_and_disk():
    capacity = capacity_of_factor(0.5, 100 * GIB)
    assert capacity.cpu_bytes + capacity.disk_bytes == pytest.approx(50 * GIB)
    assert capacity.cpu_bytes == pytest.approx(50 * GIB * CPU_SHARE)
    with pytest.raises(ValueError, match="cannot be"):
        capacity_of_factor(0.0, GIB)


def test_the_digest_of_a_trace_sees_every_part_of_it():
    trace = SOURCE.load()
    assert trace_digest(trace) == trace_digest(SOURCE.load())
    first = trace.requests[0]
    changed = [
        replace(first, think_s=first.think_s + 1),
        replace(first, output_tokens=first.output_tokens + 1),
        replace(first, hashes=first.hashes[::-1].copy()),
    ]
    digests = {trace_digest(replace(trace, requests=[other, *trace.requests[1:]])) for other in (first, *changed)}
    assert len(digests) == 4


def test_the_working_set_is_what_live_sessions_need():
    trace = SOURCE.load()
    one, all_three = (working_set_bytes(trace, replace(SETTINGS, sessions=count)) for count in (1, 3))
    block = SETTINGS.block_for(trace)
    longest = max(request.prompt_tokens for request in trace.requests)
    # At the end of a session nearly all of its next to last prompt is still needed, with one snapshot, and nothing else.
    assert one < longest // block * block * 32 * 1024 + 50 * 2**20
    assert one > longest / 2 * 32 * 1024
    assert one < all_three <= 3 * one * 1.05


def test_other_settings_and_other_code_set_results_aside_and_find_them_again(tmp_path, monkeypatch):
    first = open_sweep(tmp_path)
    (first.folder / "vllm-1x-seed0.jsonl.gz").touch()
    other_model = open_sweep(tmp_path, model="kimi-linear-48b-a3b")
    assert not first.folder.exists()
    assert [path.name for path in other_model.set_aside] == [f"{ASIDE}{first.folder.name}"]
    again = open_sweep(tmp_path)
    assert again.folder == first.folder
    assert (again.folder / "vllm-1x-seed0.jsonl.gz").exists()
    monkeypatch.setattr(sweep_module, "code_digest", lambda: "other")
    assert open_sweep(tmp_path).folder != first.folder
    assert open_sweep(tmp_path, cpu_bytes=1.0).folder == open_sweep(tmp_path).folder  # a point's own setting


def test_half_written_files_of_an_interrupted_sweep_are_removed(tmp_path):
    first = open_sweep(tmp_path)
    (first.folder / ".vllm-1x-seed0.jsonl.gz.partial").touch()
    open_sweep(tmp_path)
    assert list(first.folder.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_is_what_the_simulator_gives_and_is_continued_where_it_was(tmp_path):
    options = ("--policies", "vllm,cpu-disk", "--capacities", "0.5,4GiB+6GiB", "--seeds", "2")
    first = run_cli(tmp_path, *options)
    assert first.exit_code == 0, first.output
    assert "8 points, 0 of them done" in first.output
    files = results(tmp_path)
    assert len(files) == 8
    run = read_run(next(file for file in files if file.name == "cpu-disk-4+6GiB-seed1.jsonl.gz"))
    direct = simulate(
        SOURCE.load(),
        replace(SETTINGS, policy="cpu-disk", seed=1, cpu_bytes=ROOM.cpu_bytes, disk_bytes=ROOM.disk_bytes),
    )
    assert run.requests == direct.requests
    assert CAPACITY_FACTOR not in run.facts.settings
    half = read_run(next(file for file in files if file.name == "vllm-0.5x-seed0.jsonl.gz"))
    need = json.loads((files[0].parent / "sweep.json").read_text())["working_set_bytes"]
    assert half.facts.settings[CAPACITY_FACTOR] == 0.5
    assert half.facts.capacities["cpu"] + half.facts.capacities["disk"] == pytest.approx(need / 2)

    files[3].unlink()
    before = {file: file.stat().st_mtime_ns for file in results(tmp_path)}
    second = run_cli(tmp_path, *options)
    assert "8 points, 7 of them done" in second.output
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert results(tmp_path) == files


class Deadly:
    """Ends the process that unpickles it, as the kernel does when memory runs out."""

    def __reduce__(self):
        return os._exit, (9,)

    def __format__(self, spec):
        return "deadly"


@pytest.mark.slow
def test_a_point_that_fails_and_one_that_kills_its_process_leave_the_others_alone(tmp_path):
    sweep = open_sweep(tmp_path)
    good = [SweepPoint("vllm", ROOM, seed) for seed in range(3)]
    points = [good[0], SweepPoint("no-such-policy", ROOM, 0), SweepPoint(Deadly(), ROOM, 0), good[1], good[2]]
    done = []
    failures = sweep.run(points, 2, lambda point, failure: done.append(point))
    assert {
        failure.point.policy if isinstance(failure.point.policy, str) else "deadly": failure for failure in failures
    }.keys() == {
        "no-such-policy",
        "deadly",
    }
    reasons = {str(failure.point.policy): failure.reason for failure in failures}
    assert "no policy 'no-such-policy'" in reasons["no-such-policy"]
    assert any("its process died" in reason for reason in reasons.values())
    assert sorted(sweep.file(point).name for point in good) == sorted(path.name for path in sweep.folder.iterdir())
    assert len(done) == 5


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_the_next_run_goes_on(tmp_path):
    arguments = ["sweep", "builtin:agents,sessions=6", "--policies", "vllm,cpu,dense", "--capacities", "1GiB+1GiB"]
    command = [sys.executable, "-m", "lmcache_histate.cli.main", *arguments, "--seeds", "200", "--workers", "2"]
    command += ["--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 240
    while len(results(tmp_path)) < 2 and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output, _ = process.communicate(timeout=120)
    text = output.decode()
    assert process.returncode == 130, text
    assert "interrupted; the same command goes on from here" in text
    assert "Traceback" not in text
    deadline = time.monotonic() + 30
    while (alive := _group(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive
    kept = results(tmp_path)
    assert all(read_run(file).requests for file in kept)
    sweep = Sweep(tmp_path, *_source_and_trace("builtin:agents,sessions=6"), SimulationSettings())
    points = points_of(["vllm", "cpu", "dense"], [Capacity(GIB, GIB)], range(200))
    assert len(sweep.open_points(points)) == 600 - len(kept)


def _group(leader: int) -> list[str]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if group == str(leader) and state != "Z":  # a container's first process may not reap
                found.append(entry.name)
    return found


def _source_and_trace(name: str):
    source = TraceSource((name,))
    return source, source.load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policies", "vllm,belady"), "no policy belady; there are vllm"),
        (("--capacities", "half"), "'half': write a multiple of the working set (0.5) or CPU+DISK"),
        (("--capacities", "-1"), "cannot be"),
        (("--capacities", "1GiB+much"), "'much' is not a size"),
        (("--gpu", "abacus"), "no gpu 'abacus'"),
        (("--gpu-memory", "0"), "gpu_bytes must be positive"),
        (("--cost-model", "/nonexistent.yaml"), "/nonexistent.yaml"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(tmp_path, options, message):
    result = run_cli(tmp_path / "s", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "s").exists()


def test_words_stand_for_several_policies():
    assert _policies("all") == list(POLICIES)
    assert set(_policies("main")) | set(_policies("ablations")) == set(POLICIES)
    assert set(_policies("main")) & set(_policies("ablations")) == {"histate", "histate-paper"}
    assert _policies("vllm, main")[0] == "vllm"
    assert len(_policies("vllm,vllm")) == 1


def test_policies_are_listed_without_a_trace():
    result = CliRunner().invoke(app, ["sweep", "--list-policies"])
    assert result.exit_code == 0
    assert "histate" in result.output
    assert "LRU" in result.output
