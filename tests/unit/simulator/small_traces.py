"""Traces that can be followed by hand, and strategies for random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from hypothesis import strategies as st

from lmcache_histate.geometry import KIB, MIB
from lmcache_histate.replay.simulator import SimulationSettings
from lmcache_histate.replay.simulator.hardware import StepTimes
from lmcache_histate.replay.traces.model import Stream, Trace, TraceRequest

BLOCK = 576
"""Tokens: qwen3.5-9b's KV of one block is 18 MiB, its state 49.1 MiB or three blocks of the GPU's pool."""
KV_BYTES, STATE_BYTES = BLOCK * 32 * KIB, 49.1 * MIB
TIMES = StepTimes(step_s=0.01, weights_s=0.0, token_s=1e-5, attention_s=0.0, context_s=0.0, state_s=0.0)


def hashes(*parts: tuple[str, int]) -> np.ndarray:
    """Chained names of blocks: each part is a text and a number of blocks."""
    chain, names = 0, []
    for text, count in parts:
        for number in range(count):
            chain = hash_of(f"{chain}/{text}/{number}")
            names.append(chain)
    return np.array(names, dtype=np.uint64)


def hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def request(stream: str, names: np.ndarray, output: int = 10, think_s: float = 1.0, extra: int = 1) -> TraceRequest:
    """A request whose prompt is whole blocks and `extra` tokens."""
    return TraceRequest(stream, 0.0, think_s, len(names) * BLOCK + extra, output, names)


def trace(requests: Sequence[TraceRequest], name: str = "by hand") -> Trace:
    ordered = [
        TraceRequest(one.stream, float(index), one.think_s, one.prompt_tokens, one.output_tokens, one.hashes)
        for index, one in enumerate(requests)
    ]
    return Trace(name, BLOCK, ordered, {one.stream: Stream(one.stream) for one in ordered})


def settings(policy: str, **changes: object) -> SimulationSettings:
    """Small tiers: the pool of the GPU takes 84 blocks."""
    values: dict[str, object] = {
        "policy": policy,
        "gpu_bytes": 84 * KV_BYTES,
        "cpu_bytes": 40 * KV_BYTES,
        "disk_bytes": 80 * KV_BYTES,
        "block_tokens": BLOCK,
        "sessions": 4,
    }
    return SimulationSettings(**{**values, **changes})  # type: ignore[arg-type]


@st.composite
def random_traces(draw: st.DrawFn) -> Trace:
    """Sessions that append, rewind, fork off a common prefix and start anew."""
    requests: list[TraceRequest] = []
    for session in range(draw(st.integers(1, 5))):
        parts: list[tuple[str, int]] = [("common", draw(st.integers(0, 4)))]
        for turn in range(draw(st.integers(1, 6))):
            move = draw(st.sampled_from(["append", "append", "append", "rewind", "reset"]))
            if move == "rewind" and len(parts) > 1:
                parts = parts[: draw(st.integers(1, len(parts) - 1))]
            elif move == "reset":
                parts = parts[:1]
            parts = [*parts, (f"s{session}t{turn}", draw(st.integers(1, 5)))]
            requests.append(
                request(
                    f"s{session}",
                    hashes(*parts),
                    output=draw(st.sampled_from([1, 40, 600, 1500])),
                    think_s=draw(st.sampled_from([0.0, 0.2, 5.0, 90.0])),
                    extra=draw(st.sampled_from([0, 1, 300])),
                )
            )
    order = draw(st.permutations(range(len(requests))))
    by_stream: dict[str, list[TraceRequest]] = {}
    for one in requests:
        by_stream.setdefault(one.stream, []).append(one)
    mixed = [by_stream[requests[index].stream].pop(0) for index in order]
    return trace(mixed)
