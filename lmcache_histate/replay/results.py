"""What a run of a trace gave, simulated or live: one format, so that reports draw both side by side.

A file is JSON lines (gzip if its name ends in `.gz`): the run's facts, then a line for each request, in order of arrival.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

FORMAT = "histate-run-1"


class RequestResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Token counts are of its prompt; `hit_tokens` were truly not computed again.

    The prompt is `hit_tokens`, then what was computed: what no cache could have had
    (`prompt_tokens - reusable_tokens`) and three kinds of recomputed tokens, which add up to
    `reusable_tokens - hit_tokens`. A live endpoint does not say which kind: there they are `recomputed_unknown`.
    """

    stream: str
    session: str
    sent_s: float
    """Seconds from the start of the run."""
    ttft_s: float
    """Seconds from sending to the first output token."""
    seconds: float
    """Seconds from sending to the last output token."""
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    reusable_tokens: int
    """Longest prefix, in tokens, that earlier requests sent or got as an answer: what an unlimited cache with a snapshot
    at every block would hit."""
    disk_tokens: int = 0
    """Of the hit tokens, those whose KV was read from disk."""
    remote_tokens: int = 0
    """Of the hit tokens, those whose KV was fetched from a remote tier."""
    recomputed_kv_gone: int = 0
    """Computed again because KV that had been cached was evicted."""
    recomputed_snapshot_gone: int = 0
    """Computed again, with the KV cached, because a snapshot that had been saved was evicted."""
    recomputed_never_saved: int = 0
    """Computed again, with the KV cached, because no snapshot was ever saved closer."""
    recomputed_unknown: int = 0
    """Computed again, for a reason that the server does not tell."""
    error: str = ""
    """Why a live request failed; its other figures then mean nothing."""
    answer: str = ""
    """What a live server answered."""


class TierSample(msgspec.Struct, frozen=True):
    """Bytes in every tier at one moment: `kv` and `snapshots` by tier name (`gpu`, `cpu`, `disk`, `remote`)."""

    at_s: float
    kv: dict[str, float]
    snapshots: dict[str, float]


class EvictionCount(msgspec.Struct, frozen=True):
    """What left a tier for good, and whether a later request would have used it."""

    tier: str
    kind: str
    """`kv` or `snapshot`."""
    objects: int
    nbytes: float
    missed_later: int
    """Of the objects, those that a later request wanted."""


class RunFacts(msgspec.Struct, frozen=True):
    """What was run."""

    policy: str
    """Name of the policy, or of the live server."""
    trace: str
    simulated: bool
    seed: int = 0
    capacities: dict[str, float] = {}
    """Bytes per tier."""
    settings: dict[str, Any] = {}
    """Everything else that fixes the run: cost model, sessions at once, policy parameters."""
    seconds: float = 0.0
    """Length of the run, on its own clock."""
    occupancy: list[TierSample] = []
    evictions: list[EvictionCount] = []
    format: str = FORMAT


class Run(msgspec.Struct, frozen=True):
    """One run."""

    facts: RunFacts
    requests: list[RequestResult]


class ResultError(ValueError):
    """A result file that cannot be read; the message says where and why."""


def write_run(path: Path, run: Run) -> None:
    """Write a run; the file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with _open(partial, "wb", packed=path.suffix == ".gz") as file:
        for line in _lines(run):
            file.write(line + b"\n")
    partial.replace(path)


def read_run(path: Path) -> Run:
    """Read a run.

    Raises:
        ResultError: Not such a file, or a line that is broken.
    """
    number = 1
    try:
        with _open(path, "rb", packed=path.suffix == ".gz") as file:
            facts = msgspec.json.decode(file.readline(), type=RunFacts)
            if facts.format != FORMAT:
                raise ResultError(f"{path}: format {facts.format!r}, this version reads {FORMAT!r}")
            decoder = msgspec.json.Decoder(RequestResult)
            requests = []
            for line in file:
                number += 1
                requests.append(decoder.decode(line))
    except (msgspec.MsgspecError, EOFError, gzip.BadGzipFile) as error:
        raise ResultError(f"{path}, line {number}: not a HiState result: {error}") from error
    return Run(facts, requests)


def _lines(run: Run) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    yield encoder.encode(run.facts)
    yield from map(encoder.encode, run.requests)


def _open(path: Path, mode: str, packed: bool) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, mode) if packed else path.open(mode)  # type: ignore[return-value]
