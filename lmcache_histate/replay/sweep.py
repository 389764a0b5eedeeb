"""``histate sweep``: every policy at every capacity with every seed, one process a core, one result file a point.

A sweep's results lie in a folder of their own, named after the trace and a digest of everything that they depend on but
the point itself: the trace's content, the simulated machine, the code of the simulator and of the policies. A point whose
file is there is done; whatever else is found under the trace's name is of another trace, machine or code and is set aside.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

import lmcache_histate
from lmcache_histate.geometry import GIB, CacheGeometry
from lmcache_histate.replay.analysis import analyze
from lmcache_histate.replay.comparison import CAPACITY_FACTOR
from lmcache_histate.replay.results import write_run
from lmcache_histate.replay.simulator import SimulationSettings, simulate
from lmcache_histate.replay.simulator.hardware import MODELS
from lmcache_histate.replay.traces.load import load_trace
from lmcache_histate.replay.traces.model import Trace

SUFFIX = ".jsonl.gz"
ASIDE = ".old-"
"""Beginning of the names of folders that were set aside; reports leave hidden names out."""

CPU_SHARE = 96 / (96 + 150)
"""Share of a capacity that is CPU memory, the rest is disk: the paper's machine."""

_CODE = (
    *("geometry.py", "protocol.py", "scorer", "state_store", "connector", "replay/simulator", "replay/traces"),
    *("backends/segments.py", "backends/limits.py"),
)
"""What of this package a result depends on."""


@dataclass(frozen=True)
class Capacity:
    """Space below the GPU.

    Attributes:
        cpu_bytes: CPU memory.
        disk_bytes: Disk.
        factor: Both together as a multiple of the working set, if it was given so.
    """

    cpu_bytes: float
    disk_bytes: float
    factor: float | None = None

    @property
    def label(self) -> str:
        """For file names and messages."""
        if self.factor is not None:
            return f"{self.factor:g}x"
        return f"{self.cpu_bytes / GIB:g}+{self.disk_bytes / GIB:g}GiB"


@dataclass(frozen=True)
class SweepPoint:
    """One simulation.

    Attributes:
        policy: Its name.
        capacity: Space below the GPU.
        seed: Of the order of sessions.
    """

    policy: str
    capacity: Capacity
    seed: int

    @property
    def label(self) -> str:
        """For file names and messages."""
        return f"{self.policy}-{self.capacity.label}-seed{self.seed}"


@dataclass(frozen=True)
class Failure:
    """A point that failed.

    Attributes:
        point: Which.
        reason: In one line.
        details: A traceback, or empty.
    """

    point: SweepPoint
    reason: str
    details: str = ""


@dataclass(frozen=True)
class TraceSource:
    """Where every process gets the trace from.

    Attributes:
        paths: As `load_trace` takes them.
        limit: Most requests.
    """

    paths: tuple[str, ...]
    limit: int | None = None

    def load(self, on_progress: Callable[[int], None] | None = None) -> Trace:
        """Read the trace.

        Raises:
            TraceError: As `load_trace`.
        """
        return load_trace(list(self.paths), limit=self.limit, on_progress=on_progress)


def points_of(policies: Sequence[str], capacities: Sequence[Capacity], seeds: Sequence[int]) -> list[SweepPoint]:
    """All points; those that take longest (HiState's own policies) come first, so that all cores end together."""
    policies = sorted(policies, key=lambda policy: not policy.startswith("histate"))
    return [SweepPoint(policy, capacity, seed) for policy in policies for capacity in capacities for seed in seeds]


def trace_digest(trace: Trace) -> str:
    """Fixed by everything in a trace that a simulation depends on; the same in every process. O(blocks)."""
    digest = xxhash.xxh3_128(f"{trace.name}/{trace.block_tokens}".encode())
    for request in trace.requests:
        digest.update(msgspec.msgpack.encode((request.stream, request.arrival_s, request.think_s)))
        digest.update(msgspec.msgpack.encode((request.prompt_tokens, request.output_tokens)))
        digest.update(request.hashes.tobytes())
    for key, stream in trace.streams.items():
        digest.update(msgspec.msgpack.encode((key, stream.session, stream.after, stream.start_s)))
    return digest.hexdigest()


def code_digest() -> str:
    """Fixed by the source of the simulator, of the policies and of what they use."""
    root = Path(lmcache_histate.__file__).parent
    digest = xxhash.xxh3_128()
    for name in _CODE:
        place = root / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()


def working_set_bytes(trace: Trace, settings: SimulationSettings) -> float:
    """The most bytes of KV and newest snapshots that later requests still need, when sessions run as they will be.

    The unlimited cache is simulated for the times of the requests; a trace's own are those of another machine, with other
    sessions at once.

    Args:
        trace: As it was read.
        settings: Of the sweep; policy, seed and capacities do not matter.
    """
    run = simulate(trace, replace(settings, policy="unlimited", seed=0))
    times: dict[str, list[float]] = {}
    for result in run.requests:
        times.setdefault(result.stream, []).append(result.sent_s)
    sent = {stream: iter(found) for stream, found in times.items()}
    requests = [replace(request, arrival_s=next(sent[request.stream])) for request in trace.requests]
    retimed = Trace(trace.name, trace.block_tokens, sorted(requests, key=lambda r: r.arrival_s), trace.streams)
    model = MODELS[settings.model]
    geometry = CacheGeometry(settings.block_for(trace), model.kv_bytes_per_token, model.snapshot_bytes)
    need = analyze(retimed, geometry).working_set
    return need.kv.most + need.final_snapshots.most


class Sweep:
    """A sweep's folder and its points."""

    def __init__(self, root: Path, source: TraceSource, trace: Trace, settings: SimulationSettings) -> None:
        """Open or begin a sweep.

        Args:
            root: Holds the folders of sweeps; made if it is not there.
            source: Of the trace.
            trace: What `source` loads.
            settings: Of all points but for policy, capacities and seed.
        """
        self._source = source
        self._settings = settings
        common = {key: value for key, value in asdict(settings).items() if key not in _OF_A_POINT}
        key = json.dumps([trace_digest(trace), code_digest(), common], sort_keys=True)
        digest = xxhash.xxh3_64_hexdigest(key.encode())[:12]
        self._stem = re.sub(r"[^A-Za-z0-9.]+", "-", trace.name).strip("-") or "trace"
        self.folder = root / f"{self._stem}-{digest}"
        self.set_aside = self._set_others_aside(root)
        aside = root / f"{ASIDE}{self.folder.name}"
        if aside.is_dir() and not self.folder.exists():
            aside.rename(self.folder)  # the same settings again
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self.folder.glob(f".*{SUFFIX}.partial"):
            partial.unlink()
        self._facts = {"trace": trace.name, "requests": len(trace.requests), "settings": common}

    def working_set_bytes(self, trace: Trace) -> float:
        """The working set, measured once and then kept with the results."""
        file = self.folder / "sweep.json"
        try:
            found = json.loads(file.read_text())["working_set_bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            found = working_set_bytes(trace, self._settings)
            file.write_text(json.dumps({**self._facts, "working_set_bytes": found}, indent=1) + "\n")
        return float(found)

    def file(self, point: SweepPoint) -> Path:
        """The result file of a point."""
        return self.folder / f"{point.label}{SUFFIX}"

    def open_points(self, points: Sequence[SweepPoint]) -> list[SweepPoint]:
        """Those that have no result yet."""
        return [point for point in points if not self.file(point).exists()]

    def run(
        self,
        points: Sequence[SweepPoint],
        workers: int,
        on_done: Callable[[SweepPoint, Failure | None], object] | None = None,
    ) -> list[Failure]:
        """Simulate points, `workers` at a time; a failure ends its point only.

        An interruption (Ctrl-C) ends the processes; results that are there stay, and no file is half written.

        Args:
            points: Without results, see `open_points`.
            workers: Processes.
            on_done: Called after each point.

        Returns:
            What failed.
        """
        failures = []
        crashed: list[SweepPoint] = []

        def done(point: SweepPoint, failure: Failure | None) -> None:
            if failure is not None:
                failures.append(failure)
            if on_done is not None:
                on_done(point, failure)

        self._run_pool(points, workers, done, crashed)
        # A process that dies takes its whole pool along. One at a time, it is clear whose fault it is.
        for point in list(crashed):
            again: list[SweepPoint] = []
            self._run_pool([point], 1, done, again)
            if again:
                done(point, Failure(point, "its process died; was there enough memory?"))
        return failures

    def _run_pool(
        self,
        points: Sequence[SweepPoint],
        workers: int,
        done: Callable[[SweepPoint, Failure | None], object],
        crashed: list[SweepPoint],
    ) -> None:
        """Run points in pools of processes; points that were running when a process died are added to `crashed`."""
        waiting = deque(points)
        while waiting:
            running: dict[Future[Failure | None], SweepPoint] = {}
            with _pool(min(workers, len(waiting)), self._source) as pool:
                try:
                    while waiting or running:
                        while waiting and len(running) < workers:
                            point = waiting[0]
                            with _interrupts_held_back():  # a process that is started here never sees Ctrl-C
                                future = pool.submit(_simulate_point, point, self._settings, self.file(point))
                            running[future] = waiting.popleft()
                        finished, _ = wait(running, return_when=FIRST_COMPLETED)
                        for future in finished:
                            failure = future.result()
                            done(running.pop(future), failure)
                except BrokenProcessPool:
                    crashed += running.values()

    def _set_others_aside(self, root: Path) -> list[Path]:
        moved = []
        pattern = re.compile(re.escape(self._stem) + r"-[0-9a-f]{12}")
        for other in sorted(root.glob(f"{self._stem}-*")):
            if pattern.fullmatch(other.name) and other.name != self.folder.name and other.is_dir():
                target = root / f"{ASIDE}{other.name}"
                if not target.exists():
                    other.rename(target)
                    moved.append(target)
        return moved


_OF_A_POINT = ("policy", "cpu_bytes", "disk_bytes", "seed")
"""Settings that differ between the points of a sweep."""


@contextmanager
def _pool(workers: int, source: TraceSource) -> Iterator[ProcessPoolExecutor]:
    """Processes that have the trace; on an exception they end at once instead of finishing their points."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker, (source,))
    try:
        yield pool
    except BaseException:
        processes: list[Any] = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        raise
    pool.shutdown()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT; processes that are started meanwhile inherit that for good."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


_trace: Trace | None = None
"""The trace of a worker process."""


def _begin_worker(source: TraceSource) -> None:
    global _trace
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _trace = source.load()


def _simulate_point(point: SweepPoint, settings: SimulationSettings, file: Path) -> Failure | None:
    assert _trace is not None
    try:
        chosen = replace(
            settings,
            policy=point.policy,
            cpu_bytes=point.capacity.cpu_bytes,
            disk_bytes=point.capacity.disk_bytes,
            seed=point.seed,
        )
        run = simulate(_trace, chosen)
        if point.capacity.factor is not None:
            facts = msgspec.structs.replace(
                run.facts, settings={**run.facts.settings, CAPACITY_FACTOR: point.capacity.factor}
            )
            run = msgspec.structs.replace(run, facts=facts)
        write_run(file, run)
    except Exception as error:
        return Failure(point, f"{type(error).__name__}: {error}", traceback.format_exc())
    return None


def capacity_of_factor(factor: float, working_set: float) -> Capacity:
    """CPU memory and disk together as a multiple of the working set.

    Args:
        factor: Above 0.
        working_set: Bytes.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"a capacity of {factor:g} working sets cannot be")
    total = factor * working_set
    return Capacity(total * CPU_SHARE, total * (1 - CPU_SHARE), factor)
