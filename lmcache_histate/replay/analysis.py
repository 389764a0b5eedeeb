"""What a trace says about a cache for it: hits inside turns, recomputation, the working set, distances and gaps.

Pure functions of a trace and a model's geometry; `histate analyze` prints what they return. Times are the trace's own
(open loop): how many sessions are alive at a time is taken as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.replay.bounds import Reuse, measure_reuse
from lmcache_histate.replay.traces.model import Trace, TraceRequest
from lmcache_histate.replay.traces.numbering import NumberedBlocks, number_blocks
from lmcache_histate.scorer.interval import choose_interval, grid

Floats = npt.NDArray[np.float64]

DISTANCE_EDGES = (1, *(1 << power for power in range(10, 19)))
"""Bins of distances back, in tokens: 0, then up to each edge, then beyond the last."""
GAP_EDGES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Bins of gaps, in seconds."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of one quantity; all zero when there is nothing to measure."""

    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float] | Floats) -> Quantiles:
        """The quantiles of some values."""
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99, most = np.percentile(values, (50, 90, 99, 100)).tolist()
        return cls(p50, p90, p99, most)


class Bin(msgspec.Struct, frozen=True):
    """One bar of a histogram: values in [low, high); `high` is None for the last."""

    low: float
    high: float | None
    count: int


class Hits(msgspec.Struct, frozen=True):
    """Where requests hit, with nothing evicted and snapshots at the ends of prompts. The first four add up to all.

    Attributes:
        none: Requests that share no block with earlier ones.
        inside: Those whose match ends inside a turn: there is KV behind the last snapshot.
        append: Others that keep all of their stream's last prompt.
        other_end: Others, whose match ends where some earlier prompt ended: a shared prefix, a return to an old turn's end.
        matched_tokens: Tokens that some earlier prompt had.
        recomputed_ends: Of these, those behind the nearest snapshot when only ends of prompts have one.
        recomputed_junctions: The same, with snapshots where earlier prompts left a known prefix, too, as vLLM keeps them.
    """

    none: int
    inside: int
    append: int
    other_end: int
    matched_tokens: int
    recomputed_ends: int
    recomputed_junctions: int


class WorkingSet(msgspec.Struct, frozen=True):
    """Bytes that a later request still needs, over all requests (p50, p90, p99 and the most).

    Attributes:
        kv: KV blocks between their first and their last use.
        final_snapshots: One for each stream that goes on.
        historical_snapshots: All earlier ones of those streams, at `interval_tokens` and ends of prompts.
        live_streams: Streams that go on.
        interval_tokens: Interval taken: the paper's rule for the mean new part of a prompt.
        all_kv: KV of everything that was ever sent, once.
        all_snapshots: All snapshots of it.
    """

    kv: Quantiles
    final_snapshots: Quantiles
    historical_snapshots: Quantiles
    live_streams: Quantiles
    interval_tokens: int
    all_kv: float
    all_snapshots: float


class Analysis(msgspec.Struct, frozen=True):
    """Everything that `histate analyze` shows but the advice.

    Attributes:
        trace: Its name.
        requests: How many.
        streams: How many.
        sessions: How many.
        seconds: From the first request to the last.
        prompt_tokens: Of all prompts.
        output_tokens: Of all answers.
        prompts: Lengths of prompts.
        new: New tokens a request: what no earlier prompt had.
        trace_block_tokens: Tokens of a block in the trace.
        block_tokens: Tokens of a block taken for the engine: the multiple of the trace's that is nearest to the model's.
        bounds: Hit rates without limits on memory by placement, with the engine's blocks.
        trace_bounds: The same with the trace's blocks.
        hits: Where requests hit.
        working_set: What a cache must hold.
        distances: How far before the end of its stream's last prompt a request leaves it, in tokens.
        rewind_tokens: Of those that are not 0.
        gaps: Seconds between an answer and its stream's next request.
        gap_seconds: Their quantiles.
        notes: What the trace's reader had to assume.
    """

    trace: str
    requests: int
    streams: int
    sessions: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    prompts: Quantiles
    new: Quantiles
    trace_block_tokens: int
    block_tokens: int
    bounds: dict[str, float]
    trace_bounds: dict[str, float]
    hits: Hits
    working_set: WorkingSet
    distances: list[Bin]
    rewind_tokens: Quantiles
    gaps: list[Bin]
    gap_seconds: Quantiles
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def engine_trace(trace: Trace, block_tokens: int) -> Trace:
    """The trace with the multiple of its blocks that is nearest to an engine's block."""
    blocks = max(1, round(block_tokens / trace.block_tokens))
    return trace if blocks == 1 else trace.coarser(blocks)


def analyze(trace: Trace, geometry: CacheGeometry, on_progress: Callable[[int], None] | None = None) -> Analysis:
    """Measure a trace.

    Args:
        trace: Must have requests.
        geometry: Of the model; its block is approximated by the trace's (`engine_trace`).
        on_progress: Called with requests done since the last call; every request is counted three times.
    """
    fine = measure_reuse(trace, on_progress=on_progress)
    engine = engine_trace(trace, geometry.block_tokens)
    blocks = number_blocks(engine)
    reuse = measure_reuse(engine, blocks, on_progress=on_progress)
    distances, gaps = _walk_streams(engine)
    continued = distances[~np.isnan(distances)]
    requests = trace.requests
    new = reuse.prompt_tokens - reuse.kv * reuse.block_tokens
    return Analysis(
        trace=trace.name,
        requests=len(requests),
        streams=len(trace.streams),
        sessions=len({stream.session for stream in trace.streams.values()}),
        seconds=requests[-1].arrival_s,
        prompt_tokens=int(reuse.prompt_tokens.sum()),
        output_tokens=sum(request.output_tokens for request in requests),
        prompts=Quantiles.of(reuse.prompt_tokens.astype(np.float64)),
        new=Quantiles.of(new.astype(np.float64)),
        trace_block_tokens=trace.block_tokens,
        block_tokens=engine.block_tokens,
        bounds=reuse.bounds,
        trace_bounds=fine.bounds,
        hits=_hits(reuse, distances),
        working_set=_working_set(engine, blocks, geometry, reuse, on_progress),
        distances=_bins(continued, DISTANCE_EDGES),
        rewind_tokens=Quantiles.of(continued[continued > 0]),
        gaps=_bins(gaps, GAP_EDGES),
        gap_seconds=Quantiles.of(gaps),
        notes=trace.notes,
    )


def _hits(reuse: Reuse, distances: Floats) -> Hits:
    block = reuse.block_tokens
    none, inside = reuse.kv == 0, reuse.kv > reuse.ends
    append = (distances == 0) & ~none & ~inside
    return Hits(
        none=int(none.sum()),
        inside=int(inside.sum()),
        append=int(append.sum()),
        other_end=int((~none & ~inside & ~append).sum()),
        matched_tokens=int(reuse.kv.sum()) * block,
        recomputed_ends=int((reuse.kv - reuse.ends).sum()) * block,
        recomputed_junctions=int((reuse.kv - reuse.junctions).sum()) * block,
    )


def _walk_streams(trace: Trace) -> tuple[Floats, list[float]]:
    """Tokens before the end of its stream's last prompt at which each request leaves that (NaN: it is the first), and the
    gaps before all that are not first.
    """
    last: dict[str, TraceRequest] = {}
    distances, gaps = np.full(len(trace.requests), np.nan), []
    for index, request in enumerate(trace.requests):
        before = last.get(request.stream)
        last[request.stream] = request
        if before is None:
            continue
        gaps.append(request.think_s)
        distances[index] = (len(before.hashes) - shared_blocks(before, request)) * trace.block_tokens
    return distances, gaps


def shared_blocks(one: TraceRequest, other: TraceRequest) -> int:
    """Leading blocks that two prompts share. O(log blocks): a hash names the whole prefix before it."""
    low, high = 0, min(len(one.hashes), len(other.hashes))
    while low < high:
        middle = (low + high) // 2
        if one.hashes[middle] == other.hashes[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _bins(values: Sequence[float] | Floats, edges: Sequence[float]) -> list[Bin]:
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1).tolist()
    bounds = [0.0, *map(float, edges)]
    return [
        Bin(low, bounds[index + 1] if index + 1 < len(bounds) else None, counts[index])
        for index, low in enumerate(bounds)
    ]


def _working_set(
    trace: Trace,
    blocks: NumberedBlocks,
    geometry: CacheGeometry,
    reuse: Reuse,
    on_progress: Callable[[int], None] | None,
) -> WorkingSet:
    """Sweep over the requests: what lives from its first use to its last. O(blocks of all prompts)."""
    count, block = len(trace.requests), trace.block_tokens
    first, last = np.zeros(blocks.count, np.int32), np.full(blocks.count, -1, np.int32)
    ends: dict[str, tuple[int, int]] = {}
    for index, (request, prompt) in enumerate(zip(trace.requests, blocks.prompts, strict=True)):
        first[prompt[reuse.kv[index] :]] = index
        last[prompt] = index
        begun = ends.get(request.stream)
        ends[request.stream] = (index if begun is None else begun[0], index)
        if on_progress is not None:
            on_progress(1)
    used = last >= 0
    kv = _alive(first[used], last[used], count)
    new = reuse.prompt_tokens - reuse.kv * block
    spans = np.array(list(ends.values()), np.int64).reshape(-1, 2)
    streams = _alive(spans[:, 0], spans[:, 1], count)
    chosen = choose_interval(max(block, int(new.mean())), geometry.snapshot_tokens, block)
    interval = -(-chosen // block) * block
    saved = np.fromiter(
        (
            len(grid(request.prompt_tokens - int(fresh), request.prompt_tokens, interval, block))
            for request, fresh in zip(trace.requests, new, strict=True)
        ),
        np.int64,
        count,
    )
    final = np.fromiter((ends[request.stream][1] for request in trace.requests), np.int64, count)
    snapshots = _alive(np.arange(count), final, count, saved)
    size = geometry.snapshot_bytes
    return WorkingSet(
        kv=Quantiles.of(kv * geometry.kv_bytes(block)),
        final_snapshots=Quantiles.of(streams * size),
        historical_snapshots=Quantiles.of(np.maximum(0.0, snapshots - streams) * size),
        live_streams=Quantiles.of(streams),
        interval_tokens=interval,
        all_kv=geometry.kv_bytes(int(used.sum()) * block),
        all_snapshots=float(saved.sum()) * size,
    )


def _alive(
    starts: npt.NDArray[Any], ends: npt.NDArray[Any], count: int, weights: npt.NDArray[np.int64] | None = None
) -> Floats:
    """How many (or how much) of some spans are alive at each of `count` requests: from their start to before their end."""
    change = np.bincount(starts, weights, count + 1) - np.bincount(ends, weights, count + 1)
    return change.cumsum()[:count].astype(np.float64)
