"""`simulate`: one policy on one trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.replay.results import Run, RunFacts, TierSample
from lmcache_histate.replay.simulator.engine import Engine
from lmcache_histate.replay.simulator.gpu_pool import BlockPool
from lmcache_histate.replay.simulator.hardware import (
    DEFAULT_CPU_BYTES,
    DEFAULT_DISK_BYTES,
    DEFAULT_GPU_BYTES,
    GPUS,
    MODELS,
    Link,
    StepTimes,
)
from lmcache_histate.replay.simulator.ledger import Ledger
from lmcache_histate.replay.simulator.objects import SNAPSHOT, kind_of
from lmcache_histate.replay.simulator.policies.base import Links, NoTiers, Site, Tiers
from lmcache_histate.replay.simulator.policies.registry import POLICIES
from lmcache_histate.replay.simulator.prompts import PreparedTrace, Prompt
from lmcache_histate.replay.simulator.sessions import Sessions
from lmcache_histate.replay.traces.model import Trace

TYPICAL_BLOCK_TOKENS = 576
"""Block of Qwen3.5-9B in the paper's set-up; vLLM 0.32 takes 528."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What is simulated.

    Attributes:
        policy: A name in `POLICIES`.
        gpu_bytes, cpu_bytes, disk_bytes, remote_bytes: Capacities; 0 for a tier that is absent.
        sessions: Most sessions at once.
        seed: Of the order in which sessions begin; 0 is the trace's order.
        model: A name in `MODELS`.
        gpu: A name in `GPUS`.
        block_tokens: Tokens of an engine block, a multiple of the trace's; None for the multiple nearest to 576.
        step_tokens: Token budget of a scheduler step.
        max_requests: Most requests that run at once.
        pcie_bytes_per_second: Of the GPU's link to CPU memory, each way.
        disk_bytes_per_second: Of the SSD, each way.
        remote_bytes_per_second: Of the remote tier, each way.
        times: A measured cost model, instead of the one estimated from `model` and `gpu`.
    """

    policy: str = "histate"
    gpu_bytes: float = DEFAULT_GPU_BYTES
    cpu_bytes: float = DEFAULT_CPU_BYTES
    disk_bytes: float = DEFAULT_DISK_BYTES
    remote_bytes: float = 0.0
    sessions: int = 32
    seed: int = 0
    model: str = "qwen3.5-9b"
    gpu: str = "h100"
    block_tokens: int | None = None
    step_tokens: int = 8192
    max_requests: int = 256
    pcie_bytes_per_second: float = 64e9
    disk_bytes_per_second: float = 5e9
    remote_bytes_per_second: float = 1e9
    times: StepTimes | None = None

    def __post_init__(self) -> None:
        _check_name("policy", self.policy, POLICIES)
        _check_name("model", self.model, MODELS)
        _check_name("gpu", self.gpu, GPUS)
        if self.sessions < 1:
            raise ValueError(f"sessions must be at least 1, got {self.sessions}")
        if self.gpu_bytes <= 0:
            raise ValueError(f"gpu_bytes must be positive, got {self.gpu_bytes}")

    def block_for(self, trace: Trace) -> int:
        """Tokens of an engine block for this trace.

        Raises:
            ValueError: `block_tokens` is no multiple of the trace's block.
        """
        unit = trace.block_tokens
        if self.block_tokens is None:
            return unit * max(1, round(TYPICAL_BLOCK_TOKENS / unit))
        if self.block_tokens % unit:
            raise ValueError(
                f"block_tokens {self.block_tokens} is no multiple of {unit}, the block of trace {trace.name}: "
                f"write {unit * max(1, round(self.block_tokens / unit))}, for example"
            )
        return self.block_tokens


def _check_name(what: str, name: str, known: object) -> None:
    assert isinstance(known, dict)
    if name not in known:
        raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")


def simulate(
    trace: Trace, settings: SimulationSettings | None = None, progress: Callable[[int], None] | None = None
) -> Run:
    """Run one policy over a trace. The same arguments give the same run, but for `RunFacts.settings["wall_seconds"]`.

    Args:
        trace: As a reader gave it.
        settings: What is simulated.
        progress: Called with 1 for each request that was answered.

    Raises:
        ValueError: Settings that cannot be.
        StuckError: A prompt that does not fit the GPU's pool.
    """
    chosen = settings or SimulationSettings()
    began = time.perf_counter()
    policy, model = POLICIES[chosen.policy], MODELS[chosen.model]
    block = chosen.block_for(trace)
    prepared = PreparedTrace(trace.coarser(block // trace.block_tokens) if block != trace.block_tokens else trace)
    geometry = CacheGeometry(block, model.kv_bytes_per_token, model.snapshot_bytes)
    times = chosen.times or StepTimes.of(model, GPUS[chosen.gpu])
    tiers: Tiers = NoTiers()

    def holds(key: int) -> bool:
        return pool.holds(key) or tiers.holds(key)

    def left_gpu(key: int) -> None:
        ledger.left("gpu", key, geometry.snapshot_bytes if kind_of(key) == SNAPSHOT else geometry.chunk_bytes)

    ledger = Ledger(prepared.nodes, holds)
    state_blocks = -int(-geometry.snapshot_bytes // geometry.chunk_bytes)
    blocks = int(chosen.gpu_bytes // geometry.chunk_bytes)
    halves = (blocks - blocks // 2, blocks // 2) if policy.split_pool else (blocks, None)
    pool = BlockPool(halves[0], state_blocks, left_gpu, halves[1])
    links = Links(
        Link(chosen.pcie_bytes_per_second),
        Link(chosen.disk_bytes_per_second),
        Link(chosen.disk_bytes_per_second),
        Link(chosen.remote_bytes_per_second),
        Link(chosen.remote_bytes_per_second),
    )

    def later(when: float, action: Callable[[float], None]) -> None:
        engine.later(when, action)

    site = Site(
        prepared,
        geometry,
        times,
        chosen.step_tokens,
        chosen.gpu_bytes,
        chosen.cpu_bytes,
        chosen.disk_bytes,
        chosen.remote_bytes,
        links,
        ledger,
        later,
    )
    capture, tiers = policy.build(site)

    def answered(prompt: Prompt, now: float) -> None:
        if progress is not None:
            progress(1)
        sessions.answered(prompt, now)

    engine = Engine(
        times,
        block,
        chosen.step_tokens,
        chosen.max_requests,
        pool,
        capture,
        tiers,
        ledger,
        answered,
        max(1, len(prepared.prompts) // 256),
        cuts_steps=policy.online,
    )

    def send(prompt: Prompt, when: float) -> None:
        engine.later(when, lambda now: engine.send(prompt, now))

    sessions = Sessions(prepared, chosen.sessions, chosen.seed, send)
    engine.run()
    chunk = geometry.chunk_bytes
    facts = RunFacts(
        policy=chosen.policy,
        trace=trace.name,
        simulated=True,
        seed=chosen.seed,
        capacities={
            "gpu": chosen.gpu_bytes,
            "cpu": chosen.cpu_bytes,
            "disk": chosen.disk_bytes,
            "remote": chosen.remote_bytes,
        },
        settings={
            **{key: value for key, value in asdict(chosen).items() if key not in ("policy", "seed")},
            "block_tokens": block,
            "times": asdict(times),
            "disk_bytes_written": links.disk_write.nbytes,
            "disk_bytes_read": links.disk_read.nbytes,
            "wall_seconds": time.perf_counter() - began,
        },
        seconds=engine.now,
        occupancy=[_in_bytes(sample, chunk) for sample in engine.samples],
        evictions=ledger.evictions(),
    )
    return Run(facts, [result for _, result in sorted(engine.results)])


def _in_bytes(sample: TierSample, chunk: float) -> TierSample:
    """The GPU's blocks as bytes."""
    return TierSample(
        sample.at_s,
        {**sample.kv, "gpu": sample.kv["gpu"] * chunk},
        {**sample.snapshots, "gpu": sample.snapshots["gpu"] * chunk},
    )
