"""Small files in the formats of real traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_histate.replay.traces.build import TraceBuilder, mixed
from lmcache_histate.replay.traces.model import Trace


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    """JSON lines, packed if the name says so; a `str` or `bytes` goes in as it is."""
    data = b"".join(_encoded(line) + b"\n" for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _encoded(line: object) -> bytes:
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


def weka_request(t: float, tokens: int, out: int, ids: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": list(ids), **more}


def weka_session(name: str, requests: Sequence[dict[str, Any]], block: int = 64) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": block, "hash_id_scope": "local", "requests": list(requests)}


def make_trace(prompts: Iterable[tuple[str, Sequence[int]]], block: int = 100) -> Trace:
    """A trace of (stream, path) with a request a second; equal beginnings of paths are equal prefixes."""
    names: dict[tuple[int, ...], int] = {}
    builder = TraceBuilder("made", block)
    for second, (stream, path) in enumerate(prompts):
        numbers = [names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))]
        hashes = mixed(np.array(numbers, np.uint64))
        builder.add(stream, float(second), len(path) * block, 1, hashes, answered_s=float(second))
    return builder.finish()
